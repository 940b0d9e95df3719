"""Where threads of several ranks meet while their main threads train: by the store, because collectives belong to the main threads."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from kapelle import errors
from kapelle.errors import EngineError
from kapelle.runtime.roll_call import SOON, RollCall

_PAUSE = 0.02
"""Seconds between two looks whether the others have come."""


class Aside:
    """One thread of this rank among one of each other; see `ranks.Meeting`."""

    def __init__(self, store: Any, roll: RollCall, seconds: float) -> None:
        """Take a connection to the store that nothing else uses; a meeting waits for `seconds` at most."""
        store.set_timeout(timedelta(seconds=SOON))
        self.rank, self.size = roll.rank, roll.size
        self._store, self._roll, self._seconds = store, roll, seconds
        self._met = 0

    def together(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        """Do this rank's share and return all shares; EngineError when another rank ends, or stays away for too long."""
        failure: Exception | None = None
        own, said = b"", {}
        try:
            own = work()
        except Exception as error:  # noqa: BLE001 - raised below, in every rank
            failure, said = error, told_of(error)
        try:
            every = self._exchanged(at, json.dumps(said).encode() + b"\n" + own)
        except RuntimeError as error:
            raise EngineError(f"Rank {self.rank} lost the others at '{at}'. Resume the run.") from error
        for rank, (text, _, _) in enumerate(found := [each.partition(b"\n") for each in every]):
            if heard := json.loads(text):
                raise again(rank, heard, failure if rank == self.rank else None)
        return [share for _, _, share in found]

    def _exchanged(self, at: str, own: bytes) -> list[bytes]:
        number, until = self._met, time.monotonic() + self._seconds
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], own)
        while not self._store.check(keys):
            gone = self._roll.failure()
            if gone is not None:
                raise EngineError(
                    f"Rank {gone[0]} is gone: {gone[1]}. Resume the run from its last checkpoint."
                )
            if time.monotonic() > until:
                raise EngineError(
                    f"After {self._seconds:g} s not all ranks have come to '{at}'. Resume the run."
                )
            time.sleep(_PAUSE)
        every = [bytes(self._store.get(key)) for key in keys]
        self._met += 1
        if number:  # all have come here, and so have read what was said before
            with suppress(RuntimeError):
                self._store.delete_key(f"{number - 1}/{self.rank}")
        return every


def told_of(error: BaseException) -> dict[str, str]:
    """Return what a rank tells the others of its error, inside the handler of it."""
    return {"kind": type(error).__name__, "why": str(error), "trace": traceback.format_exc()}


def again(rank: int, said: dict[str, Any], own: BaseException | None) -> BaseException:
    """Return a rank's error as one that every rank raises."""
    kind = getattr(errors, said["kind"], None)
    if isinstance(kind, type) and issubclass(kind, errors.KapelleError):
        same = kind(f"Rank {rank}: {said['why']}")
        same.__cause__ = own
        return same
    return own or EngineError(f"Rank {rank} failed: {said['kind']}: {said['why']}\n{said['trace']}")
