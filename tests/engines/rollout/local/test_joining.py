"""Requests join the rows in flight: no one waits for the slowest, and no one hears the difference."""

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
from kapelle.engines.rollout.request_queue import PAUSE
from kapelle.errors import EngineError
from kapelle.models.language_model import LanguageModel
from kapelle.types import Sampling


@pytest.fixture(params=["flat", "padded"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    """A tiny base with two adapters whose rows never end by themselves."""
    model = tiny_model()
    for seed, name in enumerate(("a", "b")):
        model.bank.add(name, LORA, seed)
        stir(model.bank.parameters(name), seed)
    if request.param == "padded":
        model.flat = None
    return model


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows that were in flight, rows that joined them) at each joining."""
    seen: list[tuple[int, int]] = []
    plain = Decoder.join

    def watched(decoder: Decoder, jobs: Sequence[Job]) -> list[RowOutput]:
        seen.append((decoder.in_flight, len(jobs)))
        return plain(decoder, jobs)

    monkeypatch.setattr(Decoder, "join", watched)
    return seen


def engine(model: LanguageModel, max_rows: int = 1024) -> LocalEngine:
    return LocalEngine({"base": model}, lora_policies("a", "b"), max_rows)


def request(policy: str, seed: int, tokens: int, prompt: tuple[int, ...] = (7, 8, 9)) -> Request:
    return Request(policy, policy, (), prompt, Sampling(max_tokens=tokens), seed, TASK)


async def chain(asked: LocalEngine, requests: Sequence[Request]) -> list[Completion]:
    """Ask one after another."""
    return [await asked.generate(r) for r in requests]


CHAINS = [
    [request("ab"[row % 2], 10 * row + turn, 3 + (5 * row * turn) % 17) for turn in range(1 + row % 4)]
    for row in range(12)
]


@pytest.mark.sample(2)
@pytest.mark.slow
async def test_rows_among_others_equal_rows_alone(
    model: LanguageModel, joined: list[tuple[int, int]]
) -> None:
    shared = engine(model)
    answers = await asyncio.gather(*(chain(shared, requests) for requests in CHAINS))
    assert any(in_flight for in_flight, _ in joined) == (model.flat is not None)
    for requests, told in zip(CHAINS, answers, strict=True):
        for asked, among in zip(requests, told, strict=True):
            alone = await engine(model).generate(asked)
            assert among.ids == alone.ids
            assert among.finish_reason == alone.finish_reason
            assert among.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


async def test_who_waits_for_something_else_joins_after_a_pause(
    model: LanguageModel, joined: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, pauses, spoken = engine(model), 0, asyncio.Event()
    plain = Decoder.advance
    long = await a_long_request(model)

    def counted(decoder: Decoder, steps: int) -> None:
        nonlocal pauses
        plain(decoder, steps)
        pauses += 1
        spoken.set()

    monkeypatch.setattr(Decoder, "advance", counted)
    joined.clear()

    async def late() -> int:
        await spoken.wait()  # for what comes from elsewhere, while a row speaks
        new_messages = pauses
        await shared.generate(request("b", 5, 3))
        return new_messages

    _, new_messages = await asyncio.gather(shared.generate(long), late())
    assert new_messages == 1
    assert joined == [(0, 1), (1, 1) if model.flat is not None else (0, 1)]


async def a_long_request(model: LanguageModel) -> Request:
    """One whose row says more than a pause allows."""
    for seed in range(100):
        asked = request("a", seed, PAUSE + 8)
        if (await engine(model).generate(asked)).finish_reason == "length":
            return asked
    raise AssertionError("every row ended by itself")


async def test_weights_do_not_change_under_a_row(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = engine(model)
    weights = model.bank.parameters("a")
    plain = Decoder.join

    def loading(decoder: Decoder, jobs: Sequence[Job]) -> list[RowOutput]:
        said = plain(decoder, jobs)
        shared.load("b", model.bank.parameters("b"), 3)
        return said

    monkeypatch.setattr(Decoder, "join", loading)
    with pytest.raises(EngineError, match="while 1 requests"):
        await shared.generate(request("a", 0, 5))
    monkeypatch.undo()
    shared.load("a", weights, 4)
    assert (await shared.generate(request("a", 0, 5))).version == 4
