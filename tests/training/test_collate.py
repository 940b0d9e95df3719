"""Which tokens each learner is asked about, and what a central critic may read."""

from __future__ import annotations

import pytest
import torch
from tests.support.episodes import episode, group, turn
from tests.support.tiny import team_of

from kapelle.algorithm import Credit, CriticLoss, CriticSpec
from kapelle.algorithms.shared.surrogate import ValueLossConfig
from kapelle.algorithms.signals.critic_values import value_samples
from kapelle.algorithms.signals.embeddings import embedding_samples
from kapelle.algorithms.signals.samples import central_prompt, critic_sample, policy_sample
from kapelle.rows import Signals, TurnKey, turns_of
from kapelle.team import Agent, Team
from kapelle.training.collate import critic_samples, fresh_samples, policy_samples
from kapelle.types import Sampling

CRITICS = {"a": "critic:a", "b": "critic:a"}
FIT: CriticLoss = ValueLossConfig().build()
LOCAL = CriticSpec("local", FIT, "own")
PER_TURN = CriticSpec("local", FIT, "own", unit="turn")


class TestPolicySample:
    def test_it_asks_for_the_completion_at_the_agents_temperature(self) -> None:
        team = team_of("a")
        warm = Team(
            (Agent("a", sampling=Sampling(temperature=0.7)),), team.policies, team.policy_of, team.bases
        )
        one = turn("a", 0, 3)
        sample = policy_sample(one, warm, "reference:a", {})
        assert sample.learner == "reference:a"
        assert sample.tokens == (5, 10, 11, 20, 21, 22)
        assert sample.targets == (3, 4, 5)
        assert sample.temperature == 0.7


class TestCriticSample:
    def test_values_are_asked_for_before_each_token_and_after_the_last(self) -> None:
        team = team_of("a", critics={"a": "critic:a"})
        one = episode(turn("a", 0, 2))
        before = critic_sample(one, one.turns[0], team, LOCAL, {})
        after = critic_sample(one, one.turns[0], team, LOCAL, {}, after=True)
        assert (before.learner, before.tokens, before.targets) == ("critic:a", (5, 10, 11, 20, 21), (3, 4))
        assert (after.tokens, after.targets) == (before.tokens, (3, 4, 5))
        assert before.temperature == 1.0

    def test_a_value_of_the_turn_is_asked_for_before_anything_is_said(self) -> None:
        team = team_of("a", critics={"a": "critic:a"})
        one = episode(turn("a", 0, 2))
        before = critic_sample(one, one.turns[0], team, PER_TURN, {})
        after = critic_sample(one, one.turns[0], team, PER_TURN, {}, after=True)
        assert before.targets == (3,)
        assert (after.tokens, after.targets) == ((5, 10, 11, 20, 21), (3, 5))


class TestEmbeddingSamples:
    def test_the_prompt_is_read_alone_and_the_completion_after_it(self) -> None:
        groups = [group(episode(turn("a", 0, 2)))]
        saw, said = embedding_samples(groups, {"a": "embedder:a"})
        (one,), (other,) = saw.values(), said.values()
        # A token's hidden state is what the place after it is asked from.
        assert (one.learner, one.tokens, one.targets) == ("embedder:a", (5, 10, 11), (1, 2, 3))
        assert (other.tokens, other.targets) == ((5, 10, 11, 20, 21), (4, 5))


