#!/usr/bin/env python3
"""Prints the GPUs of this machine as one JSON object, as Spark's resource discovery wants them.

It is installed as the command `cerebro-hydra-gpus`. It needs nothing but Python and nvidia-smi, so
that this file alone can be copied to machines where the package is not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys


def addresses(allowed: str | None, listed: str) -> list[str]:
    """Return the addresses of the GPUs that Spark may give to tasks.

    Args:
        allowed: the value of `CUDA_VISIBLE_DEVICES`; where it is set, it decides.
        listed: the indices that nvidia-smi prints, one a line.
    """
    names = listed.splitlines() if allowed is None else allowed.split(",")
    return [name.strip() for name in names if name.strip()]


def main() -> int:
    """Print the object and return 0; return 1 if this machine has no nvidia-smi that answers."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = ""
    if allowed is None:
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        try:
            listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no GPU found: {error}; is the NVIDIA driver installed?", file=sys.stderr)
            return 1
    print(json.dumps({"name": "gpu", "addresses": addresses(allowed, listed)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
