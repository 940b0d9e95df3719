"""Connect the processes of one run with `torch.distributed`: they exchange data, send heartbeats and end together.

Errors, stop requests and results are exchanged as bytes with gloo, and gradients with the backend of their device. Every wait has a
time limit, can be interrupted by a signal, and ends when a rank is lost.

Each rank sends heartbeats to the store of `torchrun`, or to the store of rank 0 without `torchrun`. A rank that fails writes the
reason to the store. Each rank watches the heartbeats of the next rank. When a rank is lost, the other ranks end within seconds and
report which rank was lost. A process that is waiting inside user code is killed. The same happens to a rank that has lost the
connection to the store, or that receives no response from the store for `process_tree.stalled_after()` seconds. If `kapelle train
--launch torchrun` has started the ranks, the launcher reports which rank died or is stopped, and the ranks end without a message.
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
from kapelle.runtime.interrupts import Agreement, StopRequested, agreements, requested_by, stop_if_requested
from kapelle.runtime.machine import log_last
from kapelle.runtime.process_tree import EXIT_ALONE, LAST, LifeSigns, doing, own_place, stalled_after
from kapelle.runtime.ranks import ALONE, LaunchedRank, Meeting, Peers, Ranks, launched_rank

# -------- Heartbeat and store barrier, over the store

BEAT = 0.5
"""Time in seconds between two heartbeats."""
ELSEWHERE = 2.0
"""Factor for the limit `stalled_after()` of a rank on another machine, whose CPU time is unknown."""
SOON = 3.0
"""Time in seconds within which a running rank sends a heartbeat, and a failed rank reports its reason."""
END_GRACE = 10.0
"""Time in seconds for this process to end normally after another rank was lost."""
EXIT_WRONG = 2


STORE_GONE = "the processes' store is gone, because rank 0 or the launcher has ended"


class StoreTimeout(RuntimeError):
    """The store did not respond in time."""


class _StoreQueries:
    """Runs queries to a store that may never respond, on a separate thread.

    A call to a store whose process is stopped does not return. After the connection breaks, torch prints a long message for every
    further call.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._queries: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]]] = queue.SimpleQueue()
        self.broken: str | None = None
        threading.Thread(target=self._answer, daemon=True, name="heartbeat's store").start()

    def run(self, query: Callable[[Any], Any]) -> Any:
        """Run a query and return its result. Raises StoreTimeout, or RuntimeError if the connection is broken."""
        answer: Future[Any] = Future()
        self._queries.put((query, answer))
        try:
            return answer.result(SOON)
        except TimeoutError:
            answer.cancel()
            raise StoreTimeout(f"no answer for {SOON:g} s") from None

    def _answer(self) -> None:
        while True:
            query, answer = self._queries.get()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                if self.broken is not None:
                    raise RuntimeError(self.broken)  # as torch did the first time
                answer.set_result(query(self._store))
            except BaseException as error:  # noqa: BLE001 - the waiting code raises it
                if isinstance(error, DistNetworkError):
                    self.broken = str(error)
                answer.set_exception(error)


