"""The rollout engine in this process: requests of all agents meet in one decode batch.

Coroutines put requests down and wait. When none of them can go on without an answer, all requests that
lie there are decoded together, each row with its own adapter. Arrival order is the order of the program,
so a run repeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from kapelle.configured import Configured
from kapelle.engines.decode import Decoder, Job, Said
from kapelle.engines.rollout import Completion, Request
from kapelle.errors import EngineError, did_you_mean
from kapelle.models.language_model import LanguageModel
from kapelle.models.renderer import ChatRenderer
from kapelle.models.weights import weights_hash
from kapelle.team import Policy

QUIET_TICKS = 8
"""Turns of the event loop without a new request after which all coroutines are taken to be waiting;
nested gathers need up to four to pass a result on."""


class Local(Configured):
    """Settings of the engine in this process."""

    name: Literal["local"] = "local"
    max_rows: int = Field(1024, ge=1)
    """Most rows in one decode batch."""
    kept_tokens: int = Field(65_536, ge=0)
    """Most token places of finished rows whose keys and values are kept for prompts that go on from them, for each
    base model; 0 keeps none."""

    def build(self, models: Mapping[str, LanguageModel], policies: Sequence[Policy]) -> LocalEngine:
        """Return the engine on the trainer's own models."""
        return LocalEngine(models, policies, self.max_rows, self.kept_tokens)


@dataclass(slots=True)
class _Held:
    model: LanguageModel
    decoder: Decoder
    adapter: str | None
    version: int = 0
    hash: str = ""


class LocalEngine:
    """Plays the policies whose base models it is given, in the models' own memory."""

    def __init__(
        self,
        models: Mapping[str, LanguageModel],
        policies: Sequence[Policy],
        max_rows: int = 1024,
        kept_tokens: int = 65_536,
    ) -> None:
        decoders = {id(model): Decoder(model, kept_tokens) for model in models.values()}
        self._held = {
            p.name: _Held(models[p.base], decoders[id(models[p.base])], p.name if p.lora else None)
            for p in policies
            if p.endpoint is None
        }
        for name, held in self._held.items():
            held.hash = weights_hash(self._own(name))
        self._max_rows = max_rows
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._pump: asyncio.Task[None] | None = None
        self.tokens_sampled = 0
        """Completion tokens sampled since the engine was made."""

    @property
    def policies(self) -> Sequence[str]:
        """Names of the policies that it plays."""
        return tuple(self._held)

    def renderer(self, policy: str) -> ChatRenderer:
        """Return how a policy's conversations become tokens."""
        return self._find(policy).model.renderer

    async def generate(self, request: Request) -> Completion:
        """Return one completion, decoded together with whatever else is asked for at this moment."""
        self._find(request.policy)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        if self._pump is None or self._pump.done():
            # What a run that was broken off left here is cancelled: nobody waits for it.
            self._waiting = [asked for asked in self._waiting if not asked[1].done()]
            self._pump = loop.create_task(self._drain())
        self._waiting.append((request, future))
        return await future

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Take new weights; tensors that are the engine's own memory are not copied."""
        held = self._find(policy)
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
        held.decoder.forget(held.adapter)
        held.version = version
        held.hash = weights_hash(own)

    def close(self) -> None:
        """Forget the models; their memory goes when nobody else holds them."""
        self._held.clear()

    async def _drain(self) -> None:
        while self._waiting:
            await self._quiet()
            batch, self._waiting = self._waiting[: self._max_rows], self._waiting[self._max_rows :]
            try:
                answers = self._answer([request for request, _ in batch])
            except Exception as error:  # noqa: BLE001 - handed to whoever waits, never swallowed
                for _, future in batch:
                    if not future.done():
                        future.set_exception(_failure(error))
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

    async def _quiet(self) -> None:
        quiet, before = 0, -1
        while quiet < QUIET_TICKS:
            quiet = quiet + 1 if len(self._waiting) == before else 0
            before = len(self._waiting)
            await asyncio.sleep(0)

    def _answer(self, requests: Sequence[Request]) -> list[Completion]:
        answers: dict[int, Completion] = {}
        bases: dict[int, list[int]] = {}
        for place, request in enumerate(requests):
            bases.setdefault(id(self._find(request.policy).model), []).append(place)
        for places in bases.values():
            chosen = [requests[place] for place in places]
            held = self._find(chosen[0].policy)
            jobs = [Job(self._find(r.policy).adapter, r.prompt_ids, r.sampling, r.seed) for r in chosen]
            for place, request, said in zip(places, chosen, held.decoder.decode(jobs), strict=True):
                answers[place] = self._completion(request, said, held.model)
        return [answers[place] for place in range(len(requests))]

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
        return held.model.bank.parameters(policy) if held.adapter else held.model.base_parameters()

    def _find(self, policy: str) -> _Held:
        if policy not in self._held:
            raise EngineError(
                f"The local engine holds no policy '{policy}'.{did_you_mean(policy, self._held)}"
            )
        return self._held[policy]


def _failure(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    failure = EngineError(f"Decoding failed: {error!r}")
    failure.__cause__ = error
    return failure
