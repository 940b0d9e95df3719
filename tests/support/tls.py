"""A certificate for `localhost`, made where it is needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def certificate_here(folder: Path) -> tuple[Path, Path]:
    """Return the files of a certificate that signs itself and of its key; skips, saying so, where `openssl` is missing."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate of this test, is not installed")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key
