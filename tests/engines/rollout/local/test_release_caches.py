"""What the sampler gives back before an update: everything that it can make again, and no one can tell."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence

import pytest
from tests.support.episodes import TASK
from tests.support.tiny import lora_policies, with_adapters
from torch import Tensor

from kapelle.engines.rollout.compose import ComposedEngine
from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.models.fast import fused
from kapelle.models.language_model import LanguageModel
from kapelle.types import Sampling


@pytest.fixture(params=["fused", "flat"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    """A tiny base with two adapters."""
    if request.param == "flat":
        monkeypatch.setattr(fused, "LARGEST", 0)
    return with_adapters("a", "b")


def engine_that_rests(model: LanguageModel, releases: bool = True) -> LocalEngine:
    return LocalEngine({"base": model}, lora_policies("a", "b"), releases=lambda _device: releases)


def play(engine: LocalEngine | ComposedEngine, seed: int = 0) -> list[Completion]:
    """Two agents, three turns each that continue from one another."""

    async def speak(name: str) -> list[Completion]:
        prompt: tuple[int, ...] = tuple(range(7, 17))
        said: list[Completion] = []
        for turn in range(3):
            asked = Request(name, name, (), prompt, Sampling(max_tokens=20), seed + turn, TASK)
            said.append(await engine.generate(asked))
            prompt = (*prompt, *said[-1].ids, 9, 9)
        return said

    async def both() -> Sequence[list[Completion]]:
        return await asyncio.gather(speak("a"), speak("b"))

    return [completion for said in asyncio.run(both()) for completion in said]


def tensors_alive() -> dict[int, Tensor]:
    """All tensors that the process can reach, by their identities, which are theirs for as long as these are held."""
    gc.collect()
    return {id(x): x for x in gc.get_objects() if type(x) is Tensor}


def bytes_beside(known: dict[int, Tensor]) -> int:
    """Bytes of all tensors that were not there before."""
    return sum(x.numel() * x.element_size() for k, x in tensors_alive().items() if k not in known)


@pytest.mark.sample(2)
@pytest.mark.slow
def test_an_idle_sampler_has_no_tensor(model: LanguageModel) -> None:
    engine = engine_that_rests(model)
    known = tensors_alive()
    play(engine)
    assert bytes_beside(known) > 50_000
    engine.release_caches()
    assert bytes_beside(known) == 0
