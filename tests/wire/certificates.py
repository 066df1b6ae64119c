"""PEM files for tests: certificates that sign themselves, or that an authority has signed."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from cerebro_hydra.wire.credentials import TLS

_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)  # slow to make: one for all


@dataclass(frozen=True)
class Made:
    certificate: x509.Certificate
    key: Any

    def files(self, folder: Path, *chain: Made, passphrase: bytes | None = None) -> TLS:
        """Write the certificate, followed by those that signed it, and its key."""
        pem = serialization.Encoding.PEM
        encryption = (
            serialization.BestAvailableEncryption(passphrase)
            if passphrase
            else serialization.NoEncryption()
        )
        certificate, key = folder / "certificate.pem", folder / "key.pem"
        certificate.write_bytes(
            b"".join(made.certificate.public_bytes(pem) for made in (self, *chain))
        )
        key.write_bytes(self.key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption))
        return TLS(certificate=certificate, key=str(key))


def make(
    *hosts: str, by: Made | None = None, days: int = 30, authority: bool = False, key: Any = _KEY
) -> Made:
    """A certificate for some hosts that is valid for so many days from now."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test")])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by.certificate.subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=60))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    if hosts:
        names = [
            x509.IPAddress(ipaddress.ip_address(host)) if host[-1].isdigit() else x509.DNSName(host)
            for host in hosts
        ]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return Made(builder.sign(by.key if by else key, hashes.SHA256()), key)
