"""The rollout engine in this process: requests of all agents meet in one decode batch.

Coroutines put requests down and wait. When none of them can go on without an answer, all requests that
lie there join the rows in flight, each row with its own adapter. Rows that are over leave and are answered while
the others speak on, so that the next turns of their agents join too. Episodes whose worlds wait are waited for
(`attendance.py`), and those who join together join in an order of their own, not in that of arrival: so a run repeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from kapelle.engines.rollout.local.decode import Decoder
from kapelle.engines.rollout.local.rows import Job, Said
from kapelle.engines.rollout.local.step_graphs import Recorder, nowhere, on_cuda
from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.errors import EngineError, did_you_mean
from kapelle.models.language_model import LanguageModel
from kapelle.models.renderer import ChatRenderer
from kapelle.models.weights import weights_hash
from kapelle.runtime.attendance import Part, Room, current, room
from kapelle.runtime.deadlines import stand_in_line
from kapelle.settings.base import FROM_HERE_ON, Settings
from kapelle.team import Policy

QUIET_TICKS = 8
"""Turns of the event loop without a new request after which all coroutines are taken to be waiting;
nested gathers need up to four to pass a result on."""


PAUSE = 32
"""Most tokens that rows say before coroutines that wait for something else get a turn, and may join."""


class Local(Settings):
    """Settings of the engine in this process."""

    name: Literal["local"] = "local"
    max_rows: Annotated[int, FROM_HERE_ON] = Field(1024, ge=1)
    """Most rows in flight."""
    kept_tokens: Annotated[int, FROM_HERE_ON] = Field(65_536, ge=0)
    """Most token places of finished rows whose keys and values are kept for prompts that go on from them, for each
    base model; 0 keeps none."""

    graphs: Annotated[Literal["auto", "off"], FROM_HERE_ON] = "auto"
    """Whether steps of sampling are recorded and replayed: `auto` as CUDA graphs on a GPU and not at all on a CPU."""

    patience: Annotated[float, FROM_HERE_ON] = Field(60.0, ge=0.0, allow_inf_nan=False)
    """Seconds for which rows wait for episodes that are elsewhere (at a world, tool, judge or endpoint) while nothing
    happens; 0 waits for none, and a run whose worlds wait does not repeat."""

    @field_validator("graphs", mode="before")
    @classmethod
    def _as_written(cls, value: object) -> object:
        return "off" if value is False else value  # YAML 1.1 reads off as false

    def build(self, models: Mapping[str, LanguageModel], policies: Sequence[Policy]) -> LocalEngine:
        """Return the engine on the trainer's own models."""
        recorder_on = on_cuda if self.graphs == "auto" else nowhere
        return LocalEngine(
            models, policies, self.max_rows, self.kept_tokens, recorder_on=recorder_on, patience=self.patience
        )


@dataclass(slots=True)
class _Pending:
    request: Request
    future: asyncio.Future[Completion]
    part: Part | None
    """What asked; None outside a rollout."""
    turn: Callable[[], None]
    """To be called when its row joins: only from then on its time counts."""
    said: Said | None = None
    """What its row will have said; None while it waits."""
    heard: bool = False

    def order(self) -> tuple[int, tuple[int, ...], str, int]:
        """Where it joins among those that arrived since rows last spoke; those outside rollouts join as they came."""
        if self.part is None:
            return 0, (), "", 0
        return *self.part.order, self.request.agent, self.request.seed

    def hear(self) -> None:
        """Tell what asked that its answer is there, or will never be."""
        if self.part is not None and not self.heard:
            self.part.hear()
        self.heard = True


@dataclass(slots=True, eq=False)
class _ModelQueue:
    """One base model, the requests that wait for it, and those whose rows are in flight."""

    model: LanguageModel
    decoder: Decoder
    arrived: list[_Pending] = field(default_factory=list)
    """Who came since rows last spoke."""
    waiting: list[_Pending] = field(default_factory=list)
    in_flight: list[_Pending] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """True where somebody waits for an answer."""
        return bool(self.arrived or self.waiting or self.in_flight)

    def line_up(self) -> None:
        """Put those who arrived behind the others who wait, in an order that no clock decides."""
        self.waiting += sorted(self.arrived, key=_Pending.order)
        self.arrived = []

    def clear(self) -> list[_Pending]:
        """Drop the rows in flight and return their requests."""
        self.decoder.drop()
        dropped, self.in_flight = self.in_flight, []
        return dropped


