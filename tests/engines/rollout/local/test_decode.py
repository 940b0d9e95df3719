"""Decoding: what a row says depends on its own prompt, adapter, limits and seed, and on nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.support.tiny import LORA, stir, tiny_model

from kapelle.engines.rollout.local.decode_batch import StopSearch, decode
from kapelle.engines.rollout.local.decode_strategies import Job, RowOutput
from kapelle.models.fast import fused
from kapelle.models.language_model import LanguageModel, load_language_model
from kapelle.settings.schema import EmbeddedConfig, ModelConfig
from kapelle.types import Sampling


@pytest.fixture(scope="module", params=["fused", "flat", "padded"])
def model(request: pytest.FixtureRequest) -> Iterator[LanguageModel]:
    """A tiny base with two adapters that differ from it and from each other, on every way of decoding."""
    model = tiny_model()
    model.flat = None if request.param == "padded" else model.flat
    for seed, name in enumerate(("left", "right")):
        model.bank.add(name, LORA, seed)
        stir(model.bank.parameters(name), seed)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "flat":
            patch.setattr(fused, "LARGEST", 0)  # as for a model whose copies would be large
        yield model


def jobs_of_all_kinds() -> list[Job]:
    """Many rows: three adapters in mixed order, prompts of all lengths, every limit."""
    generator = torch.Generator().manual_seed(5)
    prompts: dict[int, list[int]] = {}
    jobs = []
    for k in range(12):
        if k % 6 < 3:  # rows k and k + 3 share adapter and prompt
            prompts[k % 3] = torch.randint(6, 262, (1 + (7 * k) % 23,), generator=generator).tolist()
        sampling = Sampling(
            max_tokens=1 + (5 * k) % 11,
            temperature=(1.0, 0.7, 1.5, 0.0)[k % 4],
            top_p=(1.0, 0.9)[k % 2],
            top_k=(0, 0, 20)[k % 3],
        )
        jobs.append(Job(("right", None, "left")[k % 3], tuple(prompts[k % 3]), sampling, 100 + k))
    return jobs


def by_the_book(model: LanguageModel, job: Job, said: RowOutput) -> list[float]:
    """Log-probs of what was said at temperature 1, by one plain pass over the whole text."""
    tokens = torch.tensor([[*job.prompt, *said.ids]])
    with torch.no_grad(), model.bank.routed([(job.adapter, 0, 1)]):
        logits = model.model(input_ids=tokens, use_cache=False).logits[0].double()
    logp = torch.log_softmax(logits, -1)
    first = len(job.prompt) - 1
    return [float(logp[first + k, token]) for k, token in enumerate(said.ids)]


class TestBatching:
    @pytest.mark.slow
    def test_each_row_equals_the_row_alone(self, model: LanguageModel) -> None:
        jobs = jobs_of_all_kinds()
        together = decode(model, jobs)
        for job, said in zip(jobs, together, strict=True):
            (alone,) = decode(model, [job])
            assert said.ids == alone.ids
            assert said.finish_reason == alone.finish_reason
            assert said.logprobs == pytest.approx(alone.logprobs, abs=1e-5)

    def test_log_probs_are_those_of_a_plain_pass_with_the_rows_adapter(self, model: LanguageModel) -> None:
        jobs = [job._replace(sampling=Sampling(max_tokens=9)) for job in jobs_of_all_kinds()]
        for job, said in zip(jobs, decode(model, jobs), strict=True):
            assert said.logprobs == pytest.approx(by_the_book(model, job, said), abs=1e-5)


class TestEnds:
    def test_the_limit_counts_tokens(self, model: LanguageModel) -> None:
        for limit in (1, 2, 7):
            (said,) = decode(model, [Job(None, (7, 8), Sampling(max_tokens=limit), 3)])
            if said.finish_reason == "length":
                assert len(said.ids) == limit
            else:
                assert len(said.ids) <= limit
        (one,) = decode(model, [Job(None, (7, 8), Sampling(max_tokens=1), 3)])
        assert len(one.ids) == 1

    def test_the_end_token_ends_a_row_and_belongs_to_it(self, model: LanguageModel) -> None:
        long = Sampling(max_tokens=40)
        said = decode(model, [Job(None, (7, 8), long, seed) for seed in range(96)])
        ended = [s for s in said if s.finish_reason == "stop"]
        assert len(ended) > 5, "about one row in seven ends by itself"
        (end,) = model.end_ids
        for row in ended:
            assert row.ids.count(end) == 1
            assert row.ids[-1] == end
        for row in said:
            if row.finish_reason == "length":
                assert end not in row.ids
                assert len(row.ids) == 40

    def test_a_stop_string_ends_a_row_and_its_tokens_stay(self, model: LanguageModel) -> None:
        plain = decode(model, [Job(None, (7, 8), Sampling(max_tokens=12), seed) for seed in range(4)])
        for seed, free in enumerate(plain):
            # Whatever this row says at its places 3 and 4 becomes the stop string.
            stop = str(model.tokenizer.decode(free.ids[3:5]))
            if "\N{REPLACEMENT CHARACTER}" in stop or not stop:
                continue
            (said,) = decode(model, [Job(None, (7, 8), Sampling(max_tokens=12, stop=("never", stop)), seed)])
            assert said.finish_reason == "stop"
            assert said.ids == free.ids[: len(said.ids)]
            whole = str(model.tokenizer.decode(said.ids))
            assert whole.endswith(stop)
            assert said.text == whole[: whole.index(stop)]
            # The stop lies across a break: what was sampled before it counts, towards the limit too.
            begun = (7, 8, *said.ids[:4])
            on = [Job(None, begun, Sampling(max_tokens=12, stop=stops), seed, 4) for stops in ((stop,), ())]
            stopped, rest = decode(model, on)
            assert (stopped.ids, stopped.text) == (said.ids[4:], said.text)
            assert rest.ids == free.ids[4:]


def first_stop(search: StopSearch, ids: Sequence[int]) -> tuple[int, str] | None:
    """The first token after which a stop string was found, and the text before it."""
    for place, token in enumerate(ids):
        if (text := search.text_before_stop(token)) is not None:
            return place, text
    return None


class TestStops:
    @pytest.fixture(scope="class")
    def tokenizer(self) -> Any:
        """One token per byte, so that a character may be several tokens; special ones are omitted of texts."""
        return tiny_model().tokenizer

    @pytest.mark.sample(8)
    @pytest.mark.parametrize("seed", range(40))
    def test_they_are_found_as_in_the_whole_text(self, tokenizer: Any, seed: int) -> None:
        draw = random.Random(seed)
        words = [
            "ab",
            "a",
            "b ",
            "  ",
            "é",
            "🎼",
            "語",
            "\n",
            *(chr(draw.randrange(32, 400)) for _ in range(4)),
        ]
        text = "".join(draw.choices(words, k=300))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for _ in range(
            draw.randrange(60)
        ):  # an untrained model also samples special tokens and halves of characters
            ids.insert(draw.randrange(len(ids)), draw.randrange(len(tokenizer)))
        begun = ids[: draw.choice([0, 0, 3, 90])]
        for length in (1, 2, 4, 7):
            stops = tuple(text[k : k + length] for k in (draw.randrange(200), draw.randrange(200, 290)))
            expected = None
            for place in range(len(ids) - len(begun)):
                said = tokenizer.decode(ids[: len(begun) + place + 1], skip_special_tokens=True)
                if any(stop in said for stop in stops):
                    expected = place, said[: min(said.index(stop) for stop in stops if stop in said)]
                    break
            assert first_stop(StopSearch(tokenizer, stops, begun), ids[len(begun) :]) == expected

    @pytest.mark.parametrize(
        ("before", "ending", "stops"),
        [
            ("say ", "hello", ("lo", "hello")),
            ("so " * 60, "on, " * 20 + "end", ("!", "on, " * 20 + "end")),
        ],
        ids=["the longer begins first", "one is far longer"],
    )
    def test_they_may_have_different_lengths(
        self, tokenizer: Any, before: str, ending: str, stops: tuple[str, ...]
    ) -> None:
        ids = tokenizer(before + ending + "!", add_special_tokens=False)["input_ids"]
        found = first_stop(StopSearch(tokenizer, stops, ()), ids)
        assert found == (len(before + ending) - 1, before)


class TestCompaction:
    def test_dropping_finished_rows_changes_nothing(self, model: LanguageModel) -> None:
        # Rows end at very different times, so that the batch is compacted again and again.
        limits = [1, 24, 2, 3, 24, 5, 8, 24, 13, 17, 1, 1, 20, 24]
        generator = torch.Generator().manual_seed(11)
        jobs = [
            Job(
                ("left", None, "right")[k % 3],
                tuple(torch.randint(6, 262, (2 + k,), generator=generator).tolist()),
                Sampling(max_tokens=limit),
                k,
            )
            for k, limit in enumerate(limits)
        ]
        for job, said in zip(jobs, decode(model, jobs), strict=True):
            assert said.logprobs == pytest.approx(by_the_book(model, job, said), abs=1e-5)


@pytest.mark.slow
def test_whatever_rows_meet_the_lean_pass_says_what_transformers_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = EmbeddedConfig(hidden=32, layers=1, heads=4, kv_heads=2, intermediate=48, context=128)
    model = load_language_model(ModelConfig(embedded=small))
    flat = model.flat
    for seed in range(15):
        draw = random.Random(seed)
        prompts = [
            tuple(draw.randrange(6, 200) for _ in range(draw.randrange(1, 12)))
            for _ in range(draw.randrange(1, 12))
        ]
        jobs = [
            Job(None, prompt, Sampling(max_tokens=limit), draw.randrange(1 << 60))
            for prompt in prompts
            for limit in draw.choices([1, 2, 3, 5, 20], k=draw.choice([1, 2, 8, 8, 8]))
        ]
        monkeypatch.setattr(model, "flat", flat)
        ours = decode(model, jobs)
        monkeypatch.setattr(model, "flat", None)
        for mine, theirs in zip(ours, decode(model, jobs), strict=True):
            assert mine.ids == theirs.ids
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_many_rows_of_one_prompt_sample_its_distribution(model: LanguageModel) -> None:
    jobs: Sequence[Job] = [Job("left", (7, 8, 9), Sampling(max_tokens=1), seed) for seed in range(4000)]
    first = torch.tensor([said.ids[0] for said in decode(model, jobs)])
    with torch.no_grad(), model.bank.routed([("left", 0, 1)]):
        logits = model.model(input_ids=torch.tensor([[7, 8, 9]]), use_cache=False).logits[0, -1]
    expected = torch.softmax(logits, -1)
    shares = torch.bincount(first, minlength=expected.numel()) / 4000
    # Total variation of an empirical distribution of 4000 draws over 262 tokens is about 0.1.
    assert float((shares - expected).abs().sum()) / 2 < 0.15
    likeliest = int(expected.argmax())
    assert float(shares[likeliest]) == pytest.approx(float(expected[likeliest]), abs=0.03)
