"""The processes of one run, joined by `torch.distributed`: their exchanges, their heartbeats, and how they end together.

What they tell one another (errors, requests to stop, results as bytes) goes over gloo, gradients over the backend of their
device. Every wait has a time limit, can be interrupted by a signal, and ends when a rank is lost.

Each rank gives a heartbeat to the store that `torchrun` keeps (without it, rank 0 keeps one), says there why it leaves in
error, and watches the heartbeat of the next rank. When one is lost, the others end within seconds and name it, wherever they
are: a process that waits for it inside other people's code is ended. The same happens to a rank that has lost the store, or
gets no answer from it for `process_tree.stalled_after()` seconds. Where `kapelle train --launch torchrun` has started the ranks,
the launcher sees itself which one dies or is stopped, and reports it; the ranks then end silently.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import (  # type: ignore[attr-defined]  # no stub names the stores
    DistNetworkError,
    PrefixStore,
    TCPStore,
)

from kapelle.errors import ConfigError, EngineError, PeerFailed
from kapelle.runtime.characters import cleaned
from kapelle.runtime.foreign_code import received_error, sent_error
from kapelle.runtime.interrupts import Agreement, StopRequested, agreements, asked_by, stop_if_asked
from kapelle.runtime.process_tree import EXIT_ALONE, LAST, LifeSigns, doing, own_place, stalled_after
from kapelle.runtime.ranks import ALONE, LaunchedRank, Meeting, Peers, Ranks, launched_rank

# -------- Heartbeat and store barrier, over the store

BEAT = 0.5
"""Seconds between two heartbeats."""
ELSEWHERE = 2.0
"""How many times `stalled_after()` a rank on another machine may be silent: from here it cannot be seen whether it computes."""
SOON = 3.0
"""Seconds within which a rank that lives gives a heartbeat, and one that has failed says why."""
END_GRACE = 10.0
"""Seconds that this process has to end by itself once another rank is lost."""
EXIT_WRONG = 2


STORE_GONE = "the processes' store is gone, and rank 0, or the launcher, with it"


class StoreTimeout(RuntimeError):
    """The store did not answer in time."""


class _StoreQueries:
    """Questions to a store that may never answer, asked on a thread of their own.

    A call to a stopped store does not return, and once the connection is broken, torch prints a page about every further call.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._questions: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]]] = queue.SimpleQueue()
        self.broken: str | None = None
        threading.Thread(target=self._answer, daemon=True, name="heartbeat's store").start()

    def ask(self, question: Callable[[Any], Any]) -> Any:
        """Return the answer; raises StoreTimeout, and RuntimeError once the connection is broken."""
        answer: Future[Any] = Future()
        self._questions.put((question, answer))
        try:
            return answer.result(SOON)
        except TimeoutError:
            answer.cancel()
            raise StoreTimeout(f"no answer for {SOON:g} s") from None

    def _answer(self) -> None:
        while True:
            question, answer = self._questions.get()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                if self.broken is not None:
                    raise RuntimeError(self.broken)  # as torch raises it the first time
                answer.set_result(question(self._store))
            except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
                if isinstance(error, DistNetworkError):
                    self.broken = str(error)
                answer.set_exception(error)