@dataclass(slots=True)
class _Held:
    queue: _ModelQueue
    adapter: str | None
    version: int = 0
    hash: str = ""


def has_memory_of_its_own(device: torch.device) -> bool:
    """Return whether a device's memory is small beside the machine's, and given back before an update.

    True for CUDA, where keys, values and copies of weights take room from activations. False for a CPU, where memory
    is one and large, and making them again takes time.
    """
    return device.type == "cuda"


class LocalEngine:
    """Plays the policies whose base models it is given, in the models' own memory."""

    def __init__(
        self,
        models: Mapping[str, LanguageModel],
        policies: Sequence[Policy],
        max_rows: int = 1024,
        kept_tokens: int = 65_536,
        releases: Callable[[torch.device], bool] = has_memory_of_its_own,
        recorder_on: Callable[[torch.device], Recorder | None] = on_cuda,
        patience: float = 60.0,
    ) -> None:
        """Play on these models.

        `releases` says on which devices the memory of sampling is given back (`release_caches`), `recorder_on` what records steps,
        `patience` for how many seconds episodes that are elsewhere are waited for.
        """
        played = [policy for policy in policies if policy.endpoint is None]
        queues = {
            id(model): _ModelQueue(
                model,
                Decoder(model, sum(models[p.base] is model for p in played), kept_tokens, recorder_on),
            )
            for model in models.values()
        }
        self._queues = list(queues.values())
        self._held = {p.name: _Held(queues[id(models[p.base])], p.name if p.lora else None) for p in played}
        for name, held in self._held.items():
            held.hash = weights_hash(self._own(name))
        self._max_rows = max_rows
        self._releases = releases
        self._patience = patience
        self._pump: asyncio.Task[None] | None = None
        self.tokens_sampled = 0
        """Completion tokens sampled since the engine was made."""

    @property
    def policies(self) -> Sequence[str]:
        """Names of the policies that it plays."""
        return tuple(self._held)

    def renderer(self, policy: str) -> ChatRenderer:
        """Return how a policy's conversations become tokens."""
        return self._find(policy).queue.model.renderer

    async def generate(self, request: Request) -> Completion:
        """Return one completion, decoded together with whatever else is asked for at this moment."""
        queue = self._find(request.policy).queue
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        if self._pump is None or self._pump.done():
            for left in self._queues:
                # What a run that was broken off left here is cancelled: nobody waits for it.
                left.clear()
                left.arrived = [pending for pending in left.arrived if not pending.future.done()]
                left.waiting = [pending for pending in left.waiting if not pending.future.done()]
            self._pump = loop.create_task(self._drain(room()))
        pending = _Pending(request, future, current(), stand_in_line())
        queue.arrived.append(pending)
        if pending.part is not None:
            pending.part.ask()
        try:
            return await future
        finally:
            pending.hear()

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Take new weights; tensors that are the engine's own memory are not copied."""
        held = self._find(policy)
        if self._pump is None or self._pump.done():
            held.queue.clear()
        elif held.queue.in_flight:
            raise EngineError(
                f"Policy '{policy}' got new weights while {len(held.queue.in_flight)} requests to its base model are being "
                "answered. Load weights when all of them are."
            )
        own = self._own(policy)
        if set(own) != set(weights):
            odd = sorted(set(own) ^ set(weights))
            raise EngineError(f"Weights for policy '{policy}' do not fit: '{odd[0]}' is on one side only.")
        with torch.no_grad():
            for name, parameter in own.items():
                tensor = weights[name]
                assert isinstance(tensor, Tensor)
                if tensor.data_ptr() != parameter.data_ptr():
                    parameter.copy_(tensor)
        held.queue.decoder.forget(held.adapter)
        held.version = version
        held.hash = weights_hash(own)

    def release_caches(self) -> None:
        """Give back what rows have read, and copies of weights on devices whose memory the update needs.

        Between the turns of one rollout nothing goes: the loop calls this when all episodes are over. What adapters
        that learn have read goes with their next weights anyway. Frozen ones would keep what hardly another episode
        goes on from, more of it at every step, and a resumed run would not have it.
        """
        if self._pump is not None and not self._pump.done():
            return
        released = [queue for queue in self._queues if self._releases(queue.model.device)]
        for queue in self._queues:
            queue.clear()
            if queue in released:
                queue.decoder.release_caches()
            else:
                queue.decoder.forget_read()
        if any(queue.model.device.type == "cuda" for queue in released):
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Forget the models; their memory goes when nobody else holds them."""
        self._held.clear()

    async def _drain(self, here: Room) -> None:
        while any(queue.busy for queue in self._queues):
            try:
                await self._all_here(here)
            except Exception as error:  # noqa: BLE001 - handed to whoever waits, never swallowed
                for queue in self._queues:
                    queue.line_up()
                    waiting, queue.waiting = queue.waiting, []
                    _fail([*queue.clear(), *waiting], error)
            for queue in self._queues:
                queue.line_up()
            for queue in self._queues:
                try:
                    self._seat(queue)
                    if queue.in_flight:
                        queue.decoder.advance(PAUSE)
                    self._answer(queue)
                except Exception as error:  # noqa: BLE001 - likewise
                    _fail(queue.clear(), error)

    async def _all_here(self, here: Room) -> None:
        """Wait until whoever may ask has asked: all coroutines, and all episodes whose worlds wait for something."""
        await self._quiet(here)
        while self._patience and here.out:
            await here.gathered(self._patience)
            await self._quiet(here)

    async def _quiet(self, here: Room) -> None:
        quiet, before = 0, (-1, -1)
        while quiet < QUIET_TICKS:
            now = (sum(len(queue.arrived) for queue in self._queues), here.changes)
            quiet = quiet + 1 if now == before else 0
            before = now
            await asyncio.sleep(0)

    def _seat(self, queue: _ModelQueue) -> None:
        """Let the first who wait join the rows in flight, as many as there is room for."""
        room = self._max_rows - queue.decoder.in_flight
        if not queue.waiting or room <= 0 or not queue.decoder.open:
            return
        joining, queue.waiting = queue.waiting[:room], queue.waiting[room:]
        queue.in_flight += joining
        requests = [pending.request for pending in joining]
        jobs = [Job(self._find(r.policy).adapter, r.prompt_ids, r.sampling, r.seed) for r in requests]
        for pending, said in zip(joining, queue.decoder.join(jobs), strict=True):
            pending.said = said
            pending.turn()

    def _answer(self, queue: _ModelQueue) -> None:
        answers: list[tuple[_Pending, Completion]] = []
        speaking: list[_Pending] = []
        for pending in queue.in_flight:
            if pending.said is None or pending.said.finish_reason is None:
                speaking.append(pending)
            else:
                answers.append((pending, self._completion(pending.request, pending.said, queue.model)))
        queue.in_flight = speaking
        for pending, completion in answers:
            pending.hear()
            if not pending.future.done():
                pending.future.set_result(completion)

    def _completion(self, request: Request, said: Said, model: LanguageModel) -> Completion:
        held = self._find(request.policy)
        assert said.finish_reason is not None
        text = said.text
        if text is None:
            text = str(model.tokenizer.decode(said.ids, skip_special_tokens=True))
        self.tokens_sampled += len(said.ids)
        return Completion(
            tuple(said.ids), tuple(said.logprobs), said.finish_reason, text, held.version, held.hash
        )

    def _own(self, policy: str) -> Mapping[str, Tensor]:
        held = self._find(policy)
        model = held.queue.model
        return model.bank.parameters(policy) if held.adapter else model.base_parameters()

    def _find(self, policy: str) -> _Held:
        if policy not in self._held:
            raise EngineError(
                f"The local engine holds no policy '{policy}'.{did_you_mean(policy, self._held)}"
            )
        return self._held[policy]


def _fail(requests: Sequence[_Pending], error: Exception) -> None:
    """Hand an error to whoever waits for these answers."""
    for pending in requests:
        pending.hear()
        if not pending.future.done():
            pending.future.set_exception(_failure(error))


def _failure(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    failure = EngineError(f"Decoding failed: {error!r}")
    failure.__cause__ = error
    return failure
