"""The engine in this process: one decode for everyone who waits, and weights that say who they are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tests.support.episodes import TASK
from tests.support.tiny import LORA, lora_policies, stir, tiny_model

from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import Job, RowOutput
from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.models.language_model import LanguageModel
from kapelle.team import Policy
from kapelle.types import Sampling

POLICIES = [*lora_policies("a", "b"), Policy("bare", trained=False), Policy("other", "own", trained=False)]


@pytest.fixture
def models() -> dict[str, LanguageModel]:
    """Two bases, the first with two adapters."""
    models = {"base": tiny_model(), "own": tiny_model(seed=4)}
    for seed, name in enumerate(("a", "b")):
        models["base"].bank.add(name, LORA, seed)
        stir(models["base"].bank.parameters(name), seed)
    return models


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows joined at once."""
    sizes: list[int] = []
    plain = Decoder.join

    def watched(decoder: Decoder, jobs: Sequence[Job]) -> list[RowOutput]:
        sizes.append(len(jobs))
        return plain(decoder, jobs)

    monkeypatch.setattr(Decoder, "join", watched)
    return sizes


def request(policy: str, seed: int = 0, tokens: int = 5, prompt: tuple[int, ...] = (7, 8, 9)) -> Request:
    return Request(policy, policy, (), prompt, Sampling(max_tokens=tokens), seed, TASK)


async def ask(engine: LocalEngine, requests: Sequence[Request]) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(r) for r in requests))


class TestBatching:
    async def test_each_base_decodes_its_own(
        self, models: dict[str, LanguageModel], batches: list[int]
    ) -> None:
        engine = LocalEngine(models, POLICIES)
        names = ["a", "other", "b", "bare", "other", "a"]
        answers = await ask(engine, [request(name, k) for k, name in enumerate(names)])
        assert sorted(batches) == [2, 4]
        for k, (name, answer) in enumerate(zip(names, answers, strict=True)):
            (alone,) = await ask(engine, [request(name, k)])
            assert alone == Completion(
                answer.ids,
                alone.logprobs,
                answer.finish_reason,
                answer.text,
                answer.version,
                answer.weights_hash,
            )
            assert alone.logprobs == pytest.approx(answer.logprobs, abs=1e-5)

    async def test_the_text_is_that_of_the_tokens_without_the_end(
        self, models: dict[str, LanguageModel]
    ) -> None:
        engine = LocalEngine(models, POLICIES)
        answers = await ask(engine, [request("a", k, tokens=30) for k in range(40)])
        ended = [answer for answer in answers if answer.finish_reason == "stop"]
        assert ended
        tokenizer = models["base"].tokenizer
        for answer in ended:
            assert answer.text == tokenizer.decode(list(answer.ids[:-1]), skip_special_tokens=True)
            assert "<|" not in answer.text
        assert engine.tokens_sampled == sum(len(answer.ids) for answer in answers)


class TestWeights:
    async def test_weights_of_another_memory_are_copied(self, models: dict[str, LanguageModel]) -> None:
        engine = LocalEngine(models, POLICIES)
        (of_b,) = await ask(engine, [request("b")])
        foreign = {name: w.detach().clone() for name, w in models["base"].bank.parameters("b").items()}
        engine.load("a", foreign, 1)
        (of_a,) = await ask(engine, [request("a")])
        assert of_a.ids == of_b.ids
        assert of_a.weights_hash == of_b.weights_hash
