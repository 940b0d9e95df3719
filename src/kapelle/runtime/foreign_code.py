"""Calls of other people's code, an environment's above all: what it raises becomes one sentence that names the line."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from kapelle.errors import ConfigError, KapelleError
from kapelle.runtime.deadlines import GaveUp, call

T = TypeVar("T")


class Unfit(ConfigError):
    """Other people's code breaks what it promises; the message says which method, and what to write."""


def reason(error: BaseException) -> str:
    """Return in one line what other people's code raised, and the last line of it that is theirs."""
    try:
        said = " ".join(str(error).split())[:300]
    except Exception as again:  # noqa: BLE001 - an error's class may be theirs too
        said = f"its message cannot be read, {type(again).__name__}"
    if isinstance(error, KapelleError | GaveUp):
        return said
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not {"kapelle", "pydantic"} & set(Path(frame.filename).parts) and frame.filename[:1] != "<"
    ]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {said}' if said else ''}{where}"


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
        raise Unfit(str(error).removesuffix(".")) from None
    except BaseException as error:  # noqa: BLE001 - it may raise anything: SystemExit, CancelledError
        raise Unfit(f"`{what}` raises {reason(error)}") from None
    if isinstance(found, Coroutine):
        found.close()
        raise Unfit(f"`{what}` is async. Write `def`, not `async def`: its result is needed at once")
    return found
