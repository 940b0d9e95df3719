"""Groups that are left unfinished: what continues later is what would have been played at once, and nothing gets lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest
from tests.support.episodes import TASK, episode, turn
from tests.support.plugins import DigestState
from tests.support.tiny import LORA, lora_policies, stir, tiny_model
from tests.support.waiting import Rounds, Waiting, WaitingState

from kapelle.engines.rollout.compose import ComposedEngine
from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.rollout.protocol import joined_runs
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.rollout.continuous import ContinuousRollouts
from kapelle.rollout.episodes import begun, complete_groups, rollout
from kapelle.rollout.partial import (
    Exchange,
    GroupKey,
    PartialEpisode,
    PartialGroup,
    Wanted,
    continued,
    dump_partial,
    dump_wanted,
    load_partial,
    load_wanted,
    numbered,
)
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.event_loop import run_async
from kapelle.team import Agent, Policy, Team
from kapelle.types import Episode, RewardEvent, Sampling, Turn

LONG = Sampling(max_tokens=40)


async def _unevenly(
    self: WaitingState, actions: Mapping[str, str], final: str | None = None
) -> Mapping[str, float]:
    await asyncio.sleep(0.05 if set(actions) == {"b"} else 0)
    return {} if final is None else await DigestState.step(self, actions, final)


def playing(rows: int = 1024, *, apart: bool = False, kind: str = "not") -> RolloutSetup:
    """A trained and a frozen agent whose episodes end at very different times."""
    model = tiny_model(seed=5)
    model.bank.add("a", LORA, 0)
    stir(model.bank.parameters("a"), 4)
    policies = [*lora_policies("a"), Policy("b", trained=False)]
    local = LocalEngine({"base": model}, policies, rows)
    local._steps = 4  # so that a hold finds completions that have begun
    engine = ComposedEngine([local, ScriptedEngine({"far": lambda _: "yes"})])
    seats = (Agent("a", sampling=LONG), Agent("b", sampling=LONG))
    team = Team(seats, {p.name: p for p in policies}, {"a": "a", "b": "b"})
    world = Waiting.model_validate({"tasks": 6, "kind": kind})
    return RolloutSetup(team, world, Rounds(rounds=3, apart=apart), engine)


def without_rounding(found: Episode) -> Episode:
    """Return an episode without log-probs and without the order of its agents.

    A prompt that is read again gives other last bits, and sampling does not wait for the slower of two agents.
    """
    turns = sorted(found.turns, key=lambda turn: (turn.agent, turn.index))
    return replace(
        found,
        turns=tuple(
            replace(t, logprobs=(0.0,) * len(t.logprobs), index=0, completed_before=0) for t in turns
        ),
        reward_events=(),
    )


def done(group: PartialGroup) -> bool:
    """Return whether every episode of a group has ended."""
    return all(isinstance(episode, Episode) for episode in group.episodes)


async def in_pieces(setup: RolloutSetup, groups: Sequence[PartialGroup], seconds: float = 60.0) -> Wanted:
    """Roll out groups until the first one is finished, or only for a few tokens if `seconds` is 0, and return all of them."""
    every = {GroupKey(1, place): group for place, group in enumerate(groups)}
    wanted = {key: group for key, group in every.items() if not done(group)}
    rollouts = ContinuousRollouts(setup, len(groups))
    await rollouts.exchange(wanted, seconds=seconds)
    # The engine samples once no request has arrived for some iterations of the event loop.
    for _ in range(0 if seconds else 40):
        await asyncio.sleep(0)
    found = await rollouts.exchange(wanted, unfinished=True)
    await rollouts.exchange({})
    return {**every, **found.unfinished, **found.finished}


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(("apart", "rows"), [(False, 1024), (True, 1024), (True, 3)])
def test_what_is_left_goes_on_to_the_same_end(
    apart: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same weights all the time, playing in pieces is playing at once; also where some wait for a row."""
    if rows == 3:  # the first agent asks long before the second one has been played again
        monkeypatch.setattr(WaitingState, "step", _unevenly)
    setup = playing(rows, apart=apart, kind="mixed" if apart else "not")
    tasks = [setup.environment.task("train", index) for index in range(4)]
    expected = run_async(lambda: rollout(setup, tasks, 2, 7))
    groups, pieces, cut = begun(setup, tasks, 2, 7, 1), 0, 0
    while not all(map(done, groups)):
        found = run_async(partial(in_pieces, setup, groups, 60.0 * (pieces % 2)))
        groups = [found[GroupKey(1, place)] for place in range(len(tasks))]
        open_now = [each for group in groups for each in group.episodes if isinstance(each, PartialEpisode)]
        cut += sum(any(each.completion_ids for each in one.begun) for one in open_now)
        pieces += 1
        groups = load_partial(dump_partial(groups))
    assert pieces > 1
    assert cut > 0
    for one, other in zip(groups, expected, strict=True):
        assert [*map(without_rounding, one.group.episodes)] == [*map(without_rounding, other.episodes)]
        for mine, theirs in zip(one.group.episodes, other.episodes, strict=True):
            others = dict(numbered(theirs.turns))
            for key, a in numbered(mine.turns):
                b = others[key]
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_a_world_that_does_not_repeat_is_an_error_that_says_so() -> None:
    setup = playing()
    tasks = [setup.environment.task("train", index) for index in range(3)]
    found = run_async(lambda: in_pieces(setup, begun(setup, tasks, 2, 7, 1)))
    cut = next(group for group in found.values() if not done(group))
    left = tuple(each for each in cut.episodes if isinstance(each, PartialEpisode) and each.sampled)
    other = replace(cut, task=replace(cut.task, question="another question?"), episodes=left)
    (group,) = run_async(lambda: complete_groups(setup, [other], 1))
    assert left
    for each in group.episodes:
        assert "does not repeat" in str(each.error)
        assert "Set `training.asynchronous: false`" in str(each.error)