class Heartbeat:
    """The heartbeats of all ranks, and the first reason why one failed."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Take a connection to the store that is used for nothing else."""
        store.set_timeout(timedelta(seconds=SOON))
        self.rank, self.size = rank, size
        self._line = _StoreQueries(store)
        self._ask = self._line.ask
        self._over = threading.Event()

    def begin(self) -> None:
        """Give heartbeats from now on, and watch those of the next rank."""
        threading.Thread(target=self._watch, daemon=True, name="heartbeat").start()

    def end(self, failure: str | None = None) -> None:
        """Leave, without error or telling the others why."""
        self._over.set()
        if failure is not None:
            self.fail(self.rank, failure)

    def fail(self, rank: int, reason: str) -> None:
        """Report that a rank has failed, also for one that cannot do so itself; of all ranks the first reason is kept."""
        with suppress(RuntimeError):
            self._ask(
                lambda store: store.compare_set("failed", "", json.dumps({"rank": rank, "reason": reason}))
            )

    def failure(self) -> tuple[int, str] | None:
        """Return which rank reported first that it failed, and why; None before that."""
        with suppress(RuntimeError):
            if self._ask(lambda store: store.check(["failed"])):
                said = json.loads(self._ask(lambda store: store.get("failed")))
                return int(said["rank"]), str(said["reason"])
        return None

    def why_lost(self) -> tuple[int | None, str]:
        """Return which rank is gone, and why: it says so within seconds, or its heartbeat has stopped."""
        until = time.monotonic() + SOON
        before = self._beats()
        while time.monotonic() < until:
            said = self.failure()
            if said is not None:
                return said
            time.sleep(BEAT / 5)
        now = self._beats()
        silent = [
            rank for rank in range(self.size) if before.get(rank) == now.get(rank) and rank != self.rank
        ]
        if not now:
            return 0, STORE_GONE
        if silent:
            return silent[0], "it died without a word: it was killed, or its machine is gone"
        return None, "a connection between two ranks broke"

    def say_once(self, say: Callable[[], None], *, after_others: bool = False) -> None:
        """Call `say`, unless another rank has said already why all of them end; wait until it has been said."""
        try:
            if after_others and self._becomes("saying"):
                self._becomes("said")
                return
            if self._ask(lambda store: store.add("saying", 1)) == 1:
                say()
                self._ask(lambda store: store.add("said", 1))
            else:
                self._becomes("said")
        except RuntimeError:  # no store any more: better twice than never
            say()

    def _becomes(self, name: str) -> bool:
        """Return whether a key appears in the store within `SOON` seconds."""
        until = time.monotonic() + SOON
        while time.monotonic() < until:
            if self._ask(lambda store: store.check([name])):
                return True
            time.sleep(BEAT / 10)
        return False

    def _beats(self) -> dict[int, int]:
        found = {}
        with suppress(RuntimeError):
            for rank in range(self.size):
                found[rank] = self._beat_of(rank)
        return found

    def _beat_of(self, rank: int) -> int:
        return int(self._ask(lambda store: store.add(f"beat/{rank}", 0)))

    def _watch(self) -> None:
        """Give heartbeats; end this process when another one is lost and this one does not notice."""
        neighbour = (self.rank + 1) % self.size
        limit, looked = stalled_after(), time.monotonic()
        signs: LifeSigns | None = None
        seen, still, unanswered = [-1], 0.0, 0.0
        while not self._over.wait(BEAT):
            # Bounded: time in which this process was stopped itself must not count as the others' silence.
            now = time.monotonic()
            passed, looked = min(now - looked, SOON + 2 * BEAT), now
            try:
                self._ask(lambda store: store.add(f"beat/{self.rank}", 1))
                beat = self._beat_of(neighbour)
                failed, unanswered = self.failure(), 0.0
                if signs is None:
                    there = json.loads(self._ask(lambda store: store.get(f"here/{neighbour}")))
                    if there["space"] and {**there, "process": 0} == {**whereabouts(), "process": 0}:
                        signs = LifeSigns(there["process"], lambda: seen[0])
            except RuntimeError:
                unanswered += passed
                failed, beat = None, seen[0]
                if self._line.broken is not None:
                    failed = 0, STORE_GONE
                elif unanswered > limit:
                    failed = (
                        0,
                        f"the processes' store has not answered for {limit:g} s: who keeps it is stopped",
                    )
            still = 0.0 if beat != seen[0] or unanswered else still + passed
            seen[0] = beat
            if failed is None:
                silent = signs.look(passed) if signs is not None and not unanswered else None
                if silent is None and signs is None and still > ELSEWHERE * limit:
                    silent = f"it has given no sign of life for {ELSEWHERE * limit:g} s"
                if silent is not None:
                    self.fail(neighbour, silent)
                    failed = neighbour, silent
            if failed is not None and not self._over.wait(END_GRACE):
                if own_place.launcher_reports:
                    os._exit(EXIT_ALONE)
                line = cleaned("kapelle: Rank {} has failed: {}".format(*failed))
                self.say_once(partial(print, line, file=sys.stderr, flush=True), after_others=True)
                os._exit(EXIT_WRONG)