class Heartbeat:
    """The heartbeats of all ranks, and the reason of the first failure of a rank."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Use a connection to the store that no other code uses."""
        store.set_timeout(timedelta(seconds=SOON))
        self.rank, self.size = rank, size
        self._line = _StoreQueries(store)
        self._query = self._line.run
        self._over = threading.Event()

    def begin(self) -> None:
        """Start to send heartbeats, and to watch the heartbeats of the next rank."""
        threading.Thread(target=self._watch, daemon=True, name="heartbeat").start()

    def end(self, failure: str | None = None) -> None:
        """Stop the heartbeats. If `failure` is given, report it to the other ranks."""
        self._over.set()
        if failure is not None:
            self.fail(self.rank, failure)

    def fail(self, rank: int, reason: str) -> None:
        """Report that this rank or another rank has failed. Only the first report is kept."""
        with suppress(RuntimeError):
            self._query(
                lambda store: store.compare_set("failed", "", json.dumps({"rank": rank, "reason": reason}))
            )

    def failure(self) -> tuple[int, str] | None:
        """Return the rank that failed first and its reason, or None if no rank has failed."""
        with suppress(RuntimeError):
            if self._query(lambda store: store.check(["failed"])):
                first = json.loads(self._query(lambda store: store.get("failed")))
                return int(first["rank"]), str(first["reason"])
        return None

    def why_lost(self) -> tuple[int | None, str]:
        """Return the rank that was lost and the reason.

        The rank reports the reason within seconds, or its heartbeats have stopped.
        """
        until = time.monotonic() + SOON
        before = self._beats()
        while time.monotonic() < until:
            failure = self.failure()
            if failure is not None:
                return failure
            time.sleep(BEAT / 5)
        now = self._beats()
        silent = [
            rank for rank in range(self.size) if before.get(rank) == now.get(rank) and rank != self.rank
        ]
        if not now:
            return 0, STORE_GONE
        if silent:
            return silent[0], "it ended without a message: it was killed, or its machine is unreachable"
        return None, "a connection between two ranks broke"

    def print_once(self, report: Callable[[], None], *, after_others: bool = False) -> None:
        """Call `report` unless another rank has already printed why all ranks end, and wait until the report is printed."""
        try:
            if after_others and self._becomes("saying"):
                self._becomes("reported")
                return
            if self._query(lambda store: store.add("saying", 1)) == 1:
                report()
                self._query(lambda store: store.add("reported", 1))
            else:
                self._becomes("reported")
        except RuntimeError:  # without a store, printing twice is better than not at all
            report()

    def _becomes(self, name: str) -> bool:
        """Return whether a key is added to the store within `SOON` seconds."""
        until = time.monotonic() + SOON
        while time.monotonic() < until:
            if self._query(lambda store: store.check([name])):
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
        return int(self._query(lambda store: store.add(f"beat/{rank}", 0)))

    def _watch(self) -> None:
        """Send heartbeats, and end this process if another rank is lost and this process does not notice."""
        neighbour = (self.rank + 1) % self.size
        limit, looked = stalled_after(), time.monotonic()
        signs: LifeSigns | None = None
        seen, still, unanswered = [-1], 0.0, 0.0
        while not self._over.wait(BEAT):
            # Bounded, because the others were not silent while this process was stopped.
            now = time.monotonic()
            passed, looked = min(now - looked, SOON + 2 * BEAT), now
            try:
                self._query(lambda store: store.add(f"beat/{self.rank}", 1))
                beat = self._beat_of(neighbour)
                failed, unanswered = self.failure(), 0.0
                if signs is None:
                    there = json.loads(self._query(lambda store: store.get(f"here/{neighbour}")))
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
                        f"the processes' store has not answered for {limit:g} s, because its process is stopped",
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
                line = cleaned("kapelle: Rank {} has failed: {}".format(*failed))
                log_last(f"{line}\n".encode())
                if own_place.launcher_reports:
                    os._exit(EXIT_ALONE)
                self.print_once(partial(print, line, file=sys.stderr, flush=True), after_others=True)
                os._exit(EXIT_WRONG)


def whereabouts() -> dict[str, Any]:
    """Return the machine, the process namespace and the process id of this process."""
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        space = ""
    return {"host": socket.gethostname(), "space": space, "process": os.getpid()}


LOOK = 0.2
"""Time in seconds between two checks for failures and stop requests while a process waits."""
LEAST_PAUSE, MOST_PAUSE = 0.001, 0.05
"""Minimum and maximum time in seconds between two checks for new values. The time starts at the minimum and increases."""


def _wait_for(store: Any, keys: Sequence[str], check: Callable[[], None]) -> None:
    """Wait until all keys are in the store, and call `check` at regular intervals."""
    # The store's own `wait` would print two lines on stderr at each timeout.
    pause, checked = LEAST_PAUSE, time.monotonic()
    while not store.check(list(keys)):
        time.sleep(pause)
        pause = min(1.5 * pause, MOST_PAUSE)
        if time.monotonic() - checked >= LOOK:
            checked = time.monotonic()
            check()