class TestCentralPrompt:
    def test_a_chain_shows_all_that_was_said_before_and_nothing_after(self) -> None:
        first = turn("a", 0, prompt_ids=(1, 2), completion_ids=(3, 4), logprobs=(-1, -1))
        second = turn("b", 1, prompt_ids=(5, 6), completion_ids=(7,), logprobs=(-1,))
        third = turn("c", 2, prompt_ids=(8,), completion_ids=(9,), logprobs=(-1,))
        one = episode(first, second, third)
        assert central_prompt(one, first) == (1, 2)
        assert central_prompt(one, second) == (1, 2, 3, 4, 5, 6)
        assert central_prompt(one, third) == (1, 2, 3, 4, 5, 6, 7, 8)

    def test_simultaneous_turns_show_what_the_others_read_and_not_what_they_say(self) -> None:
        # Each has a private hand: 1 and 2 for a, 5 and 6 for b, 8 for c.
        hands = {"a": (1, 2), "b": (5, 6), "c": (8,)}
        turns = [
            turn(agent, k, completed_before=0, prompt_ids=hand, completion_ids=(30 + k,), logprobs=(-1,))
            for k, (agent, hand) in enumerate(hands.items())
        ]
        one = episode(*turns)
        assert central_prompt(one, turns[0]) == (5, 6, 8, 1, 2)
        assert central_prompt(one, turns[1]) == (1, 2, 8, 5, 6)
        assert central_prompt(one, turns[2]) == (1, 2, 5, 6, 8)

    def test_the_second_round_shows_the_first_ones_words(self) -> None:
        a0 = turn("a", 0, completed_before=0, prompt_ids=(1,), completion_ids=(3,), logprobs=(-1,))
        b0 = turn("b", 1, completed_before=0, prompt_ids=(2,), completion_ids=(4,), logprobs=(-1,))
        a1 = turn("a", 2, completed_before=2, prompt_ids=(1, 3, 40), completion_ids=(5,), logprobs=(-1,))
        b1 = turn("b", 3, completed_before=2, prompt_ids=(2, 4, 30), completion_ids=(6,), logprobs=(-1,))
        one = episode(a0, b0, a1, b1)
        # Both openings with both answers, then what b reads now, then what a reads now; nothing twice.
        assert central_prompt(one, a1) == (1, 3, 2, 4, 30, 40)
        assert central_prompt(one, b1) == (1, 3, 2, 4, 40, 30)

    def test_a_turn_that_was_asked_for_earlier_and_ends_later_is_in_flight(self) -> None:
        slow = turn("a", 1, completed_before=0, prompt_ids=(1,), completion_ids=(3,), logprobs=(-1,))
        quick = turn("b", 0, completed_before=0, prompt_ids=(2,), completion_ids=(4,), logprobs=(-1,))
        again = turn("b", 2, completed_before=1, prompt_ids=(2, 4, 9), completion_ids=(5,), logprobs=(-1,))
        one = episode(quick, slow, again)
        assert central_prompt(one, again) == (2, 4, 1, 9)

    def test_alone_it_is_the_local_view(self) -> None:
        first = turn("a", 0, prompt_ids=(1, 2), completion_ids=(3, 4), logprobs=(-1, -1))
        second = turn("a", 1, prompt_ids=(1, 2, 3, 4, 5), completion_ids=(6,), logprobs=(-1,))
        one = episode(first, second)
        for own in (first, second):
            assert central_prompt(one, own) == own.prompt_ids


class TestValueSamples:
    @pytest.mark.parametrize(
        ("cut", "finish", "bootstrapped"),
        [(False, "stop", []), (True, "stop", [1, 2]), (True, "length", [1, 2]), (False, "length", [])],
    )
    def test_only_an_agents_last_turn_is_followed_up_when_the_episode_was_cut(
        self, *, cut: bool, finish: str, bootstrapped: list[int]
    ) -> None:
        team = team_of("a", "b", critics=CRITICS)
        turns = (turn("a", 0), turn("b", 1), turn("a", 2, finish_reason=finish))
        samples, last = value_samples([group(episode(*turns, truncated=cut))], team, LOCAL)
        assert sorted(key.turn for key in samples) == [0, 1, 2]
        assert sorted(key.turn for key in last) == bootstrapped
        # Two values before the tokens, and in a step that cuts an episode short one after every turn.
        assert {len(sample.targets) for sample in samples.values()} == {2 + bool(bootstrapped)}


