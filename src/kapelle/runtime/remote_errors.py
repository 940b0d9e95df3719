"""Errors of another process: sent as plain values, raised here as what they were there.

    there:   except Exception as error: answer = {"error": sent_error(error)}
    here:    raise received_error(answer["error"], "The sampling process")

An error of `kapelle.errors` is one of the same class again, so that it is handled as it would have been there, with the same
exit code. Any other class belongs to code that need not exist here. Where kapelle's own code raised it, that is a defect there:
it becomes an EngineError that shows the other traceback (`received_error`). Where an environment raised it, it fails one episode:
it becomes an error whose class has the same name, which is what the episode's record shows (`environment_error`).
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping

from kapelle import errors
from kapelle.errors import EngineError, KapelleError
from kapelle.runtime.deadlines import GaveUp


class EnvironmentErrorElsewhere(Exception):
    """An error of an environment's own in another process; its class has the other one's name."""


def sent_error(error: BaseException) -> dict[str, str]:
    """Return an error as plain values: `kind`, `message` and `trace`. To be called by the handler that has caught it."""
    return {"kind": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}


def received_error(sent: Mapping[str, str], who: str, *, named: bool = False) -> KapelleError:
    """Return the error that `sent_error` was given in another process (`who`), to be raised here.

    `named` begins the message of a known class with `who`, for processes that stand beside one another.
    """
    same = _same_class(sent["kind"], f"{who}: {sent['message']}" if named else sent["message"])
    return same or EngineError(f"{who} failed: {sent['kind']}: {sent['message']}\n{sent['trace']}")


def environment_error(kind: str, message: str) -> BaseException:
    """Return an error that an environment raised in another process, by the name of its class."""
    same = _same_class(kind, message)
    if same is not None:
        return same
    # A call that was given up, or a Ctrl-C, means here what it means there.
    if kind in (GaveUp.__name__, KeyboardInterrupt.__name__):
        return GaveUp(message) if kind == GaveUp.__name__ else KeyboardInterrupt(message)
    named: type[Exception] = type(kind, (EnvironmentErrorElsewhere,), {"__module__": __name__})
    return named(message)


def _same_class(kind: str, message: str) -> KapelleError | None:
    found = getattr(errors, kind, None)
    return found(message) if isinstance(found, type) and issubclass(found, KapelleError) else None
