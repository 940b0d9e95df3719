"""The services' log: what failed and where, never with which words.

An exception's message may quote what a caller has sent, and nothing of a prompt, an answer or a token is logged. So a failure
is logged by its type and by the places in the code that it passed, without messages and without the lines' variables.
"""

from __future__ import annotations

import logging
import traceback

LOG = logging.getLogger("kapelle.services")


def log_failure(what: str, error: BaseException) -> None:
    """Log that something failed, with the type of the error, of what caused it, and the places that they passed."""
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
