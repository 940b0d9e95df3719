"""Parts that all services share: where they listen, who may call them, and the log of failures.

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
    """Where a service listens, and who may call it."""

    host: str = "127.0.0.1"
    port: int = 0
    """The port; 0 chooses a free port."""
    token: str | None = field(default=None, repr=False)
    """Every call must contain this token, as `Authorization: Bearer …`; None admits all callers."""
    certificate: Path | None = None
    """PEM file of the TLS certificate with its chain."""
    key: Path | None = None
    """PEM file of the certificate's private key."""
    names: tuple[str, ...] = ()
    """Further names that are allowed in `Host`, such as the name of this machine."""
    address: str | None = None
    """The host name or IP address that callers use, if it is not `host` (which may mean all addresses of the machine)."""

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
        """Allowed names in `Host`, in lower case and without a port.

        In a DNS rebinding attack, another site's name points to this machine, and its page sends that name.
        """
        names = ("localhost", "127.0.0.1", "[::1]", in_url(self.host), in_url(self.reached), *self.names)
        return frozenset(name.lower() for name in names)

    @property
    def reached(self) -> str:
        """The host name or IP address that callers use."""
        return self.address or self.host

    def tls(self) -> tuple[bytes, bytes] | None:
        """Return the private key and the certificate's chain in PEM, or None; raises ConfigError if they do not match."""
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
        """Return the service's address with a port."""
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://{in_url(self.reached)}:{port}"

    def admits(self, token: str | None) -> bool:
        """Return whether a caller with this token may call; the comparison takes constant time."""
        if self.token is None:
            return True
        given = b"" if token is None else token.encode("utf-8", "surrogatepass")
        return hmac.compare_digest(given, self.token.encode()) and token is not None


def check_installed(extra: str, *packages: str) -> None:
    """Raise ConfigError if a package is missing, with the extra of kapelle that contains it."""
    if any(find_spec(package) is None for package in packages):
        raise ConfigError(f"Serving needs an extra: pip install 'kapelle[{extra}]'.")


def in_url(host: str) -> str:
    """Return a host in the form that a URL needs: an IPv6 address is put in brackets."""
    return f"[{host}]" if ":" in host else host


# -------- The log: the type of an error and its traceback
# Messages may quote a caller, and prompts, completions and tokens must not reach the log. The log therefore has no
# messages and no values.

LOG = logging.getLogger("kapelle.services")


def log_failure(what: str, error: BaseException) -> None:
    """Log a failure, with the types and tracebacks of the error and its causes."""
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
