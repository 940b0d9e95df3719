"""What a command that serves makes of its arguments."""

from __future__ import annotations

import argparse
from pathlib import Path

from kapelle.services.binding import Binding, token_here


def binding_of(arguments: argparse.Namespace) -> Binding:
    """Return the binding that the arguments of `declare_binding` describe; ConfigError for one that may not be."""
    return Binding(
        arguments.host,
        arguments.port,
        token_here(),
        file_of(arguments.tls_cert),
        file_of(arguments.tls_key),
        tuple(arguments.allow_host),
    )


def file_of(name: str | None) -> Path | None:
    """Return the file that an argument names, None for none."""
    return None if name is None else Path(name)
