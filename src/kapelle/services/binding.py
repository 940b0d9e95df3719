"""Defines what all services share: the address to listen on, who may call the service, and the log of failures.

By default, services listen on the loopback interface. On other addresses, services require both TLS and a token.
"""

from __future__ import annotations

import hmac
import logging
import os
import ssl
import traceback
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from kapelle.errors import ConfigError
from kapelle.runtime.credentials import LEAST_TOKEN, TOKEN, is_loopback

__all__ = ["LEAST_TOKEN", "TOKEN", "Binding", "check_installed", "in_url", "log_failure"]


@dataclass(frozen=True, slots=True)
class Binding:
    """The address on which a service listens, and who may call the service."""

    host: str = "127.0.0.1"
    port: int = 0
    """The port to listen on. If 0, a free port is chosen."""
    token: str | None = field(default=None, repr=False)
    """The token that every call must contain as a bearer token in the header `Authorization`. If None, no token is required."""
    certificate: Path | None = None
    """The PEM file of the TLS certificate with its chain."""
    key: Path | None = None
    """The PEM file of the private key of the certificate."""
    names: tuple[str, ...] = ()
    """Additional names that are allowed in the header `Host`, such as the name of this machine."""
    address: str | None = None
    """The host name or IP address that callers use, if it differs from `host` (which may stand for all addresses of the machine)."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(
                f"The port {self.port} does not exist. Use a number from 0 to 65535; 0 chooses a free port."
            )
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS needs a certificate and its key. Set both --tls-cert and --tls-key.")
        for file in (self.certificate, self.key):
            if file is not None and not os.access(file, os.R_OK):
                raise ConfigError(f"The TLS file {file} cannot be read.")
        if self.token is not None and not (
            self.token.isascii() and self.token.isprintable() and self.token.strip()
        ):
            raise ConfigError(
                f"The token in {TOKEN} is empty or not printable ASCII. Set another token, or unset the variable."
            )
        if is_loopback(self.host):
            return
        lacking = [] if self.certificate is not None else ["TLS (--tls-cert and --tls-key)"]
        if self.token is None or len(self.token) < LEAST_TOKEN:
            lacking.append(f"a token of {LEAST_TOKEN} characters or more (the environment variable {TOKEN})")
        if lacking:
            raise ConfigError(
                f"Other machines can reach '{self.host}', so the service needs {' and '.join(lacking)}. Add "
                "this, or serve only this machine (without --host)."
            )

    @property
    def hosts(self) -> frozenset[str]:
        """The names that are allowed in the header `Host`, in lower case and without a port.

        This check prevents DNS rebinding attacks, in which the name of another site points to this machine and the
        site's page sends that name.
        """
        names = ("localhost", "127.0.0.1", "[::1]", in_url(self.host), in_url(self.reached), *self.names)
        return frozenset(name.lower() for name in names)

    @property
    def reached(self) -> str:
        """The host name or IP address that callers use."""
        return self.address or self.host

    def tls(self) -> tuple[bytes, bytes] | None:
        """Return the private key and the certificate chain in PEM format, or None without TLS.

        Raises ConfigError if the key and the certificate do not match.
        """
        if self.certificate is None or self.key is None:
            return None
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
            return self.key.read_bytes(), self.certificate.read_bytes()
        except OSError as error:  # includes ssl.SSLError
            raise ConfigError(
                f"The TLS files {self.certificate} and {self.key} cannot be used: {error.strerror or error}."
            ) from None

    def url(self, port: int) -> str:
        """Return the URL of the service for a given port."""
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://{in_url(self.reached)}:{port}"

    def admits(self, token: str | None) -> bool:
        """Return whether a caller with the given token may call the service. The comparison takes constant time."""
        if self.token is None:
            return True
        given = b"" if token is None else token.encode("utf-8", "surrogatepass")
        return hmac.compare_digest(given, self.token.encode()) and token is not None


def check_installed(extra: str, *packages: str) -> None:
    """Raise ConfigError if a package is missing. The message states the extra of kapelle that contains the package."""
    if any(find_spec(package) is None for package in packages):
        raise ConfigError(f"Serving needs an extra: pip install 'kapelle[{extra}]'.")


def in_url(host: str) -> str:
    """Return a host in the form that a URL requires, which puts IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


# -------- The log: the type of an error and its traceback
# Messages may quote a caller, and prompts, completions and tokens must not reach the log. The log therefore has no
# messages and no values.

LOG = logging.getLogger("kapelle.services")


def log_failure(what: str, error: BaseException) -> None:
    """Log a failure with the types and the tracebacks of the error and of its causes."""
    lines: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        places = "".join(traceback.format_tb(cause.__traceback__)).rstrip()
        lines = [
            f"{places}\n{type(cause).__module__}.{type(cause).__qualname__} (its message may quote a caller)",
            *lines,
        ]
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    LOG.error("%s\n%s", what, "\n\n".join(lines))
