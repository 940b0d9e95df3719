"""Policies that vLLM samples for, in this process: batches, adapters and versions as a run needs them.

Requests meet as in the local engine: when no coroutine can continue without an answer, all of them join the batch in a fixed
order. What vLLM gets wrong silently is kept away from it: rows with and without an adapter are never in one batch
(`versions.py`), new weights never have an old name (`published.py`), and weights of a whole model are loaded by starting anew.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from kapelle.engines.rollout.gathering import PAUSE, Line, Pending, all_here
from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.engines.rollout.vllm.published import Held, Shelf, base_model, fitting
from kapelle.engines.rollout.vllm.sampler import BaseModel, Row, Sampled, Sampler, Start
from kapelle.errors import EngineError, did_you_mean
from kapelle.models.language_model import LanguageModel
from kapelle.models.renderer import ChatRenderer
from kapelle.models.weights import weights_hash
from kapelle.runtime.attendance import Room, room
from kapelle.team import Policy

_Waiting = Pending[Row]


@dataclass(slots=True, eq=False)
class _Queue(Line[Row]):
    """One base model, its sampler, and the requests for it."""

    model: LanguageModel
    about: BaseModel
    sampler: Sampler | None = None
    """None before the first request, and after an error."""
    in_flight: dict[str, _Waiting] = field(default_factory=dict)
    """By row id."""

    @property
    def busy(self) -> bool:
        """True if any request waits for its answer."""
        return bool(self.arrived or self.waiting or self.in_flight)

    def close(self) -> None:
        """Release the sampler; the next request starts another."""
        sampler, self.sampler = self.sampler, None
        if sampler is not None:
            sampler.close()


class VllmEngine:
    """Samples with vLLM for the policies whose base models it is given."""

    def __init__(
        self,
        models: Mapping[str, LanguageModel],
        policies: Sequence[Policy],
        start: Start,
        folder: Path,
        *,
        mixes: bool = False,
        restarts: bool = True,
        max_rows: int = 256,
        patience: float = 60.0,
    ) -> None:
        """Sample from copies of these models that `start` makes; published weights pass through `folder`.

        `mixes` tells whether rows with and without an adapter may share a batch, `restarts` whether `start` can put vLLM
        on other base weights.
        """
        self._start, self._mixes, self._max_rows, self._patience = start, mixes, max_rows, patience
        self._restarts = restarts
        self._shelf = Shelf(folder)
        self._rows = count()
        self._pump: asyncio.Task[None] | None = None
        played = [policy for policy in policies if policy.endpoint is None]
        self._held = {policy.name: self._shelf.begin(policy, models[policy.base]) for policy in played}
        self._queues: dict[int, _Queue] = {}
        # Also when nobody closes the engine: a server and gigabytes of files would stay.
        self._end = weakref.finalize(self, _release, self._queues, self._shelf)
        for model in {id(held.model): held.model for held in self._held.values()}.values():
            own = [held.policy for held in self._held.values() if held.model is model]
            self._queues[id(model)] = _Queue(model, base_model(model, self._path(model), own))
        try:
            for queue in self._queues.values():
                queue.sampler = start(
                    queue.about
                )  # now, so that what cannot be started stops the run at its beginning
        except BaseException:
            self.close()
            raise

    @property
    def policies(self) -> Sequence[str]:
        """Names of the policies that it holds."""
        return tuple(self._held)

    @property
    def notes(self) -> Sequence[str]:
        """What the models' chat templates do not take, and what is done about it."""
        return tuple(dict.fromkeys(n for held in self._held.values() for n in held.model.renderer.notes))

    def renderer(self, policy: str) -> ChatRenderer:
        """Return how a policy's conversations become tokens."""
        return self._find(policy).model.renderer

    async def generate(self, request: Request) -> Completion:
        """Return one completion, sampled together with the other requests of this moment."""
        queue = self._queue(request.policy)
        if self._pump is None or self._pump.done():
            self._forget_interrupted()
            self._pump = asyncio.get_running_loop().create_task(self._drain(room()))
        return await queue.answer_to(request)

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Take new weights: an adapter under a new name, a whole model by starting vLLM on it anew."""
        held, queue = self._find(policy), self._queue(policy)
        given = fitting(held, weights)
        if self._pump is None or self._pump.done():
            self._forget_interrupted()
        elif queue.in_flight:
            raise EngineError(
                f"Policy '{policy}' got new weights while {len(queue.in_flight)} requests to its base model are unfinished. "
                "Load weights when all are answered."
            )
        if held.adapter is None and not self._restarts:
            raise EngineError(
                f"Policy '{policy}' is a whole model, and a server that runs elsewhere takes adapters alone. Set "
                "`engine.server: start`, or leave `engine.server` out."
            )
        if held.adapter is None:
            self._restart_on(queue, self._shelf.model(held.model, given))
        else:
            old, held.adapter = held.adapter, self._shelf.adapter(held, given, version)
            if queue.sampler is not None:
                queue.sampler.drop_adapter(old)
                queue.sampler.forget_prefixes()
            self._shelf.drop(old.folder)
        held.version = version
        held.hash = weights_hash(given)

    def release_caches(self) -> None:
        """Let vLLM give back the memory of its device until the next request; on a CPU nothing is freed."""
        if self._pump is not None and not self._pump.done():
            return
        self._forget_interrupted()
        for queue in self._queues.values():
            if queue.sampler is not None:
                queue.sampler.forget_prefixes()
                queue.sampler.sleep()

    def close(self) -> None:
        """Stop vLLM and delete the files that it read; a second call does nothing."""
        self._held.clear()
        self._end()

    def _path(self, model: LanguageModel) -> str:
        """Return where vLLM finds a base: where it was read from, or a copy of what is in memory."""
        if Path(model.name).expanduser().is_dir():
            return str(Path(model.name).expanduser())
        return str(self._shelf.model(model, model.base_parameters()))

    def _restart_on(self, queue: _Queue, folder: Path) -> None:
        """Start vLLM on other base weights; loading them into a running one leaves a wrong model (0.32.0, on a CPU)."""
        old = Path(queue.about.path)
        queue.close()
        queue.about = replace(queue.about, path=str(folder))
        queue.sampler = self._start(queue.about)
        self._shelf.drop(old)

    def _forget_interrupted(self) -> None:
        """Drop what an interrupted run left here: nothing waits for it."""
        for queue in self._queues.values():
            if queue.in_flight and queue.sampler is not None:
                queue.sampler.abort(list(queue.in_flight))
            queue.in_flight.clear()
            queue.arrived = [pending for pending in queue.arrived if not pending.future.done()]
            queue.waiting = [pending for pending in queue.waiting if not pending.future.done()]

    async def _drain(self, here: Room) -> None:
        queues = list(self._queues.values())
        while any(queue.busy for queue in queues):
            try:
                await all_here(here, lambda: sum(len(queue.arrived) for queue in queues), self._patience)
            except Exception as error:  # noqa: BLE001 - passed on to the requests that wait
                for queue in queues:
                    _fail(queue, error)
            for queue in queues:
                queue.enqueue_arrived()
                try:
                    self._advance(queue)
                except Exception as error:  # noqa: BLE001 - passed on likewise
                    _fail(queue, error)

    def _advance(self, queue: _Queue) -> None:
        """Let waiting rows join, and sample until some row has finished or others should have their turn."""
        self._drop_cancelled(queue)
        self._join_waiting(queue)
        for _ in range(PAUSE):
            if not queue.in_flight:
                return
            assert queue.sampler is not None
            finished = queue.sampler.step()
            for sampled in finished:
                self._answer(queue, sampled)
            if finished:
                return

    def _drop_cancelled(self, queue: _Queue) -> None:
        queue.waiting = [pending for pending in queue.waiting if not pending.future.done()]
        gone = [row for row, pending in queue.in_flight.items() if pending.future.done()]
        if gone and queue.sampler is not None:
            queue.sampler.abort(gone)
        for row in gone:
            del queue.in_flight[row]

    def _join_waiting(self, queue: _Queue) -> None:
        """Let the first waiting rows join; rows with and without an adapter take turns where they must not meet."""
        if not queue.waiting:
            return
        if queue.sampler is None:
            queue.sampler = self._start(queue.about)
        joining = queue.waiting
        if not self._mixes:
            inside = next(iter(queue.in_flight.values()), queue.waiting[0])
            joining = [pending for pending in queue.waiting if self._kind(pending) == self._kind(inside)]
            if queue.in_flight and len(joining) < len(queue.waiting):
                return  # the others would wait for ever if these went on joining
        joining = joining[: max(0, self._max_rows - len(queue.in_flight))]
        taken = set(map(id, joining))
        queue.waiting = [pending for pending in queue.waiting if id(pending) not in taken]
        for pending in joining:
            held = self._find(pending.request.policy)
            row = Row(
                str(next(self._rows)),
                pending.request.prompt_ids,
                pending.request.sampling,
                pending.request.seed,
                held.adapter,
            )
            try:
                queue.sampler.add(row)
            except Exception as error:  # noqa: BLE001 - this request's alone
                pending.fail(error)
                continue
            queue.in_flight[row.id] = pending
            pending.start_clock()

    def _kind(self, pending: _Waiting) -> bool:
        return self._find(pending.request.policy).adapter is None

    def _answer(self, queue: _Queue, sampled: Sampled) -> None:
        pending = queue.in_flight.pop(sampled.id, None)
        if pending is None:
            return
        if sampled.error is not None:
            pending.fail(EngineError(sampled.error))
            return
        held = self._find(pending.request.policy)
        text = str(queue.model.tokenizer.decode(list(sampled.ids), skip_special_tokens=True))
        for stop in pending.request.sampling.stop:
            text = text.partition(stop)[0]
        pending.answer(
            Completion(
                sampled.ids,
                sampled.logprobs,
                "stop" if sampled.stopped else "length",
                text,
                held.version,
                held.hash,
            )
        )

    def _queue(self, policy: str) -> _Queue:
        return self._queues[id(self._find(policy).model)]

    def _find(self, policy: str) -> Held:
        if policy not in self._held:
            raise EngineError(
                f"The engine vllm holds no policy '{policy}'.{did_you_mean(policy, self._held)}"
            )
        return self._held[policy]


def _release(queues: Mapping[int, _Queue], shelf: Shelf) -> None:
    """Stop the samplers and delete the files."""
    try:
        for queue in queues.values():
            queue.close()
    finally:
        shelf.close()


def _fail(queue: _Queue, error: Exception) -> None:
    """Raise an error where a queue's requests are awaited; its sampler, which may hold anything now, is closed."""
    queue.enqueue_arrived()
    failed = [*queue.in_flight.values(), *queue.waiting]
    queue.in_flight, queue.waiting = {}, []
    for pending in failed:
        pending.fail(error)
    try:
        queue.close()
    except Exception:  # noqa: BLE001 - it was broken before
        queue.sampler = None
