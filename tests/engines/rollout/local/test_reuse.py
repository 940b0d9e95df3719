"""What rows have read is there for the prompts that continue from them, and for no one else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
import torch
from tests.support.episodes import TASK
from tests.support.tiny import lora_policies, stir, with_adapters

from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import STEM, Job, RowOutput
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


@pytest.fixture
def read(model: LanguageModel) -> Iterator[list[int]]:
    """How many tokens each pass of the model has read."""
    counts: list[int] = []
    embedding = model.model.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda _module, args: counts.append(args[0].numel()))
    yield counts
    handle.remove()


def job(prompt: tuple[int, ...], seed: int = 0, adapter: str | None = None, tokens: int = 6) -> Job:
    return Job(adapter, prompt, Sampling(max_tokens=tokens), seed)


def told_by(decoder: Decoder, jobs: Sequence[Job]) -> list[RowOutput]:
    """What prompts say that join together."""
    said = decoder.join(jobs)
    while decoder.in_flight:
        decoder.advance(100)
    return said


def same(ours: RowOutput, theirs: RowOutput) -> None:
    assert ours.ids == theirs.ids
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(6, 262, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


class TestTurns:
    def test_the_next_turn_reads_only_new_tokens(self, model: LanguageModel, read: list[int]) -> None:
        decoder = Decoder(model, kept_tokens=1000)
        (said,) = told_by(decoder, [job(ids(20, 0))])
        read.clear()
        second = job((*ids(20, 0), *said.ids, *ids(7, 1)), seed=5)
        (again,) = told_by(decoder, [second])
        # The last token of a turn was sampled and not read; then seven were heard.
        assert read[0] == 1 + 7
        (fresh,) = told_by(Decoder(model), [second])
        same(again, fresh)

    @pytest.mark.parametrize(("most", "kept"), [(0, 0), (160, 150), (1000, 300)])
    def test_no_more_tokens_are_kept_than_allowed(self, model: LanguageModel, most: int, kept: int) -> None:
        decoder = Decoder(model, kept_tokens=most)
        # Six prompts of 50 tokens, whose single sampled tokens are never read.
        told_by(decoder, [Job("a", ids(50, k), Sampling(max_tokens=1), k) for k in range(6)])
        assert decoder.kept_places == kept

    def test_conversations_of_all_lengths_equal_fresh_ones(self, model: LanguageModel) -> None:
        decoder = Decoder(model, kept_tokens=10_000)
        prompts = {(name, k): ids(3 + 5 * k, k) for k in range(6) for name in ("a", None, "b")}
        for turn in range(4):
            jobs = [
                job(prompt, 100 * turn + k, name, tokens=1 + (3 * k + turn) % 9)
                for (name, k), prompt in prompts.items()
            ]
            told = told_by(decoder, jobs)
            for mine, theirs in zip(told, told_by(Decoder(model), jobs), strict=True):
                same(mine, theirs)
            for (place, prompt), mine in zip(list(prompts.items()), told, strict=True):
                # Some hear much and some little, and some begin again.
                new_messages = ids(1 + (place[1] * 5) % 11, 17 * turn + place[1])
                prompts[place] = (
                    new_messages if (place[1] + turn) % 5 == 4 else (*prompt, *mine.ids, *new_messages)
                )

    def test_an_adapter_never_reads_with_anothers_eyes(self, model: LanguageModel, read: list[int]) -> None:
        decoder = Decoder(model, kept_tokens=1000)
        (said,) = told_by(decoder, [job(ids(12, 0), adapter="a")])
        longer = (*ids(12, 0), *said.ids, 9)
        for other in ("b", None):
            read.clear()
            (told,) = told_by(decoder, [job(longer, adapter=other)])
            assert read[0] == len(longer)
            same(told, told_by(Decoder(model), [job(longer, adapter=other)])[0])


class TestInstructions:
    def test_a_common_beginning_of_prompts_is_read_once(self, model: LanguageModel, read: list[int]) -> None:
        stem = ids(STEM + 8, 0)
        jobs = [job((*stem, 6 + k, *ids(k, k)), seed=k) for k in range(5)]
        told = told_by(Decoder(model), jobs)
        assert read[:2] == [len(stem), 5 * 1 + 0 + 1 + 2 + 3 + 4]
        for mine, asked in zip(told, jobs, strict=True):
            same(mine, told_by(Decoder(model), [asked])[0])

    def test_the_next_turns_continue_from_such_prompts(self, model: LanguageModel, read: list[int]) -> None:
        decoder = Decoder(model, kept_tokens=1000)
        jobs = [job((*ids(STEM, 0), 6 + k), seed=k) for k in range(3)]
        told = told_by(decoder, jobs)
        longer = [
            job((*j.prompt, *s.ids, 9), seed=k) for k, (j, s) in enumerate(zip(jobs, told, strict=True))
        ]
        read.clear()
        again = told_by(decoder, longer)
        assert read[0] == 3 * 2
        for mine, asked in zip(again, longer, strict=True):
            same(mine, told_by(Decoder(model), [asked])[0])


class TestLoad:
    def engine(self, model: LanguageModel) -> LocalEngine:
        return LocalEngine({"base": model}, lora_policies("a", "b"))

    def ask(self, engine: LocalEngine, policy: str, prompt: tuple[int, ...]) -> Completion:
        request = Request(policy, policy, (), prompt, Sampling(max_tokens=6), 3, TASK)
        return asyncio.run(engine.generate(request))

    def test_new_weights_drop_the_caches_of_old_ones(self, model: LanguageModel, read: list[int]) -> None:
        engine = self.engine(model)
        longer = {name: (*ids(12, 0), *self.ask(engine, name, ids(12, 0)).ids, 9, 9) for name in ("a", "b")}
        weights = model.bank.parameters("a")
        stir(weights, seed=50)
        engine.load("a", weights, 1)
        read.clear()
        after = self.ask(engine, "a", longer["a"])
        assert read[0] == len(longer["a"])
        assert after.ids == self.ask(self.engine(model), "a", longer["a"]).ids
        assert after.logprobs == pytest.approx(
            self.ask(self.engine(model), "a", longer["a"]).logprobs, abs=1e-5
        )
        read.clear()
        self.ask(engine, "b", longer["b"])
        assert read[0] == 3, "the other adapter's are as good as before"
