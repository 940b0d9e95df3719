"""Handle errors of user code and errors of other processes.

An error of user code, such as an environment, is converted to a message that contains the line of code (`reason`, `call_user_code`).
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from kapelle import errors
from kapelle.errors import ConfigError, EngineError, KapelleError
from kapelle.runtime.deadlines import DeadlineExceeded, call

T = TypeVar("T")


class Unfit(ConfigError):
    """User code does not implement the required interface. The message contains the name of the method and how to fix it."""


NOT_THEIRS = {"kapelle", "torch", "numpy", "pydantic", *sys.stdlib_module_names} - {"__main__"}
"""Names of packages that are not user code."""


def place_of(error: BaseException) -> str:
    """Return the innermost line of user code in the traceback of an error, such as `my_env.py, line 42`.

    The result is empty if the traceback contains no user code.
    """
    frame, own = error.__traceback__, None
    while frame is not None:
        if str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0] not in NOT_THEIRS:
            own = frame
        frame = frame.tb_next
    return "" if own is None else f"{Path(own.tb_frame.f_code.co_filename).name}, line {own.tb_lineno}"


def words_of(error: BaseException) -> str:
    """Return the message of an error as one line, without links to pydantic's documentation."""
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False)[0]
        frozen = first["type"] == "frozen_instance"
        message = "settings are frozen and cannot be changed" if frozen else first["msg"]
        return f"`{'.'.join(map(str, first['loc']))}`: {message}"
    try:
        message = re.sub(r"\s*For further information visit https://errors\.pydantic\.dev\S*", "", str(error))
        message = " ".join(message.split())[:300]
    except Exception as second:  # noqa: BLE001 - the error's class may be user code too
        return f"its message cannot be read because of {type(second).__name__}"
    if message.startswith("'coroutine' object "):
        message += ". Is an `await` missing?"
    return message


def reason(error: BaseException) -> str:
    """Return the message of an error of user code as one line, with the line of code that raised it."""
    message = words_of(error)
    if isinstance(error, KapelleError | DeadlineExceeded):
        return message
    where = place_of(error)
    return f"{type(error).__name__}{f': {message}' if message else ''}{f' ({where})' if where else ''}"


def check_parameters(what: str, function: Callable[..., object], *names: str) -> None:
    """Raise Unfit if a function does not take arguments with these names in this order."""
    try:
        taken = inspect.signature(function)
    except ValueError:  # a function in C may have no signature
        return
    try:
        taken.bind(*names)
    except TypeError:
        own = ", ".join(taken.parameters)
        raise Unfit(f"{what} takes ({own}), but is called with ({', '.join(names)}).") from None


def call_user_code(what: str, seconds: float, work: Callable[..., T], *given: Any) -> T:
    """Call user code with a time limit in seconds (`environment.timeout`), and return the result.

    Raises Unfit if `work` raises an error, exceeds the time limit or returns a coroutine. Errors of kapelle, such as missing data or
    an unsupported team, are raised unchanged.
    """
    try:
        found = call(f"`{what}`", "environment", seconds, work, *given)
    except (KapelleError, KeyboardInterrupt):
        raise
    except DeadlineExceeded as error:
        raise Unfit(str(error)) from None
    except BaseException as error:  # noqa: BLE001 - it may raise anything: SystemExit, CancelledError
        raise Unfit(f"`{what}` raises {reason(error)}.") from None
    if isinstance(found, Coroutine):
        found.close()
        raise Unfit(f"`{what}` is async. Write `def`, not `async def`: its result is needed at once.")
    return found


# -------- Errors of another process: sent as plain values, raised here with their class.
#
#     there:   except Exception as error: answer = {"error": sent_error(error)}
#     here:    raise received_error(answer["error"], "The sampling process")
#
# An error of `kapelle.errors` keeps its class, and so its handling and exit code. Any other class may not exist here. If kapelle's
# own code raised it, that is a defect: it becomes an EngineError with the traceback (`received_error`). If an environment raised it, it
# fails one episode: it becomes an error with the same class name, which the episode's record shows (`environment_error`).


class EnvironmentErrorElsewhere(Exception):
    """An error of an environment in another process. The name of the exception class is that of the original class."""


def sent_error(error: BaseException) -> dict[str, str]:
    """Return an error as a dict with the strings `kind`, `message` and `trace`.

    This function must be called in the exception handler that caught the error.
    """
    return {"kind": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}


def received_error(sent: Mapping[str, str], who: str, *, named: bool = False) -> KapelleError:
    """Return the error that the process `who` sent with `sent_error`.

    With `named`, the message of an error of a known class starts with `who`.
    """
    same = _same_class(sent["kind"], f"{who}: {sent['message']}" if named else sent["message"])
    return same or EngineError(f"{who} failed: {sent['kind']}: {sent['message']}\n{sent['trace']}")


def environment_error(kind: str, message: str) -> BaseException:
    """Return the error that an environment raised in another process, given the name of its class."""
    same = _same_class(kind, message)
    if same is not None:
        return same
    # A late call or a Ctrl-C has the same meaning in this process.
    if kind in (DeadlineExceeded.__name__, KeyboardInterrupt.__name__):
        return DeadlineExceeded(message) if kind == DeadlineExceeded.__name__ else KeyboardInterrupt(message)
    named: type[Exception] = type(kind, (EnvironmentErrorElsewhere,), {"__module__": __name__})
    return named(message)


def _same_class(kind: str, message: str) -> KapelleError | None:
    found = getattr(errors, kind, None)
    return found(message) if isinstance(found, type) and issubclass(found, KapelleError) else None
