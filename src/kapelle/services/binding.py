"""What all services share: where they listen, who may call, and what is logged when something fails.

Services listen on loopback by default; on other addresses they need both TLS and a token.
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
    """Where a service listens and who may call it."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free port."""
    token: str | None = field(default=None, repr=False)
    """Every call has to carry it, as `Authorization: Bearer …`; None lets all callers in."""
    certificate: Path | None = None
    """PEM file of the TLS certificate, its chain included."""
    key: Path | None = None
    """PEM file of the certificate's private key."""
    names: tuple[str, ...] = ()
    """Further names by which callers may address the service (`Host`), such as that of this machine."""
    address: str | None = None
    """The name or number by which callers reach it, if not `host` (which may stand for all addresses of the machine)."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(
                f"The port {self.port} does not exist. Name one from 0 to 65535; 0 takes a free one."
            )
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS needs a certificate and its key: give both --tls-cert and --tls-key.")
        for file in (self.certificate, self.key):
            if file is not None and not os.access(file, os.R_OK):
                raise ConfigError(f"The TLS file {file} cannot be read.")
        if self.token is not None and not (
            self.token.isascii() and self.token.isprintable() and self.token.strip()
        ):
            raise ConfigError(f"The token in {TOKEN} is empty or not printable ASCII. Set another one.")
        if is_loopback(self.host):
            return
        lacking = [] if self.certificate is not None else ["TLS (--tls-cert and --tls-key)"]
        if self.token is None or len(self.token) < LEAST_TOKEN:
            lacking.append(f"a token of {LEAST_TOKEN} characters or more (the environment variable {TOKEN})")
        if lacking:
            raise ConfigError(
                f"'{self.host}' can be reached from other machines, and that needs {' and '.join(lacking)}. Add what is "
                "missing, or leave --host out to serve this machine only."
            )

    @property
    def hosts(self) -> frozenset[str]:
        """Names in `Host` under which the service may be addressed, in lower case and without a port.

        A foreign page whose name was made to point here (DNS rebinding) sends that name, which is not among them.
        """
        names = ("localhost", "127.0.0.1", "[::1]", in_url(self.host), in_url(self.reached), *self.names)
        return frozenset(name.lower() for name in names)

    @property
    def reached(self) -> str:
        """The name or number by which callers reach it."""
        return self.address or self.host

    def tls(self) -> tuple[bytes, bytes] | None:
        """Return the private key and the certificate's chain in PEM; None without TLS.

        Raises ConfigError if the files are not such a pair.
        """
        if self.certificate is None or self.key is None:
            return None
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
            return self.key.read_bytes(), self.certificate.read_bytes()
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(
                f"The TLS files {self.certificate} and {self.key} cannot be used: {error.strerror or error}."
            ) from None

    def url(self, port: int) -> str:
        """Return the address under which the service is found when it listens on a port."""
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://{in_url(self.reached)}:{port}"

    def admits(self, token: str | None) -> bool:
        """Return whether a caller with this token may call; compared in constant time."""
        if self.token is None:
            return True
        given = b"" if token is None else token.encode("utf-8", "surrogatepass")
        return hmac.compare_digest(given, self.token.encode()) and token is not None


def check_installed(extra: str, *packages: str) -> None:
    """Raise ConfigError if a package is missing, naming the extra of kapelle that brings it."""
    if any(find_spec(package) is None for package in packages):
        raise ConfigError(f"Serving needs an extra: pip install 'kapelle[{extra}]'.")


def in_url(host: str) -> str:
    """Return a host as addresses have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


# -------- What is logged: the type of an error and where it was raised
#
# Its message may quote what a caller has sent, and prompts, answers and tokens must not reach the log. So messages and the
# values of variables are left out.

LOG = logging.getLogger("kapelle.services")


def log_failure(what: str, error: BaseException) -> None:
    """Log that something failed, with the type and the traceback of the error and of its causes."""
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