def whereabouts() -> dict[str, Any]:
    """Return where this process can be observed: its machine, its namespace of processes, and its number there."""
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        space = ""
    return {"host": socket.gethostname(), "space": space, "process": os.getpid()}


_PAUSE = 0.02
"""Seconds between two looks whether the other ranks have come."""


class StoreBarrier(Peers):
    """A barrier for one thread of each rank, over the store: collectives belong to the main threads."""

    def __init__(self, store: Any, heartbeat: Heartbeat, seconds: float) -> None:
        """Take a connection to the store that is used for nothing else; a rank waits `seconds` for the others."""
        store.set_timeout(timedelta(seconds=SOON))
        self.rank, self.size = heartbeat.rank, heartbeat.size
        self._store, self._heartbeat, self._seconds = store, heartbeat, seconds
        self._exchanges = 0

    def all_gather(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        """Do this rank's share and return all shares; EngineError when another rank ends, or stays away for too long."""
        failure: Exception | None = None
        own, said = b"", {}
        try:
            own = work()
        except Exception as error:  # noqa: BLE001 - raised below, in every rank
            failure, said = error, sent_error(error)
        number, until = self._exchanges, time.monotonic() + self._seconds
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], json.dumps(said).encode() + b"\n" + own)
            while not self._store.check(keys):
                gone = self._heartbeat.failure()
                if gone is not None:
                    raise EngineError(
                        f"Rank {gone[0]} is gone: {gone[1]}. Resume the run from its last checkpoint."
                    )
                if time.monotonic() > until:
                    raise EngineError(
                        f"After {self._seconds:g} s not all ranks have come to '{at}'. Resume the run."
                    )
                time.sleep(_PAUSE)
            every = [bytes(self._store.get(key)).partition(b"\n") for key in keys]
            self._exchanges += 1
            if number:  # all ranks are here, so all have read what they exchanged before
                with suppress(RuntimeError):
                    self._store.delete_key(f"{number - 1}/{self.rank}")
        except RuntimeError as error:
            raise EngineError(f"Rank {self.rank} lost the others at '{at}'. Resume the run.") from error
        for rank, (text, _, _) in enumerate(every):
            if heard := json.loads(text):
                raise _raised_in_every_rank(rank, heard, failure if rank == self.rank else None)
        return [share for _, _, share in every]


LOOK = 0.2
"""Seconds between two checks whether another one has failed, or this process should stop, while one waits at a meeting."""


LEAST_PAUSE, MOST_PAUSE = 0.001, 0.05
"""Seconds between two looks at whether what one waits for at a meeting has been said: few at first, more later."""


