"""The processes of one run, joined by `torch.distributed`.

What they tell one another (errors, requests to stop, results as bytes) goes over gloo, gradients over the backend of their
device. Every wait has a limit, can be interrupted by a signal, and ends when a rank is lost.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # no stub names them

from kapelle.errors import ConfigError, EngineError
from kapelle.runtime.aside import Aside, again, told_of
from kapelle.runtime.characters import cleaned
from kapelle.runtime.family import EXIT_ALONE, LAST, doing, here
from kapelle.runtime.interrupts import Agreement, StopRequested, agreements, asked_by
from kapelle.runtime.ranks import ALONE, Ranks, Seat, seat_here
from kapelle.runtime.roll_call import EXIT_WRONG, RollCall, whereabouts

BUCKET = 1 << 23
"""Most numbers that are summed at once; small tensors share a call."""
CONNECTING = 10.0
"""Seconds to reach the store, for a process that only has to say why it ends."""

_joined: list[RankGroup] = []
"""The group of this process, once it has joined one."""


class RankGroup:
    """This process among the others; see `ranks.Ranks`."""

    def __init__(self, seat: Seat, seconds: float) -> None:
        """Join the others; every wait, also this one, takes `seconds` at most. Raises EngineError naming who is missing."""
        self.rank, self.size = seat.rank, seat.size
        self._seconds = seconds
        doing("waiting for all ranks to start")
        store: Any = PrefixStore(_prefix(), _store(seat, seconds))
        self.roll = RollCall(store.clone(), seat.rank, seat.size)
        _wait_for_all(store, self.roll, seat, seconds)
        if torch.cuda.is_available():
            torch.cuda.set_device(seat.local)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            distributed.init_process_group(
                backend,
                store=PrefixStore("group", store),
                rank=seat.rank,
                world_size=seat.size,
                timeout=timedelta(seconds=seconds),
            )
        except RuntimeError as error:
            raise EngineError(
                f"Rank {seat.rank} cannot connect to the others: {_first_line(error)}. Name the network interface in "
                "GLOO_SOCKET_IFNAME, and look whether a firewall is between the machines."
            ) from error
        self._store = store
        self._aside: Aside | None = None
        self._agreement = Agreement()
        self.heard = False
        """Whether what ends this rank is the error of another one, which says it."""
        self.left_behind = False
        """Whether what ends this rank is that another one is gone."""
        agreements.append(self._agreement)
        self.roll.begin()

    def together(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        """Do this rank's share and return all shares; see `ranks.Ranks`."""
        own, failure = b"", None
        said: dict[str, Any] = {"at": at}
        try:
            with self._apart():
                own = work()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - raised below, in every rank
            failure = error
            said |= told_of(error)
        said["asked"] = asked_by()
        heard = [json.loads(each) for each in self._gathered(at, json.dumps(said).encode())]
        self._refuse(heard, failure)
        return self._gathered(at, own)

    def aside(self) -> Aside:
        """Return where threads of all ranks meet while the main threads do other work."""
        if self._aside is None:
            self._aside = Aside(PrefixStore("aside", self._store.clone()), self.roll, self._seconds)
        return self._aside

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all ranks, in place."""
        waiting: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        try:
            for tensor in tensors:
                same = waiting.setdefault((tensor.dtype, tensor.device), [])
                if same and sum(each.numel() for each in same) + tensor.numel() > BUCKET:
                    self._sum(same)
                    same.clear()
                same.append(tensor)
            for same in waiting.values():
                self._sum(same)
        except RuntimeError as error:
            raise self._lost("sum", error) from None

    def _sum(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        _finish(distributed.all_reduce(flat, async_op=True))
        pieces = flat.split([tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        self._agreement.apart = True
        try:
            yield
        finally:
            self._agreement.apart = False

    def _gathered(self, at: str, own: bytes) -> list[bytes]:
        try:
            return self._exchanged(own)
        except RuntimeError as error:
            raise self._lost(at, error) from None

    def _exchanged(self, own: bytes) -> list[bytes]:
        size = torch.tensor([len(own)])
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        _finish(distributed.all_gather(sizes, size, async_op=True))
        most = max(int(each) for each in sizes)
        if most == 0:
            return [b""] * self.size
        mine = torch.zeros(most, dtype=torch.uint8)
        if own:
            mine[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        _finish(distributed.all_gather(every, mine, async_op=True))
        return [each[: int(n)].numpy().tobytes() for each, n in zip(every, sizes, strict=True)]

    def _refuse(self, heard: Sequence[dict[str, Any]], failure: BaseException | None) -> None:
        """Raise the first rank's error, or StopRequested; agree on whether all stop."""
        asked = next((each["asked"] for each in heard if each["asked"]), 0)
        self._agreement.meet(asked)
        stop = StopRequested.__name__
        for rank, said in enumerate(heard):
            if said.get("kind", stop) != stop:
                self.heard = rank != self.rank
                raise again(rank, said, failure if rank == self.rank else None)
        if any("kind" in said for said in heard):
            raise failure or StopRequested
        places = [said["at"] for said in heard]
        if len(set(places)) > 1:
            raise EngineError(
                f"The ranks have come apart: {', '.join(f'rank {r} at {at!r}' for r, at in enumerate(places))}. Something "
                "that all decide alike was decided differently; please report it, with the recipe."
            )

    def _lost(self, at: str, error: Exception) -> EngineError:
        gone = self.end_behind(error)
        if gone is None:
            text = f"a connection between two ranks broke at '{at}': {_first_line(error)}"
            return EngineError(f"Rank {self.rank} lost the others: {text}. Resume the run.")
        return EngineError(gone)

    def end_behind(self, error: Exception) -> str | None:
        """Return which rank's end an error of torch comes from; None where all are there."""
        rank, why = self.roll.why_lost() if isinstance(error, RuntimeError) else (None, "")
        if rank is None:
            return None
        self.left_behind = True
        self.heard = self.roll.failure() is not None
        self.roll.fail_for(rank, why)
        return f"Rank {rank} is gone: {why}. Resume the run from its last checkpoint."

    def leave(self, failure: str | None = None) -> None:
        """Leave the group: after all have come so far, or with the reason of a failure."""
        if failure is not None:
            self.roll.fail(failure)
        else:
            doing(LAST)
            with suppress(EngineError):
                self.together("end", bytes)
            self.roll.end()
        if self._agreement in agreements:
            agreements.remove(self._agreement)
        if self in _joined:
            _joined.remove(self)
        with suppress(RuntimeError):
            if distributed.is_initialized():
                distributed.destroy_process_group()


