"""Makes what a run's servers and clients show each other: a secret, with TLS a certificate too."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import ssl
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cerebro_hydra.errors import ConfigurationError, SetupError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

_OWN_NAME = "cerebro-hydra"
_ONE_DAY = datetime.timedelta(days=1)
_LIFETIME = datetime.timedelta(days=365)


@dataclass(frozen=True)
class TLS:
    """Names your own certificate for a run's connections, as PEM files that the driver reads.

    Every server of the run uses this certificate, and every client accepts this one alone.
    Therefore it may name any host, and no authority is asked about it.

    Args:
        certificate: path of the certificate, or of a chain that begins with it.
        key: path of its private key, without a passphrase.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]


@dataclass(frozen=True)
class Certificate:
    """Holds a certificate with its private key, both as PEM, and a host name it is valid for."""

    pem: str
    key: str = field(repr=False)
    name: str

    def server_context(self) -> ssl.SSLContext:
        """Return what a server of this certificate needs."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # The module loads keys from files alone; this one is in memory, so no disk gets the key.
        with open(os.memfd_create("certificate"), "w") as file:
            file.write(self.key + self.pem)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return what a client needs that accepts a server of this certificate, and no other."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust needs no authority above it
        context.load_verify_locations(cadata=self.pem)
        return context


@dataclass(frozen=True)
class Credentials:
    """Holds the secret of a run, and its certificate if its connections use TLS.

    Raises:
        ConfigurationError: the secret is empty.
    """

    secret: str = field(repr=False)
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        """Refuse an empty secret, which anybody could guess."""
        if not self.secret:
            raise ConfigurationError("the run's secret is empty; use new_credentials()")

    def to_json(self) -> dict[str, Any]:
        """Return all of it, the key included, for the one message that starts an agent."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Credentials:
        """Return what `to_json` described."""
        certificate = value["certificate"]
        return cls(value["secret"], None if certificate is None else Certificate(**certificate))

    def certificate_for(self, uri: str) -> Certificate | None:
        """Return the certificate that the server at `uri` must show; None if it uses no TLS.

        Raises:
            ConfigurationError: one side uses TLS and the other does not.
        """
        server_uses_tls = urlsplit(uri).scheme.endswith("tls")
        if server_uses_tls != (self.certificate is not None):
            uses, has = ("TLS", "no") if server_uses_tls else ("no TLS", "a")
            raise ConfigurationError(
                f"the server at {uri} uses {uses}, and its client has {has} certificate; give both "
                "the same credentials"
            )
        return self.certificate


def new_secret() -> str:
    """Return a fresh secret of 256 random bits, as hex."""
    return secrets.token_hex(32)


def new_credentials(tls: bool | TLS = False) -> Credentials:
    """Return the credentials of a new run.

    Args:
        tls: True makes a certificate for this run alone; a `TLS` names the files of one.

    Raises:
        ConfigurationError: `tls` is something else, or its files can't be used.
        SetupError: TLS is asked for, and the package `cryptography` is not installed.
    """
    if tls is False:
        return Credentials(new_secret())
    if tls is not True and not isinstance(tls, TLS):
        raise ConfigurationError(f"tls is {tls!r}; give True, False or a TLS(certificate, key)")
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise SetupError(
            'TLS needs the package cryptography; pip install "cerebro-hydra[tls]" on the driver'
        ) from error
    return Credentials(new_secret(), _self_signed() if tls is True else _read(tls))


def _self_signed() -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _OWN_NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _ONE_DAY)  # a worker's clock may be behind
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_OWN_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _as_pem(certificate, key, _OWN_NAME)


def _read(tls: TLS) -> Certificate:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificates

    try:
        certificate = load_pem_x509_certificates(Path(tls.certificate).read_bytes())[0]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"the certificate {tls.certificate} can't be used: {error}; give a PEM file"
        ) from error
    try:
        key = load_pem_private_key(Path(tls.key).read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"the key {tls.key} can't be used: {error}; give a PEM file without a passphrase"
        ) from error
    if certificate.public_key() != key.public_key():
        raise ConfigurationError(
            f"{tls.key} is not the key of the certificate {tls.certificate}; give the pair"
        )
    if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise ConfigurationError(
            f"the certificate {tls.certificate} was valid until "
            f"{certificate.not_valid_after_utc:%Y-%m-%d}; give a newer one"
        )
    if not (hosts := _hosts(certificate)):
        raise ConfigurationError(
            f"the certificate {tls.certificate} names no host (subjectAltName); give one that does"
        )
    made = _as_pem(certificate, key, hosts[0].replace("*", "any"))
    try:
        _shake_hands(made)
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"the certificate {tls.certificate} can't be a server's: {error}; give one that is "
            "valid now and made for servers"
        ) from error
    return made


def _shake_hands(certificate: Certificate) -> None:
    """Let a server and a client of a certificate meet in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = certificate.server_context().wrap_bio(to_server, to_client, server_side=True)
    context = certificate.client_context()
    client = context.wrap_bio(to_client, to_server, server_hostname=certificate.name)
    for end in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()


def _hosts(certificate: x509.Certificate) -> list[str]:
    from cryptography import x509

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = found.get_values_for_type(x509.IPAddress)
    return [*found.get_values_for_type(x509.DNSName), *map(str, addresses)]


def _as_pem(certificate: x509.Certificate, key: PrivateKeyTypes, name: str) -> Certificate:
    from cryptography.hazmat.primitives import serialization

    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    return Certificate(public.decode(), private.decode(), name)