class StoreMeeting(Meeting):
    """A meeting over the store. What is said stands there until the next play, so that a process that is started again finds it.

    The first one collects what all say, so that each sends and receives two messages, however many there are.
    """

    def __init__(self, store: Any, form: Mapping[str, Any]) -> None:
        """Take a connection to the store that is used for nothing else; `form` has `rank` and `size`, see `meeting_from`."""
        self.rank, self.size = form["rank"], form["size"]
        self._store, self._form = store, form
        self._play, self._met = 0, 0

    @property
    def form(self) -> Mapping[str, Any]:
        """See `Meeting`."""
        return self._form

    def begin(self, number: int | None = None) -> int:
        """See `Meeting`; forgets what this one said in the play before, which all have left."""
        with suppress(RuntimeError):
            for place in range(self._met):
                for said in (self.rank, *(["all"] if self.rank == 0 else [])):
                    self._store.delete_key(f"{self._play}/{place}/{said}")
        self._play, self._met = self._play + 1 if number is None else number, 0
        return self._play

    def all_gather(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        """Do this one's share and return all shares; raises PeerFailed, StopRequested, and EngineError without the store."""
        own = work()
        key, self._met = f"{self._play}/{self._met}", self._met + 1
        try:
            self._store.set(f"{key}/{self.rank}", own)
            if self.rank == 0:
                every = [self._wait(f"{key}/{rank}") for rank in range(self.size)]
                sizes = json.dumps([len(each) for each in every]).encode()
                self._store.set(f"{key}/all", sizes + b"\n" + b"".join(every))
            told, _, rest = self._wait(f"{key}/all").partition(b"\n")
        except RuntimeError as error:
            if isinstance(error, EngineError):
                raise
            raise EngineError(
                f"The processes that play lost one another at '{at}': {_first_line(error)}. Resume the run."
            ) from error
        found, start = [], 0
        for size in json.loads(told):
            found.append(rest[start : start + size])
            start += size
        return found

    def _wait(self, key: str) -> bytes:
        # The store's own `wait` would print two lines on stderr whenever it gives up.
        pause, looked = LEAST_PAUSE, time.monotonic()
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(1.5 * pause, MOST_PAUSE)
            if time.monotonic() - looked < LOOK:
                continue
            looked = time.monotonic()
            stop_if_asked()
            if self._store.check([f"{self._play}/failed"]):
                said = json.loads(self._store.get(f"{self._play}/failed"))
                raise PeerFailed(f"Rank {said['rank']} failed while it played: {said['message']}")
        return bytes(self._store.get(key))

    def fail(self, error: BaseException) -> None:
        """See `Meeting`; of all failures the first is kept."""
        said = json.dumps({"rank": self.rank, "message": str(error)})
        with suppress(RuntimeError):
            self._store.compare_set(f"{self._play}/failed", "", said)


def meeting_from(form: Mapping[str, Any]) -> StoreMeeting:
    """Return a place at a meeting for a process that another one has given its `Meeting.form`.

    `address` and `port` are the store's, `prefix` sets the meeting apart from others there, `rank` is one of `size`.
    """
    try:
        store = TCPStore(
            form["address"],
            form["port"],
            None,
            is_master=False,
            timeout=timedelta(seconds=CONNECTING),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise EngineError(
            f"A process that plays did not reach rank 0 at {form['address']}:{form['port']}: {_first_line(error)}. Look whether "
            "a firewall is between the machines."
        ) from error
    return StoreMeeting(PrefixStore(form["prefix"], store), form)


def own_store(host: str) -> tuple[Any, dict[str, Any]]:
    """Start a store in this process, and return it with where others reach it, for `meeting_from`; it ends with this process."""
    store = TCPStore(host, 0, None, is_master=True, wait_for_workers=False)
    return store, {"address": host, "port": store.port, "prefix": PREFIX}


def _raised_in_every_rank(rank: int, said: Mapping[str, Any], own: BaseException | None) -> BaseException:
    """Return a rank's error as every rank raises it; `own` is the error itself, in the rank that caught it."""
    same = received_error(said, f"Rank {rank}", named=True)
    if own is not None and type(same) is not type(own):  # a class that only the rank that raised it knows
        return own
    same.__cause__ = own
    return same


BUCKET = 1 << 23
"""Most numbers that are summed at once; small tensors share a call."""
CONNECTING = 10.0
"""Seconds to reach the store, for a process that only has to say why it ends."""

_joined: list[RankGroup] = []
"""The group of this process, once it has joined one."""


class RankGroup(Ranks):
    """This process among the others; see `ranks.Ranks`."""

    def __init__(self, seat: LaunchedRank, seconds: float) -> None:
        """Join the others; every wait, this one too, takes `seconds` at most. Raises EngineError that names missing ranks."""
        self.rank, self.size = seat.rank, seat.size
        self._seconds = seconds
        doing("waiting for all ranks to start")
        store = _store(seat, seconds)
        self.heartbeat = Heartbeat(store.clone(), seat.rank, seat.size)
        # Wait until every rank is there; EngineError names those that are not.
        store.set(f"here/{seat.rank}", json.dumps(whereabouts()))
        keys = [f"here/{rank}" for rank in range(seat.size)]
        until = time.monotonic() + seconds
        while not store.check(keys):
            said = self.heartbeat.failure()
            if said is not None:
                raise EngineError(f"Rank {said[0]} failed before all had started: {said[1]}")
            if time.monotonic() > until:
                absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
                raise EngineError(
                    f"After {seconds:g} s {len(absent)} of {seat.size} processes have not joined: rank {', '.join(absent)}. Look at "
                    "their machines' output, and start all of them with the same WORLD_SIZE (`torchrun --nnodes`)."
                )
            time.sleep(0.05)
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
        self._store_barrier: StoreBarrier | None = None
        self._meeting: StoreMeeting | None = None
        self._seat = seat
        self._waits: dict[str, float] = {}
        """Seconds, by the name of an exchange."""
        self._agreement = Agreement()
        self.heard = False
        """Whether this rank ends by the error of another one, which prints it."""
        self.left_behind = False
        """Whether this rank ends because another one is gone."""
        agreements.append(self._agreement)
        self.heartbeat.begin()

    def all_gather(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        """Do this rank's share and return all shares; see `ranks.Ranks`."""
        own, failure = b"", None
        said: dict[str, Any] = {"at": at}
        self._agreement.apart = True
        try:
            own = work()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - raised below, in every rank
            failure = error
            said |= sent_error(error)
        finally:
            self._agreement.apart = False
        # First exchange how it went, so that all ranks go on, stop or fail alike; then the shares.
        said["asked"] = asked_by()
        begun = time.monotonic()
        heard = [json.loads(each) for each in self._exchange(at, json.dumps(said).encode())]
        self._note_wait(at, begun)
        self._agreement.meet(next((each["asked"] for each in heard if each["asked"]), 0))
        stop = StopRequested.__name__
        # Who failed only because another did is heard after that one.
        told = sorted(enumerate(heard), key=lambda each: each[1].get("kind") == PeerFailed.__name__)
        stopped = any(each.get("kind") == stop for each in heard)
        for rank, each in told:
            if each.get("kind", stop) != stop and not (stopped and each["kind"] == PeerFailed.__name__):
                self.heard = rank != self.rank
                raise _raised_in_every_rank(rank, each, failure if rank == self.rank else None)
        if stopped:
            raise failure if isinstance(failure, StopRequested) else StopRequested
        places = [each["at"] for each in heard]
        if len(set(places)) > 1:
            raise EngineError(
                f"The ranks have come apart: {', '.join(f'rank {r} at {place!r}' for r, place in enumerate(places))}. Something "
                "that all decide alike was decided differently; please report it, with the recipe."
            )
        return self._exchange(at, own)

    def store_barrier(self) -> StoreBarrier:
        """Return where threads of all ranks meet while the main threads do other work."""
        if self._store_barrier is None:
            self._store_barrier = StoreBarrier(
                PrefixStore("barrier", self._store.clone()), self.heartbeat, self._seconds
            )
        return self._store_barrier

    def meeting(self) -> StoreMeeting:
        """Return where those that play for the ranks agree; see `ranks.Ranks`."""
        if self._meeting is None:
            form = {
                "address": self._seat.address,
                "port": self._seat.port,
                "prefix": f"{PREFIX}/{restarts()}/meeting",
                "rank": self.rank,
                "size": self.size,
            }
            self._meeting = StoreMeeting(PrefixStore("meeting", self._store.clone()), form)
        return self._meeting

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all ranks, in place."""
        waiting: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        begun = time.monotonic()
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
        self._note_wait("sums", begun)

    def take_waits(self) -> dict[str, float]:
        """Return the seconds of waiting since the last call; sums count whole, since a collective does not tell its waits."""
        waits, self._waits = self._waits, {}
        return waits

    def _note_wait(self, at: str, begun: float) -> None:
        self._waits[at] = self._waits.get(at, 0.0) + time.monotonic() - begun

    def _sum(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        _finish(distributed.all_reduce(flat, async_op=True))
        pieces = flat.split([tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))

    def _exchange(self, at: str, own: bytes) -> list[bytes]:
        """Return the bytes of every rank; EngineError where a rank is lost."""
        try:
            size = torch.tensor([len(own)])
            sizes = [torch.zeros_like(size) for _ in range(self.size)]
            _finish(distributed.all_gather(sizes, size, async_op=True))
            most = max(int(each) for each in sizes)
            if most == 0:
                return [b""] * self.size
            mine = torch.zeros(most, dtype=torch.uint8)  # a collective takes tensors of one size
            if own:
                mine[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
            every = [torch.empty_like(mine) for _ in range(self.size)]
            _finish(distributed.all_gather(every, mine, async_op=True))
        except RuntimeError as error:
            raise self._lost(at, error) from None
        return [each[: int(n)].numpy().tobytes() for each, n in zip(every, sizes, strict=True)]

    def _lost(self, at: str, error: Exception) -> EngineError:
        gone = self.end_behind(error)
        if gone is None:
            text = f"a connection between two ranks broke at '{at}': {_first_line(error)}"
            return EngineError(f"Rank {self.rank} lost the others: {text}. Resume the run.")
        return EngineError(gone)

    def end_behind(self, error: Exception) -> str | None:
        """Return, in words, which rank's end an error of torch comes from; None where all ranks are alive."""
        rank, why = self.heartbeat.why_lost() if isinstance(error, RuntimeError) else (None, "")
        if rank is None:
            return None
        self.left_behind = True
        self.heard = self.heartbeat.failure() is not None
        self.heartbeat.fail(rank, why)
        return f"Rank {rank} is gone: {why}. Resume the run from its last checkpoint."

    def leave(self, failure: str | None = None) -> None:
        """Leave the group: after all have come so far, or with the reason of a failure."""
        if failure is None:
            doing(LAST)
            with suppress(EngineError):
                self.all_gather("end", bytes)
        self.heartbeat.end(failure)
        if self._agreement in agreements:
            agreements.remove(self._agreement)
        if self in _joined:
            _joined.remove(self)
        with suppress(RuntimeError):
            if distributed.is_initialized():
                distributed.destroy_process_group()


def ranks_here(seconds: float) -> Ranks:
    """Return the ranks with which a launcher started this process, joining them at the first call; `ALONE` without a launcher."""
    if _joined:
        return _joined[0]
    seat = launched_rank()
    if seat is None:
        return ALONE
    _joined.append(RankGroup(seat, seconds))
    return _joined[0]


def leave_ranks(failure: str | None = None) -> None:
    """Leave the ranks that this process has joined, if any."""
    for group in tuple(_joined):
        group.leave(failure)


def say_for_all(reason: str) -> None:
    """Print why this process ends in error, unless another rank has printed it; tell the others."""
    if own_place.launcher_reports and _joined and _joined[0].left_behind:
        # The launcher sees which rank is gone, and how, and prints it.
        sys.stdout.flush()
        os._exit(EXIT_ALONE)

    say = partial(print, cleaned(reason), file=sys.stderr, flush=True)  # of all ranks, one speaks
    try:
        if _joined:
            heartbeat, after_others = _joined[0].heartbeat, _joined[0].heard
        else:
            seat = launched_rank()
            assert seat is not None, "alone, a process speaks for itself"
            heartbeat, after_others = Heartbeat(_store(seat, CONNECTING), seat.rank, seat.size), False
    except (ConfigError, EngineError):
        say()
        return
    heartbeat.end(reason)
    heartbeat.say_once(say, after_others=after_others)


def say_defect(error: Exception) -> int:
    """Print, once for all ranks, that a rank is gone where an unexpected error comes from that, or its traceback; return the exit code."""
    gone = _joined[0].end_behind(error) if _joined else None
    say_for_all("".join(traceback.format_exception(error)) if gone is None else f"kapelle: {gone}")
    return 1 if gone is None else EXIT_WRONG


def _store(seat: LaunchedRank, seconds: float) -> Any:
    """Return a connection to the store of this job's processes, which rank 0 keeps where the launcher does not."""
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    leads = seat.rank == 0 and not by_launcher
    try:
        store = TCPStore(
            seat.address,
            seat.port,
            None,
            is_master=leads,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=own_place.listening if leads else None,
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
    return PrefixStore(f"{PREFIX}/{restarts()}", store)


PREFIX = "kapelle"
"""Begins our keys in the store."""


def restarts() -> str:
    """Return how often torchrun has restarted this job, which it does with the same store."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _finish(work: Any) -> None:
    """Wait for a collective; its own `wait` would not let Python handle signals."""
    pause = 0.0
    while not work.is_completed():
        time.sleep(pause)
        pause = min(pause + 2e-5, 2e-3)
    work.wait()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
