"""The engine for callers that come and go at any time: words as they come, no waiting for the longest, rows freed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.support.episodes import TASK
from tests.support.tiny import tiny_model

from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import FlatRows
from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.rollout.protocol import Request
from kapelle.errors import ContextError, EngineError
from kapelle.models.language_model import LanguageModel
from kapelle.team import Policy
from kapelle.types import Sampling


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> LocalEngine:
    """One base without an end of turn, so that rows are as long as they may be."""
    monkeypatch.setattr(LanguageModel, "end_ids", frozenset())
    return LocalEngine({"base": tiny_model()}, [Policy("a", trained=False)])


def request(tokens: int, seed: int = 0, stop: tuple[str, ...] = ()) -> Request:
    return Request("a", "a", (), (7, 8, 9), Sampling(max_tokens=tokens, stop=stop), seed, TASK)


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - other coroutines of this loop make it true
        await asyncio.sleep(0)


class Heard:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.calls = 0

    def __call__(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.calls += 1


@pytest.mark.parametrize("served", [False, True])
async def test_streamed_text_is_the_beginning_of_the_answer(engine: LocalEngine, *, served: bool) -> None:
    if served:
        engine.serve()
    heard = [Heard(), Heard()]
    answers = await asyncio.gather(
        engine.stream(request(100, seed=1), heard[0]),
        engine.stream(request(70, seed=2), heard[1]),
        engine.generate(request(3, seed=3)),
    )
    for each, answer in zip(heard, answers, strict=False):
        assert each.calls > 1
        assert tuple(each.ids) == answer.ids[: len(each.ids)]
        assert tuple(each.logprobs) == answer.logprobs[: len(each.ids)]
    unheard = await asyncio.gather(
        *(engine.generate(request(n, seed)) for seed, n in ((1, 100), (2, 70), (3, 3)))
    )
    assert list(answers) == unheard, "hearing changes nothing"


async def test_a_short_answer_does_not_wait_for_long_answers(engine: LocalEngine) -> None:
    """One short row among eight long ones: fewer than the quarter that makes finished rows leave."""
    engine.serve()
    heard = Heard()
    long = [asyncio.create_task(engine.stream(request(200, seed), heard)) for seed in range(8)]
    await until(lambda: heard.calls > 0)
    assert len((await engine.generate(request(3))).ids) == 3
    assert not any(task.done() for task in long)
    assert {len(answer.ids) for answer in await asyncio.gather(*long)} == {200}


@pytest.mark.parametrize("prompt", [(), (7, 10**6), (-1,)])
async def test_a_prompt_that_cannot_be_read_fails_alone(engine: LocalEngine, prompt: tuple[int, ...]) -> None:
    engine.serve()
    known = await engine.generate(request(60))
    heard = Heard()
    early = asyncio.create_task(engine.stream(request(60), heard))
    await until(lambda: heard.calls == 2)
    with pytest.raises(ContextError, match="has no token" if not prompt else f"contains the id {prompt[-1]}"):
        await engine.generate(replace(request(3), prompt_ids=prompt))
    assert (await early).ids == known.ids


@pytest.mark.parametrize("joins", [False, True], ids=["reading", "noting"])
async def test_a_row_that_cannot_join_fails_alone(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, *, joins: bool
) -> None:
    """Whatever fails while prompts are read, or are noted beside the rows in flight: the others say what they would have said."""
    engine.serve()
    known = await asyncio.gather(*(engine.generate(request(60, seed)) for seed in range(3)))
    kind, name = (Decoder, "_settings") if joins else (FlatRows, "join")
    plain = getattr(kind, name)

    def fails(self: Any, *given: Any) -> Any:
        jobs = given[0] if given else [row.job for row in self.flying]
        if any(job.seed == 99 for job in jobs):
            raise RuntimeError("no such place")
        return plain(self, *given)

    monkeypatch.setattr(kind, name, fails)
    heard = Heard()
    early = asyncio.create_task(engine.stream(request(60), heard))
    await until(lambda: heard.calls == 2)
    others = [asyncio.create_task(engine.generate(request(60, seed))) for seed in (1, 99, 2)]
    with pytest.raises(EngineError, match="no such place"):
        await others[1]
    assert not early.done()
    said = [await each for each in (early, others[0], others[2])]
    assert [each.ids for each in said] == [each.ids for each in known]
    assert tuple(heard.ids) == said[0].ids[: len(heard.ids)]
    for each, other in zip(said, known, strict=True):
        assert each.logprobs == pytest.approx(other.logprobs, abs=1e-5)


async def test_who_goes_away_frees_the_row(engine: LocalEngine) -> None:
    """A cancelled row ends, also one that waits for room; the others are what they would have been."""
    engine.serve()
    engine.max_rows = 3
    known = await engine.generate(request(40, seed=9))
    heard = Heard()
    gone = [asyncio.create_task(engine.stream(request(2000, seed), heard)) for seed in range(2)]
    staying = asyncio.create_task(engine.generate(request(40, seed=9)))
    waiting = asyncio.create_task(engine.generate(request(2000)))
    await until(lambda: heard.calls > 2)
    for task in (*gone, waiting):
        task.cancel()
    assert (await staying).ids == known.ids
    decoder: Decoder = engine.queues[0].decoder
    await until(lambda: not engine.queues[0].in_flight)
    assert decoder.in_flight == 0
    assert engine.tokens_sampled < 1000, "nobody waited for the rest"
    assert engine.queues[0].waiting == []
