"""Groups that are left unfinished: what continues later is what would have been played at once, and nothing gets lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest
from tests.support.episodes import TASK, episode, turn
from tests.support.plugins import DigestState
from tests.support.tiny import LORA, lora_policies, stir, tiny_model
from tests.support.waiting import Rounds, Waiting, WaitingState

from kapelle.engines.rollout.compose import ComposedEngine
from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.rollout.episodes import begun, collect_groups, rollout
from kapelle.rollout.partial import (
    PartialEpisode,
    PartialGroup,
    dump_partial,
    grown,
    load_partial,
    unfinished_turns,
)
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.event_loop import run_async
from kapelle.team import Agent, Policy, Team
from kapelle.types import Episode, RewardEvent, Sampling

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
    engine = ComposedEngine([local, ScriptedEngine({"far": lambda _: "yes"})])
    seats = (Agent("a", sampling=LONG), Agent("b", sampling=LONG))
    team = Team(seats, {p.name: p for p in policies}, {"a": "a", "b": "b"})
    world = Waiting.model_validate({"tasks": 6, "kind": kind})
    return RolloutSetup(team, world, Rounds(rounds=3, apart=apart), engine)


def without_rounding(found: Episode) -> Episode:
    """Return an episode without log-probs: a prompt that is read again gives other last bits."""
    return replace(found, turns=tuple(replace(t, logprobs=(0.0,) * len(t.logprobs)) for t in found.turns))


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
    groups, pieces, cut = begun(tasks, 2, 7, 1), 0, 0
    while not all(group.done for group in groups):
        done = sum(group.done for group in groups)
        before = groups
        groups = run_async(lambda g=before, d=done: collect_groups(setup, g, lambda ended: sum(ended) > d))  # type: ignore[misc]
        open_now = [each for group in groups for each in group.episodes if isinstance(each, PartialEpisode)]
        cut += sum(any(each.completion_ids for each in one.begun) for one in open_now)
        pieces += 1
        groups = load_partial(dump_partial(groups))
    assert pieces > 2
    assert cut > 0
    for one, other in zip(groups, expected, strict=True):
        assert [*map(without_rounding, one.group.episodes)] == [*map(without_rounding, other.episodes)]
        for mine, theirs in zip(one.group.episodes, other.episodes, strict=True):
            for a, b in zip(mine.turns, theirs.turns, strict=True):
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_a_world_that_does_not_repeat_is_an_error_that_says_so() -> None:
    setup = playing()
    tasks = [setup.environment.task("train", index) for index in range(3)]
    groups = run_async(lambda: collect_groups(setup, begun(tasks, 2, 7, 1), lambda ended: sum(ended) > 0))
    cut = next(group for group in groups if not group.done)
    left = tuple(each for each in cut.episodes if isinstance(each, PartialEpisode) and each.sampled)
    other = replace(cut, task=replace(cut.task, question="another question?"), episodes=left)
    (found,) = run_async(lambda: collect_groups(setup, [other], all))
    assert left
    for each in found.group.episodes:
        assert "does not repeat" in str(each.error)
        assert "Set `training.partial_rollouts: 0`" in str(each.error)


def test_runs_of_tokens_know_their_weights() -> None:
    bare = turn("a", 0, tokens=0, version=0, weights_hash="")
    one = grown(bare, (1, 2), (-1.0, -2.0), 3, "x")
    assert (one.version, one.weights_hash, one.versions, one.runs) == (3, "x", (), ((3, 2),))
    same = grown(one, (4,), (-1.0,), 3, "x")
    assert (same.versions, same.runs) == ((), ((3, 3),))
    two = grown(grown(same, (5,), (-1.0,), 4, "y"), (6,), (-1.0,), 4, "y")
    assert (two.version, two.weights_hash, two.versions) == (4, "y", ((3, 3), (4, 2)))
    assert two.completion_ids == (1, 2, 4, 5, 6)
    assert grown(two, (), (), 9, "z") == two


def test_what_is_left_is_read_back_equal() -> None:
    mixed = turn("a", 0, tokens=3, versions=((1, 1), (2, 2)), version=2)
    left = PartialEpisode(3, (mixed,), (turn("b", 1),), (turn("c", 2),), (RewardEvent("a", 1, 0.5),))
    fresh, ended = PartialEpisode(4), episode(turn("a", 0), rewards={"a": 1.0})
    failed = Episode(TASK, 5, ("a",), (turn("a", 0),), error="x")
    groups = [PartialGroup(TASK, 2, (left, fresh)), PartialGroup(TASK, 3, (ended, failed, left))]
    assert load_partial(dump_partial(groups)) == groups
    assert load_partial("") == []
    names = [each.agent for each in unfinished_turns(groups)]
    assert names == ["a", "b", "c", "a", "a", "b", "c"]  # nothing of the one that failed
