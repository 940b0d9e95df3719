"""Errors of code that is not kapelle's own, or that runs in another process.

What other people's code raises, an environment's above all, becomes one sentence that names the line (`reason`, `asked`).
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
from kapelle.runtime.deadlines import GaveUp, call

T = TypeVar("T")


class Unfit(ConfigError):
    """Other people's code breaks what it promises; the message says which method, and what to write."""


NOT_THEIRS = {"kapelle", "torch", "numpy", "pydantic", *sys.stdlib_module_names} - {"__main__"}
"""Packages through whose code a mistake may surface; other people's own code is outside them."""


def place_of(error: BaseException) -> str:
    """Return the innermost line of other people's code that an error came through, `my_env.py, line 42`; empty without one."""
    frame, own = error.__traceback__, None
    while frame is not None:
        if str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0] not in NOT_THEIRS:
            own = frame
        frame = frame.tb_next
    return "" if own is None else f"{Path(own.tb_frame.f_code.co_filename).name}, line {own.tb_lineno}"


def words_of(error: BaseException) -> str:
    """Return the message of what other people's code raised in one line, without links to pydantic's pages."""
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False)[0]
        frozen = first["type"] == "frozen_instance"
        said = "settings are frozen, and nothing can be set on them" if frozen else first["msg"]
        return f"`{'.'.join(map(str, first['loc']))}`: {said}"
    try:
        said = re.sub(r"\s*For further information visit https://errors\.pydantic\.dev\S*", "", str(error))
        said = " ".join(said.split())[:300]
    except Exception as again:  # noqa: BLE001 - an error's class may be theirs too
        return f"its message cannot be read, {type(again).__name__}"
    if re.match(r"'coroutine' object ", said):
        said += ". Is an `await` missing?"
    return said


def reason(error: BaseException) -> str:
    """Return in one line what other people's code raised, and the last line of it that is theirs."""
    said = words_of(error)
    if isinstance(error, KapelleError | GaveUp):
        return said
    where = place_of(error)
    return f"{type(error).__name__}{f': {said}' if said else ''}{f' ({where})' if where else ''}"


def check_parameters(what: str, function: Callable[..., object], *names: str) -> None:
    """Raise Unfit where a function cannot be called with arguments of these names, in this order."""
    try:
        taken = inspect.signature(function)
    except ValueError:  # one that is written in C need not say what it takes
        return
    try:
        taken.bind(*names)
    except TypeError:
        own = ", ".join(taken.parameters)
        raise Unfit(f"{what} takes ({own}), but is called with ({', '.join(names)}).") from None


def asked(what: str, seconds: float, work: Callable[..., T], *given: Any) -> T:
    """Return what a call of other people's code returns within `seconds` (`environment.timeout`).

    Raises Unfit where it raises, does not return in time, or returns a coroutine. Kapelle's own errors (missing data, a
    team that does not fit) pass as they are.
    """
    try:
        found = call(f"`{what}`", "environment", seconds, work, *given)
    except (KapelleError, KeyboardInterrupt):
        raise
    except GaveUp as error:
        raise Unfit(str(error)) from None
    except BaseException as error:  # noqa: BLE001 - it may raise anything: SystemExit, CancelledError
        raise Unfit(f"`{what}` raises {reason(error)}.") from None
    if isinstance(found, Coroutine):
        found.close()
        raise Unfit(f"`{what}` is async. Write `def`, not `async def`: its result is needed at once.")
    return found


# -------- Errors of another process: sent as plain values, raised here as what they were there.
#
#     there:   except Exception as error: answer = {"error": sent_error(error)}
#     here:    raise received_error(answer["error"], "The sampling process")
#
# An error of `kapelle.errors` is one of the same class again, so that it is handled as it would have been there, with the same
# exit code. Any other class belongs to code that need not exist here. Where kapelle's own code raised it, that is a defect there:
# it becomes an EngineError that shows the other traceback (`received_error`). Where an environment raised it, it fails one
# episode: it becomes an error whose class has the same name, which is what the episode's record shows (`environment_error`).


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