def test_groups_that_are_no_longer_wanted_end() -> None:
    setup = playing()
    tasks = [setup.environment.task("train", index) for index in range(3)]
    groups = {GroupKey(1, place): group for place, group in enumerate(begun(setup, tasks, 2, 7, 1))}

    async def some() -> tuple[Exchange, Exchange]:
        rollouts = ContinuousRollouts(setup, 3)
        await rollouts.exchange(groups)
        one = GroupKey(1, 1)
        return await rollouts.exchange({one: groups[one]}, seconds=60.0), await rollouts.exchange({})

    found, nothing = run_async(some)
    assert list(found.finished) == [GroupKey(1, 1)]
    assert nothing == Exchange({}, {})


def test_runs_of_tokens_know_their_weights() -> None:
    bare = turn("a", 0, tokens=0, version=0, weights_hash="")

    def more(tokens: int, version: int, weights_hash: str) -> Turn:
        return turn("a", 0, tokens=tokens, version=version, weights_hash=weights_hash)

    one = continued(bare, more(2, 3, "x"))
    assert (one.version, one.weights_hash, one.versions, one.runs) == (3, "x", (), ((3, 2),))
    same = continued(one, more(1, 3, "x"))
    assert (same.versions, same.runs) == ((), ((3, 3),))
    two = continued(continued(same, more(1, 4, "y")), more(1, 4, "y"))
    assert (two.version, two.weights_hash, two.versions) == (4, "y", ((3, 3), (4, 2)))
    assert len(two.completion_ids) == len(two.logprobs) == 5
    assert continued(two, more(0, 9, "z")) == two
    assert joined_runs(((1, 2),), ((1, 1), (2, 3))) == ((1, 3), (2, 3))


def test_what_is_left_is_read_back_equal() -> None:
    mixed = turn("a", 0, tokens=3, versions=((1, 1), (2, 2)), version=2)
    left = PartialEpisode(3, (mixed,), (turn("b", 1),), (turn("c", 2),), (RewardEvent("a", 1, 0.5),))
    fresh, ended = PartialEpisode(4), episode(turn("a", 0), rewards={"a": 1.0})
    failed = Episode(TASK, 5, ("a",), (turn("a", 0),), error="x")
    groups = [PartialGroup(TASK, 2, (left, fresh)), PartialGroup(TASK, 3, (ended, failed, left))]
    assert load_partial(dump_partial(groups)) == groups
    assert load_partial("") == []
    wanted = {GroupKey(1, 0): groups[0], GroupKey(2, 3, 1): groups[1]}
    assert load_wanted(dump_wanted(wanted)) == wanted