def ranks_here(seconds: float) -> Ranks:
    """Return the ranks that a launcher started this process with, joining them at the first call; `ALONE` without one."""
    if _joined:
        return _joined[0]
    seat = seat_here()
    if seat is None:
        return ALONE
    _joined.append(RankGroup(seat, seconds))
    return _joined[0]


def leave_ranks(failure: str | None = None) -> None:
    """Leave the ranks that this process has joined, if any."""
    for group in tuple(_joined):
        group.leave(failure)


def say_for_all(reason: str) -> None:
    """Print why this process ends in error, if no other rank has printed it; tell the others."""
    if here.told_of and _joined and _joined[0].left_behind:
        # It sees who is gone, and how, and says so.
        sys.stdout.flush()
        os._exit(EXIT_ALONE)

    def say() -> None:
        print(cleaned(reason), file=sys.stderr, flush=True)  # noqa: T201 - of all ranks, one speaks

    try:
        if _joined:
            roll, after_others = _joined[0].roll, _joined[0].heard
        else:
            seat = seat_here()
            assert seat is not None, "alone, a process speaks for itself"
            store = PrefixStore(_prefix(), _store(seat, CONNECTING))
            roll, after_others = RollCall(store, seat.rank, seat.size), False
    except (ConfigError, EngineError):
        say()
        return
    roll.fail(reason)
    roll.say_once(say, after_others=after_others)


def say_defect(error: Exception) -> int:
    """Print what an unexpected error comes to, once for all ranks: another one's end, or its traceback. Return the exit code."""
    gone = _joined[0].end_behind(error) if _joined else None
    say_for_all("".join(traceback.format_exception(error)) if gone is None else f"kapelle: {gone}")
    return 1 if gone is None else EXIT_WRONG


def _prefix() -> str:
    # A restarted job meets in the same store.
    return f"kapelle/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _store(seat: Seat, seconds: float) -> Any:
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    leads = seat.rank == 0 and not by_launcher
    try:
        return TCPStore(
            seat.address,
            seat.port,
            None,
            is_master=leads,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=here.listening if leads else None,
        )
    except (RuntimeError, ValueError) as error:
        if leads:
            raise ConfigError(
                f"Rank 0 cannot listen on port {seat.port}: {_first_line(error)}. Is it in use? Name a free one in MASTER_PORT "
                "(`torchrun --master-port`) for all processes."
            ) from error
        raise EngineError(
            f"Rank {seat.rank} did not reach rank 0 at {seat.address}:{seat.port} within {seconds:g} s: {_first_line(error)}. "
            "Look whether it has started, and name its machine in MASTER_ADDR."
        ) from error


def _wait_for_all(store: Any, roll: RollCall, seat: Seat, seconds: float) -> None:
    """Wait until every rank is there; EngineError names those that are not."""
    store.set(f"here/{seat.rank}", json.dumps(whereabouts()))
    keys = [f"here/{rank}" for rank in range(seat.size)]
    until = time.monotonic() + seconds
    while not store.check(keys):
        said = roll.failure()
        if said is not None:
            raise EngineError(f"Rank {said[0]} failed before all had started: {said[1]}")
        if time.monotonic() > until:
            absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise EngineError(
                f"After {seconds:g} s {len(absent)} of {seat.size} processes have not joined: rank {', '.join(absent)}. Look at "
                "their machines' output, and start all of them with the same WORLD_SIZE (`torchrun --nnodes`)."
            )
        time.sleep(0.05)


def _finish(work: Any) -> None:
    """Wait for a collective; unlike its own `wait`, this lets signals be handled."""
    pause = 0.0
    while not work.is_completed():
        time.sleep(pause)
        pause = min(pause + 2e-5, 2e-3)
    work.wait()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
