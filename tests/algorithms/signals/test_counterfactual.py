"""Values after a turn and after its alternatives, with a critic that adds up token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from tests.support.episodes import episode, group, turn

from kapelle.algorithm import CriticSpec
from kapelle.algorithms.signals.counterfactual import COUNTERFACTUAL, CounterfactualValues
from kapelle.algorithms.signals.samples import critic_sample
from kapelle.rows import Learners, Sample, Sampled, TurnKey
from kapelle.team import Agent, Critic, Lora, Policy, Team
from kapelle.types import Episode, Group, Turn

TEAM = Team(
    (Agent("a"), Agent("b")),
    {name: Policy(name, lora=Lora()) for name in "ab"},
    {"a": "a", "b": "b"},
    critics={"critic": Critic("critic")},
    critic_of={"a": "critic", "b": "critic"},
)
SPEC = CriticSpec("central", cast("Any", None), "shared", unit="after", bootstraps=False)


class Digits:
    """A critic whose value after a prefix is the number that its tokens spell."""

    def __init__(self) -> None:
        self.read: list[tuple[int, ...]] = []

    def renderer(self, learner: str) -> None:
        return None

    def score(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        self.read += [sample.tokens for sample in samples]
        assert all(sample.targets == (len(sample.tokens),) for sample in samples), "one value, after the turn"
        return [torch.tensor([float("".join(map(str, sample.tokens)))]) for sample in samples]


def said(agent: str, index: int, seen: int, prompt: tuple[int, ...], word: int) -> Turn:
    return turn(agent, index, 1, completed_before=seen, prompt_ids=prompt, completion_ids=(word,))


def gathered(*groups: Group) -> tuple[dict[TurnKey, list[float]], dict[TurnKey, list[float]], Digits]:
    critic = Digits()
    step = Sampled(1, groups, TEAM, lambda: ())
    found = CounterfactualValues(SPEC).gather(step, cast("Learners", critic))
    own = {key: value.tolist() for key, value in found["values"].items()}
    return own, {key: value.tolist() for key, value in found[COUNTERFACTUAL].items()}, critic


def at_once(a: int, b: int) -> Episode:
    return episode(said("a", 0, 0, (1,), a), said("b", 1, 0, (2,), b))


def in_turn(a: int, b: int) -> Episode:
    """b reads what a said."""
    return episode(said("a", 0, 0, (1,), a), said("b", 1, 1, (2, a), b))


def test_at_the_same_moment_only_one_answer_changes() -> None:
    own, instead, critic = gathered(group(at_once(5, 7), at_once(6, 8), at_once(5, 9)))
    # What is read: the other's prompt and answer, then the agent's own.
    assert own[TurnKey(0, 0, 0)] == [2715.0]
    assert own[TurnKey(0, 0, 1)] == [1527.0]
    assert instead[TurnKey(0, 0, 0)] == [2716.0, 2715.0], "b's 7 stays beside a's 6 and 5"
    assert instead[TurnKey(0, 1, 1)] == [1627.0, 1629.0], "a's 6 stays beside b's 7 and 9"
    assert len(critic.read) == len(set(critic.read)), "what is read twice is scored once"


def test_one_after_another_the_same_prompt_is_what_counts() -> None:
    own, instead, _ = gathered(group(in_turn(5, 7), in_turn(6, 8), in_turn(5, 9)))
    assert own[TurnKey(0, 0, 0)] == [15.0], "what comes later is not known"
    assert instead[TurnKey(0, 0, 0)] == [16.0, 15.0]
    assert own[TurnKey(0, 0, 1)] == [15257.0]
    assert instead[TurnKey(0, 0, 1)] == [15259.0], "b's 8 answered another prompt"
    assert instead[TurnKey(0, 1, 1)] == []


def test_other_tasks_failed_episodes_and_frozen_agents_are_no_alternatives() -> None:
    failed = Episode(at_once(3, 3).task, 0, ("a", "b"), at_once(3, 3).turns, error="EpisodeError: gone")
    frozen = episode(turn("a", 0, 1, completed_before=0, prompt_ids=(1,), completion_ids=(4,), trained=False))
    _, instead, _ = gathered(group(at_once(5, 7), failed, frozen), group(at_once(6, 8)))
    assert instead == {key: [] for key in instead}
    assert set(instead) == {TurnKey(0, 0, 0), TurnKey(0, 0, 1), TurnKey(1, 0, 0), TurnKey(1, 0, 1)}


@pytest.mark.parametrize("view", ["central", "local"])
def test_the_value_before_a_turn_is_independent_of_simultaneous_turns(view: Any) -> None:
    before = CriticSpec(view, cast("Any", None), "shared", unit="turn", bootstraps=False)
    played = at_once(5, 7)
    sample = critic_sample(played, played.turns[0], TEAM, before, {})
    assert 7 not in sample.tokens
    assert 5 not in sample.tokens[: sample.targets[0]]
