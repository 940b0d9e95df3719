"""Rows that do not fit in memory together wait or give way, and say what they would have said."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.support.episodes import TASK
from tests.support.tiny import lora_policies, with_adapters
from torch import Tensor

from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import FlatRows, Job, PaddedRows, RowOutput
from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.rollout.protocol import Request
from kapelle.errors import EngineError
from kapelle.models.language_model import LanguageModel
from kapelle.types import Sampling


@pytest.fixture
def model() -> LanguageModel:
    """A tiny base with two adapters."""
    return with_adapters("a", "b")


def jobs_of(count: int, stop: tuple[str, ...] = ()) -> list[Job]:
    """Rows with prompts and completions of many lengths; some share a prompt."""
    made = torch.Generator().manual_seed(7)
    jobs: list[Job] = []
    for number in range(count):
        length = 10 + 23 * (number // 2 % 5)
        prompt = tuple(torch.randint(6, 262, (length,), generator=made).tolist())
        if number % 2:
            prompt = jobs[-1].prompt
        begun = 3 if number % 4 == 3 else 0
        most = 20 + 37 * (number % 4)
        jobs.append(Job("ab"[number // 3 % 2], prompt, Sampling(max_tokens=most, stop=stop), number, begun))
    return jobs


def place_bytes(model: LanguageModel) -> int:
    return Decoder(model)._rows.place_bytes


def told_by(decoder: Decoder, jobs: Sequence[Job]) -> list[RowOutput]:
    """What jobs say that join as there is room."""
    outputs: list[RowOutput] = []
    left = list(jobs)
    while left or decoder.in_flight:
        count = decoder.room(left)
        if count and left and decoder.open:
            outputs += decoder.join(left[:count])
            left = left[count:]
        decoder.advance(5)
    return outputs


def same(ours: Sequence[RowOutput], theirs: Sequence[RowOutput]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.ids, mine.finish_reason, mine.text) == (other.ids, other.finish_reason, other.text)
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("stop", [(), ("a", "é")], ids=["", "stop"])
def test_interrupted_rows_continue_unchanged(model: LanguageModel, stop: tuple[str, ...]) -> None:
    most, jobs = 900, jobs_of(14, stop)
    bounded = Decoder(model, 2, 4096, kv_bytes=most * place_bytes(model))
    outputs = bounded.join(jobs)  # more than there is room for
    gave_way = 0
    while bounded.in_flight:
        bounded.advance(1)
        gave_way = max(gave_way, len(bounded.preempted))
        if len(bounded.flying) > 1:
            assert bounded._rows.places_next + bounded.kept_places <= most + 64 * len(bounded.flying)
    assert gave_way > 2
    same(outputs, told_by(Decoder(model, 2, 4096), jobs))


@pytest.mark.parametrize(
    ("prompts", "most_tokens", "places", "expected"),
    [
        ("different", 20, 300, 10),  # each takes 10 + 20 places
        ("equal", 20, 300, 14),  # the prompt is stored once
        ("different", 500, 300, 2),  # completions are expected to have at most 128 tokens
        ("different", 20, 5, 1),  # one always begins
    ],
)
def test_as_many_rows_begin_as_are_expected_to_fit(
    model: LanguageModel, prompts: str, most_tokens: int, places: int, expected: int
) -> None:
    sampling = Sampling(max_tokens=most_tokens)
    firsts = [6 + number * (prompts == "different") for number in range(40)]
    jobs = [Job("a", (first, *range(7, 16)), sampling, number) for number, first in enumerate(firsts)]
    assert Decoder(model, kv_bytes=places * place_bytes(model)).room(jobs) == expected


def runs_out(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, at: Sequence[int]) -> None:
    """Let the calls with these numbers of a method run out of memory."""
    plain: Callable[..., Tensor] = getattr(kind, name)
    calls = 0

    def failing(self: Any, given: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls in at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return plain(self, given)

    monkeypatch.setattr(kind, name, failing)


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", [FlatRows, PaddedRows], ids=["flat", "padded"])
@pytest.mark.parametrize(
    ("name", "at"), [("read", [1]), ("read", [9, 30]), ("join", [1]), ("join", [2]), ("join", [1, 2])]
)
def test_rows_continue_where_memory_runs_out(
    model: LanguageModel,
    kind: type,
    name: str,
    at: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if kind is PaddedRows:
        model.flat = None
    jobs = jobs_of(8, ("a",))
    expected = told_by(Decoder(model, 2), jobs)
    decoder = Decoder(model, 2)  # tries caches before any fails
    runs_out(monkeypatch, kind, name, at)
    with caplog.at_level(logging.WARNING):
        outputs = decoder.join(jobs[:5])
        decoder.advance(3)
        while not decoder.open:
            decoder.advance(3)
        outputs += decoder.join(jobs[5:])
        while decoder.in_flight:
            decoder.advance(7)
    same(outputs, expected)
    said = [record.getMessage() for record in caplog.records if "do not fit in memory" in record.getMessage()]
    assert len(said) == len(at)
    assert "engine.max_rows" in said[0]


def test_a_row_that_does_not_fit_alone_is_an_error(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_out(monkeypatch, FlatRows, "read", range(1, 100))
    decoder = Decoder(model, 2)
    decoder.join(jobs_of(4))
    with pytest.raises(
        EngineError, match=r"A row of \d+ tokens does not fit in memory.*Tried to allocate 2 GiB"
    ):
        told_by(decoder, ())
    assert not decoder.in_flight


def test_an_engine_answers_all_within_its_memory(model: LanguageModel) -> None:
    requests = [
        Request(name, name, (), job.prompt, job.sampling, job.seed, TASK)
        for job in jobs_of(14)
        for name in (job.adapter or "a",)
    ]

    async def asked(engine: LocalEngine) -> list[tuple[tuple[int, ...], list[int]]]:
        new_messages: list[list[int]] = [[] for _ in requests]

        async def ask(number: int) -> tuple[int, ...]:
            answer = await engine.stream(
                requests[number], lambda ids, _logps: new_messages[number].extend(ids)
            )
            return tuple(answer.ids)

        answers = await asyncio.gather(*map(ask, range(len(requests))))
        return list(zip(answers, new_messages, strict=True))

    policies = lora_policies("a", "b")
    bounded = LocalEngine({"base": model}, policies, kv_bytes=700 * place_bytes(model))
    bounded.serve()
    told = asyncio.run(asked(bounded))
    free = asyncio.run(asked(LocalEngine({"base": model}, policies)))
    for (answer, new_messages), (expected, _) in zip(told, free, strict=True):
        assert answer == expected
        assert new_messages == list(answer[: len(new_messages)])