class StoreBarrier(Peers):
    """An exchange over the store for one thread of each rank. Collective operations can be used only by the main threads."""

    def __init__(self, store: Any, heartbeat: Heartbeat, seconds: float) -> None:
        """Use a connection to the store that no other code uses. A rank waits at most `seconds` for the other ranks."""
        store.set_timeout(timedelta(seconds=SOON))
        self.rank, self.size = heartbeat.rank, heartbeat.size
        self._store, self._heartbeat, self._seconds = store, heartbeat, seconds
        self._exchanges = 0

    def all_gather(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        """Do this rank's share of the work, and return the shares of all ranks.

        Raises EngineError if another rank ends or does not arrive in time.
        """
        failure: Exception | None = None
        own, report = b"", {}
        try:
            own = work()
        except Exception as error:  # noqa: BLE001 - raised below, in every rank
            failure, report = error, sent_error(error)
        number, until = self._exchanges, time.monotonic() + self._seconds
        keys = [f"{number}/{rank}" for rank in range(self.size)]

        def check() -> None:
            lost = self._heartbeat.failure()
            if lost is not None:
                raise EngineError(
                    f"Rank {lost[0]} is gone: {lost[1]}. Resume the run from its last checkpoint."
                )
            if time.monotonic() > until:
                raise EngineError(f"Not all ranks reached '{at}' within {self._seconds:g} s. Resume the run.")

        try:
            self._store.set(keys[self.rank], json.dumps(report).encode() + b"\n" + own)
            _wait_for(self._store, keys, check)
            every = [bytes(self._store.get(key)).partition(b"\n") for key in keys]
            self._exchanges += 1
            if number:  # every rank has read the values of the previous exchange
                with suppress(RuntimeError):
                    self._store.delete_key(f"{number - 1}/{self.rank}")
        except RuntimeError as error:
            raise EngineError(f"Rank {self.rank} lost the others at '{at}'. Resume the run.") from error
        for rank, (text, _, _) in enumerate(every):
            if theirs := json.loads(text):
                raise _raised_in_every_rank(rank, theirs, failure if rank == self.rank else None)
        return [share for _, _, share in every]


class StoreMeeting(Meeting):
    """A meeting of processes over the store.

    The store keeps all values until the next collection, so that a restarted process can read them.

    The first process collects all values, so that every other process sends and receives two messages, regardless of the number of
    processes.
    """

    def __init__(self, store: Any, form: Mapping[str, Any]) -> None:
        """Use a connection to the store that no other code uses. The argument `form` contains `rank` and `size`; see `meeting_from`."""
        self.rank, self.size = form["rank"], form["size"]
        self._store, self._form = store, form
        self._play, self._met = 0, 0

    @property
    def form(self) -> Mapping[str, Any]:
        """See `Meeting`."""
        return self._form

    def begin(self, number: int | None = None) -> int:
        """See `Meeting`. This method deletes this process's values of the previous collection, which all processes have left."""
        names = [self.rank, *(["all"] if self.rank == 0 else [])]
        with suppress(RuntimeError):
            for place in range(self._met):
                for name in names:
                    self._store.delete_key(f"{self._play}/{place}/{name}")
        self._play, self._met = self._play + 1 if number is None else number, 0
        return self._play

    def all_gather(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        """Do this process's share of the work, and return the shares of all processes.

        Raises PeerFailed, StopRequested, and EngineError if the store is lost.
        """
        own = work()
        key, self._met = f"{self._play}/{self._met}", self._met + 1
        try:
            self._store.set(f"{key}/{self.rank}", own)
            if self.rank == 0:
                every = [self._get(f"{key}/{rank}") for rank in range(self.size)]
                sizes = json.dumps([len(each) for each in every]).encode()
                self._store.set(f"{key}/all", sizes + b"\n" + b"".join(every))
            sizes, _, rest = self._get(f"{key}/all").partition(b"\n")
        except RuntimeError as error:
            if isinstance(error, EngineError):
                raise
            raise EngineError(
                f"The sampling processes lost their connection at '{at}': {_first_line(error)}. Resume the run."
            ) from error
        found, start = [], 0
        for size in json.loads(sizes):
            found.append(rest[start : start + size])
            start += size
        return found

    def _get(self, key: str) -> bytes:
        _wait_for(self._store, [key], self._check)
        return bytes(self._store.get(key))

    def _check(self) -> None:
        stop_if_requested()
        if self._store.check([f"{self._play}/failed"]):
            failure = json.loads(self._store.get(f"{self._play}/failed"))
            raise PeerFailed(
                f"Rank {failure['rank']} failed while it collected episodes: {failure['message']}"
            )

    def fail(self, error: BaseException) -> None:
        """See `Meeting`. Only the first failure is kept."""
        failure = json.dumps({"rank": self.rank, "message": str(error)})
        with suppress(RuntimeError):
            self._store.compare_set(f"{self._play}/failed", "", failure)


def meeting_from(form: Mapping[str, Any]) -> StoreMeeting:
    """Join the meeting that is described by the `Meeting.form` of another process.

    The values `address` and `port` are those of the store, `prefix` is the prefix of the meeting's keys, `rank` is the index of the
    process, and `size` is the number of processes.
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
            f"A sampling process cannot reach rank 0 at {form['address']}:{form['port']}: {_first_line(error)}. Check for a "
            "firewall between the machines."
        ) from error
    return StoreMeeting(PrefixStore(form["prefix"], store), form)


def own_store(host: str) -> tuple[Any, dict[str, Any]]:
    """Start a store in this process, and return the store and its address for `meeting_from`.

    The store ends with this process.
    """
    store = TCPStore(host, 0, None, is_master=True, wait_for_workers=False)
    return store, {"address": host, "port": store.port, "prefix": PREFIX}


def _raised_in_every_rank(rank: int, report: Mapping[str, Any], own: BaseException | None) -> BaseException:
    """Return the error of a rank in the form in which every rank raises it.

    In the rank that caught the error, `own` is the error itself.
    """
    same = received_error(report, f"Rank {rank}", named=True)
    if own is not None and type(same) is not type(own):  # other ranks may lack this class
        return own
    same.__cause__ = own
    return same


BUCKET = 1 << 23
"""Maximum number of elements in one sum. Small tensors are combined in one call."""
CONNECTING = 10.0
"""Maximum time in seconds to connect to the store, for a process that only reports why it ends."""

_joined: list[RankGroup] = []
"""The group that this process has joined; empty if it has not joined a group."""


class RankGroup(Ranks):
    """This process as a member of a group of ranks; see `ranks.Ranks`."""

    def __init__(self, place: LaunchedRank, seconds: float) -> None:
        """Connect to the other ranks. Every wait takes at most `seconds`.

        Raises EngineError, which lists the missing ranks, if a rank does not arrive in time.
        """
        self.rank, self.size = place.rank, place.size
        self._seconds = seconds
        doing("waiting for all ranks to start")
        store = _store(place, seconds)
        self.heartbeat = Heartbeat(store.clone(), place.rank, place.size)
        store.set(f"here/{place.rank}", json.dumps(whereabouts()))
        keys = [f"here/{rank}" for rank in range(place.size)]
        until = time.monotonic() + seconds
        while not store.check(keys):
            lost = self.heartbeat.failure()
            if lost is not None:
                raise EngineError(f"Rank {lost[0]} failed before all had started: {lost[1]}")
            if time.monotonic() > until:
                absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
                raise EngineError(
                    f"After {seconds:g} s {len(absent)} of {place.size} processes have not joined: rank {', '.join(absent)}. Read "
                    "their output, and start all of them with the same WORLD_SIZE (`torchrun --nnodes`)."
                )
            time.sleep(0.05)
        if torch.cuda.is_available():
            torch.cuda.set_device(place.local)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            distributed.init_process_group(
                backend,
                store=PrefixStore("group", store),
                rank=place.rank,
                world_size=place.size,
                timeout=timedelta(seconds=seconds),
            )
        except RuntimeError as error:
            raise EngineError(
                f"Rank {place.rank} cannot connect to the others: {_first_line(error)}. Set GLOO_SOCKET_IFNAME to the network "
                "interface, and check for a firewall."
            ) from error
        self._store = store
        self._store_barrier: StoreBarrier | None = None
        self._meeting: StoreMeeting | None = None
        self._place = place
        self._waits: dict[str, float] = {}
        """Mapping from the name of each exchange to the time in seconds spent waiting in it."""
        self._agreement = Agreement()
        self.reported_elsewhere = False
        """Whether this rank ends with the error of another rank, which prints the error."""
        self.left_behind = False
        """Whether this rank ends because another rank was lost."""
        agreements.append(self._agreement)
        self.heartbeat.begin()

    def all_gather(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        """Do this rank's share of the work, and return the shares of all ranks; see `ranks.Ranks`."""
        own, failure = b"", None
        report: dict[str, Any] = {"at": at}
        self._agreement.apart = True
        try:
            own = work()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - raised below, in every rank
            failure = error
            report |= sent_error(error)
        finally:
            self._agreement.apart = False
        # First exchange reports, so that all ranks continue, stop or fail together; then the shares.
        report["stop_signal"] = requested_by()
        begun = time.monotonic()
        reports = [json.loads(each) for each in self._exchange(at, json.dumps(report).encode())]
        self._note_wait(at, begun)
        self._agreement.meet(next((each["stop_signal"] for each in reports if each["stop_signal"]), 0))
        stop, peer = StopRequested.__name__, PeerFailed.__name__
        stopped = any(each.get("kind") == stop for each in reports)
        # Raise an original error before those of ranks that failed because of it.
        for rank, each in sorted(enumerate(reports), key=lambda item: item[1].get("kind") == peer):
            if each.get("kind", stop) != stop and not (stopped and each["kind"] == peer):
                self.reported_elsewhere = rank != self.rank
                raise _raised_in_every_rank(rank, each, failure if rank == self.rank else None)
        if stopped:
            raise failure if isinstance(failure, StopRequested) else StopRequested
        places = [each["at"] for each in reports]
        if len(set(places)) > 1:
            raise EngineError(
                f"The ranks are at different exchanges: {', '.join(f'rank {r} at {place!r}' for r, place in enumerate(places))}. Please report "
                "this defect, with the recipe."
            )
        return self._exchange(at, own)

    def store_barrier(self) -> StoreBarrier:
        """See `ranks.Ranks`."""
        if self._store_barrier is None:
            self._store_barrier = StoreBarrier(
                PrefixStore("barrier", self._store.clone()), self.heartbeat, self._seconds
            )
        return self._store_barrier

    def meeting(self) -> StoreMeeting:
        """See `ranks.Ranks`."""
        if self._meeting is None:
            form = {
                "address": self._place.address,
                "port": self._place.port,
                "prefix": f"{PREFIX}/{restarts()}/meeting",
                "rank": self.rank,
                "size": self.size,
            }
            self._meeting = StoreMeeting(PrefixStore("meeting", self._store.clone()), form)
        return self._meeting

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all ranks in place."""
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
        """Return the time in seconds spent waiting since the last call. For sums, this time includes their computation."""
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
        """Return the bytes of every rank. Raises EngineError if a rank is lost."""
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
        """Return a message about the lost rank that caused an error of torch, or None if all ranks are alive."""
        rank, why = self.heartbeat.why_lost() if isinstance(error, RuntimeError) else (None, "")
        if rank is None:
            return None
        self.left_behind = True
        self.reported_elsewhere = self.heartbeat.failure() is not None
        self.heartbeat.fail(rank, why)
        return f"Rank {rank} is gone: {why}. Resume the run from its last checkpoint."

    def leave(self, failure: str | None = None) -> None:
        """Leave the group together with all ranks, or immediately if there is a `failure`."""
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
    """Return the ranks that a launcher started together with this process.

    The first call connects to the other ranks. Without a launcher, the result is `ALONE`.
    """
    if _joined:
        return _joined[0]
    place = launched_rank()
    if place is None:
        return ALONE
    _joined.append(RankGroup(place, seconds))
    return _joined[0]


def leave_ranks(failure: str | None = None) -> None:
    """Leave the group of ranks that this process has joined, if there is one."""
    for group in tuple(_joined):
        group.leave(failure)


def report_to_all(reason: str) -> None:
    """Print why this process fails, unless another rank has already printed it, and report the reason to the other ranks."""
    if own_place.launcher_reports and _joined and _joined[0].left_behind:
        # The launcher prints which rank is gone.
        sys.stdout.flush()
        os._exit(EXIT_ALONE)

    report = partial(print, cleaned(reason), file=sys.stderr, flush=True)
    try:
        if _joined:
            heartbeat, after_others = _joined[0].heartbeat, _joined[0].reported_elsewhere
        else:
            place = launched_rank()
            assert place is not None, "a single process prints its own error"
            heartbeat, after_others = Heartbeat(_store(place, CONNECTING), place.rank, place.size), False
    except (ConfigError, EngineError):
        report()
        return
    heartbeat.end(reason)
    heartbeat.print_once(report, after_others=after_others)


def report_defect(error: Exception) -> int:
    """Print an unexpected error once for all ranks, and return the exit code.

    The printed message is the lost rank that caused the error, or else the traceback.
    """
    gone = _joined[0].end_behind(error) if _joined else None
    report_to_all("".join(traceback.format_exception(error)) if gone is None else f"kapelle: {gone}")
    return 1 if gone is None else EXIT_WRONG


def _store(place: LaunchedRank, seconds: float) -> Any:
    """Return a connection to the store of this job, which runs in the launcher or else in rank 0."""
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    leads = place.rank == 0 and not by_launcher
    try:
        store = TCPStore(
            place.address,
            place.port,
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
                f"Rank 0 cannot listen on port {place.port}: {_first_line(error)}. Set MASTER_PORT (`torchrun --master-port`) to a free "
                "port for all processes."
            ) from error
        raise EngineError(
            f"Rank {place.rank} did not reach rank 0 at {place.address}:{place.port} within {seconds:g} s: {_first_line(error)}. "
            "Check that it has started, and that MASTER_ADDR is its machine."
        ) from error
    return PrefixStore(f"{PREFIX}/{restarts()}", store)


PREFIX = "kapelle"
"""Prefix of kapelle's keys in the store."""


def restarts() -> str:
    """Return the number of times that torchrun has restarted this job with the same store, as a string."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _finish(work: Any) -> None:
    """Wait for a collective operation. The method `wait` of the operation would prevent Python from handling signals."""
    pause = 0.0
    while not work.is_completed():
        time.sleep(pause)
        pause = min(pause + 2e-5, 2e-3)
    work.wait()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
