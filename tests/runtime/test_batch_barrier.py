"""For whom a batch waits, how long, and the order in which requests join it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence

import pytest
from tests.support.episodes import TASK
from tests.support.tiny import LORA, lora_policies, tiny_model

from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import Job, RowOutput
from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.runtime.batch_barrier import Participant, ends_requests
from kapelle.runtime.event_loop import run_async
from kapelle.types import Sampling

AGES = 3600.0


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The seeds of the requests that joined together, in their order."""
    seeds: list[list[int]] = []
    plain = Decoder.join

    def watched(decoder: Decoder, jobs: Sequence[Job]) -> list[RowOutput]:
        seeds.append([job.seed for job in jobs])
        return plain(decoder, jobs)

    monkeypatch.setattr(Decoder, "join", watched)
    return seeds


def engine(patience: float = AGES, rows: int = 64) -> LocalEngine:
    model = tiny_model()
    model.bank.add("a", LORA, 0)
    return LocalEngine({"base": model}, lora_policies("a"), rows, patience=patience)


def ask(sampler: LocalEngine, seed: int, tokens: int = 3) -> asyncio.Task[Completion]:
    return asyncio.ensure_future(
        sampler.generate(Request("a", "a", (), (7, 8, 9), Sampling(max_tokens=tokens), seed, TASK))
    )


async def settled(turns: int = 100) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


class TestWhoIsWaitedFor:
    @pytest.mark.slow
    async def test_rows_wait_for_an_episode_that_waits_for_its_environment(
        self, joined: list[list[int]]
    ) -> None:
        sampler, back = engine(), asyncio.Event()

        async def quick() -> None:
            with Participant():
                await ask(sampler, 1)

        async def slow() -> None:
            with Participant():
                with Participant():
                    await back.wait()
                await ask(sampler, 2)

        both = asyncio.gather(quick(), slow())
        await settled()
        assert joined == []
        back.set()
        await both
        assert joined == [[1, 2]]

    @pytest.mark.parametrize("end", ["returns", "raises", "is cancelled"])
    async def test_an_episode_that_ends_is_not_waited_for(self, end: str, joined: list[list[int]]) -> None:
        sampler, back = engine(), asyncio.Event()

        async def quick() -> None:
            with Participant():
                await ask(sampler, 1)

        async def ending() -> None:
            with Participant(), Participant():
                await back.wait()
                if end == "raises":
                    raise ValueError

        one, other = asyncio.ensure_future(quick()), asyncio.ensure_future(ending())
        await settled()
        assert joined == []
        if end == "is cancelled":
            other.cancel()
        back.set()
        await one
        await asyncio.gather(other, return_exceptions=True)
        assert joined == [[1]]

    async def test_the_cleanup_of_an_episode_is_not_waited_for(self, joined: list[list[int]]) -> None:
        sampler, tidy = engine(), asyncio.Event()

        async def ending(part: Participant) -> None:
            with part:
                ends_requests()
                await tidy.wait()

        first = asyncio.ensure_future(ending(Participant(0)))
        with Participant(1):
            request = ask(sampler, 1)
            await settled()
            assert joined == [[1]]
            await request
        second = asyncio.ensure_future(ending(Participant(2, followed=True)))
        with Participant(3):
            request = ask(sampler, 2)
            await settled()
            assert joined == [[1]], "another episode begins when this one has ended"
            tidy.set()
            await request
        await asyncio.gather(first, second)


class TestPatience:
    async def test_it_ends_with_a_warning_and_restarts_with_the_next_request(
        self, joined: list[list[int]]
    ) -> None:
        sampler, back, again = engine(patience=0.05), asyncio.Event(), asyncio.Event()

        async def quick() -> None:
            with Participant():
                for seed in (1, 2, 3):
                    await ask(sampler, seed)

        async def hanging() -> None:
            with Participant():
                await back.wait()
                await ask(sampler, 9)
                await again.wait()

        late = asyncio.ensure_future(hanging())
        with pytest.warns(UserWarning, match="without 1 of its episodes"):
            await quick()
        assert joined == [[1], [2], [3]], "who was given up is not waited for twice"
        back.set()
        await settled()
        sampler._patience = AGES
        with Participant():
            request = ask(sampler, 4)
            await settled()
            assert joined[-1] == [9], "who asked is waited for again"
            again.set()
            await request
        await late


class TestOrder:
    @pytest.mark.parametrize("arrival", [(0, 1, 2, 3), (3, 1, 0, 2)])
    async def test_requests_that_join_together_are_ordered_by_position(
        self, arrival: Sequence[int], joined: list[list[int]]
    ) -> None:
        sampler, gates = engine(rows=2), [asyncio.Event() for _ in arrival]

        async def episode(place: int) -> None:
            with Participant(place):
                await gates[place].wait()
                await ask(sampler, place)

        all_of_them = asyncio.gather(*(episode(place) for place in range(4)))
        for place in arrival:
            await settled()
            gates[place].set()
        await all_of_them
        assert joined == [[0, 1], [2, 3]]

    async def test_an_earlier_answer_joins_earlier(self) -> None:
        first, second, within = Participant(0), Participant(1), None
        assert first.order < second.order
        for part in (second, first):
            part.began_request()
            part.ended_request()
        assert second.order < first.order
        with second:
            within = Participant()
        assert second.order < within.order < first.order, "a step asks where its episode does"


def test_a_closed_event_loop_leaves_nothing_behind() -> None:
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []
    sampler = engine()

    async def episode(wait_s: float) -> None:
        with Participant():
            await asyncio.sleep(wait_s)
            await ask(sampler, 1)

    async def rollout() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await asyncio.gather(episode(0.0), episode(0.02))

    for _ in range(2):
        run_async(rollout)
    gc.collect()
    assert loops[0]() is None