class TestTrainingSamples:
    def test_each_credited_turn_asks_its_policy_and_its_critic(self) -> None:
        team = team_of("a", "b", critics=CRITICS)
        groups = [group(episode(turn("a", 0, 2), turn("b", 1, 1)))]
        keys = [TurnKey(0, 0, 0), TurnKey(0, 0, 1)]
        credit = {
            keys[0]: Credit(torch.tensor([1, 2]), torch.tensor([3.0, 4.0])),
            keys[1]: Credit(torch.tensor([5.0]), torch.tensor([6.0]), weight=0.0),
        }
        values = {keys[0]: torch.tensor([0.1, 0.2]), keys[1]: torch.tensor([0.3])}
        reference = {key: torch.full_like(value, -9.0) for key, value in values.items()}
        signals = Signals(values, reference=reference, proximal={keys[0]: torch.tensor([-1.5, -2.5])})
        policies = policy_samples(turns_of(groups), team, credit, signals)
        # b's turn is omitted of its policy's loss, and its critic still learns from it.
        assert list(policies) == [keys[0]]
        policy = policies[keys[0]]
        first, second = critic_samples(groups, team, credit, signals, LOCAL)
        assert [s.learner for s in (policy, first, second)] == ["a", "critic:a", "critic:a"]
        assert policy.columns["proximal"].tolist() == [-1.5, -2.5]
        assert policy.columns["advantage"].dtype == torch.float32
        assert policy.columns["advantage"].tolist() == [1.0, 2.0]
        assert policy.columns["behaviour"].tolist() == [-1.0, -1.0]
        assert policy.columns["reference"].tolist() == [-9.0, -9.0]
        assert "weight" not in policy.columns
        assert first.columns["return"].tolist() == [3.0, 4.0]
        assert second.columns["value"].tolist() == pytest.approx([0.3])

    def test_the_value_after_a_turn_is_learned_where_it_is_known(self) -> None:
        team = team_of("a", critics={"a": "critic:a"})
        groups = [group(episode(turn("a", 0, 2), turn("a", 1, 1), truncated=True))]
        first, last = TurnKey(0, 0, 0), TurnKey(0, 0, 1)
        ones = {first: torch.ones(2), last: torch.ones(1)}
        credit = {
            first: Credit(ones[first], torch.tensor([3.0, 4.0]), after=torch.tensor(5.0), weight=0.5),
            last: Credit(ones[last], torch.tensor([6.0])),
        }
        values = {first: torch.tensor([0.1, 0.2]), last: torch.tensor([0.3])}
        after = {first: torch.tensor(0.7), last: torch.tensor(0.8)}
        known, unknown = critic_samples(groups, team, credit, Signals(values, after=after), LOCAL)
        assert known.targets == (3, 4, 5)
        assert known.columns["return"].tolist() == [3.0, 4.0, 5.0]
        assert known.columns["value"].tolist() == pytest.approx([0.1, 0.2, 0.7])
        assert known.columns["weight"].tolist() == [0.5, 0.5, 0.5]
        assert unknown.targets == (3,)
        (without, _) = critic_samples(groups, team, credit, Signals(values), LOCAL)
        assert without.targets == (3, 4)


def test_only_tokens_of_the_current_weights_are_compared() -> None:
    logprobs = (-1.0, -2.0, -3.0, -4.0, -5.0)
    turns = [
        turn("a", 0, 5, logprobs=logprobs, version=4, versions=((3, 2), (4, 3))),
        turn("a", 1, 5, logprobs=logprobs, version=3),
        *(turn("a", k, 1, version=4) for k in range(2, 6)),
    ]
    first, *others = fresh_samples(turns, team_of("a"), 3, {"a": 4})
    assert first.targets == (5, 6, 7), "after a prompt of three tokens and two tokens of older weights"
    assert first.columns["behaviour"].tolist() == [-3.0, -4.0, -5.0]
    assert [each.tokens[1] for each in others] == [12, 13], (
        "three turns at most, none of them of older weights"
    )
    assert len(fresh_samples(turns, team_of("a"), 99)) == 7
