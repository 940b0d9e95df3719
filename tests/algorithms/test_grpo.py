"""GRPO and its variants by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from pydantic import ValidationError
from tests.support.episodes import TASK, episode, group, turn
from tests.support.tiny import sections

from kapelle import Trainer
from kapelle.algorithm import Credit
from kapelle.algorithms.grpo import GRPO
from kapelle.algorithms.rloo import RLOO
from kapelle.algorithms.shared.groups import Earlier
from kapelle.algorithms.shared.rewards import PenaltyConfig, TeamReward
from kapelle.errors import AlgorithmError
from kapelle.rows import Signals, TurnKey
from kapelle.types import Episode, Group, Task


def solo(reward: float, *, tokens: int = 2, task: Task = TASK, **fields: object) -> Episode:
    return episode(turn("a", 0, tokens, **fields), rewards={"a": reward}, task=task)


def credit_of(algorithm: GRPO | RLOO, groups: Sequence[Group]) -> Mapping[TurnKey, Credit]:
    give = algorithm.build().credit
    assert give is not None
    return give(groups, Signals())


def advantages(algorithm: GRPO | RLOO, groups: Sequence[Group]) -> list[float]:
    """The advantage of each turn, which all of its tokens share."""
    credit = credit_of(algorithm, groups)
    values = []
    for key in sorted(credit):
        assert len(set(credit[key].advantage_T.tolist())) == 1
        values.append(float(credit[key].advantage_T[0]))
    return values


class TestByHand:
    # Rewards 1, 0, 0, 1: mean ½, standard deviation with ddof 1 √(1/3) = 0.5773503.
    GROUP = group(solo(1.0), solo(0.0), solo(0.0), solo(1.0))

    def test_scaled(self) -> None:
        expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
        assert advantages(GRPO(), [self.GROUP]) == pytest.approx([expected, -expected, -expected, expected])

    def test_centred_only(self) -> None:
        assert advantages(GRPO(scale="none"), [self.GROUP]) == pytest.approx([0.5, -0.5, -0.5, 0.5])

    def test_relative_to_the_mean(self) -> None:
        # (1 − ½)/½ and (0 − ½)/½; with one success in four (1 − ¼)/¼ and −1; without any nothing.
        algorithm = GRPO(scale="mean")
        assert advantages(algorithm, [self.GROUP]) == [1.0, -1.0, -1.0, 1.0]
        rare, never = group(*map(solo, [0.0, 1.0, 0.0, 0.0])), group(*[solo(0.0)] * 4)
        assert advantages(algorithm, [rare, never]) == [-1.0, 3.0, -1.0, -1.0] + [0.0] * 4

    def test_relative_to_the_mean_returns_below_0_raise_an_error(self) -> None:
        with pytest.raises(AlgorithmError, match=r"episode 1 of group 0 has a return of -0\.5.*scale: none"):
            advantages(GRPO(scale="mean"), [group(solo(1.0), solo(-0.5))])

    def test_alone_it_is_compared_with_the_mean_of_earlier_returns(self) -> None:
        give = GRPO(scale="mean").credit
        failed = Episode(TASK, 0, ("a",), error="EpisodeError: gone")
        earlier = Earlier()
        give([group(solo(1.0), solo(0.0))], Signals(), earlier)
        # (1 − ½)/(½ + ½/20), and then 0 less 0.525 over 0.525·19/20.
        for reward, expected in ((1.0, 0.5 / 0.525), (0.0, -20 / 19)):
            (credit,) = give([group(solo(reward), failed)], Signals(), earlier).values()
            assert float(credit.advantage_T[0]) == pytest.approx(expected)

    def test_against_the_others(self) -> None:
        # 1 − (0 + 0 + 1)/3 and 0 − (1 + 0 + 1)/3
        assert advantages(RLOO(), [self.GROUP]) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])

    def test_every_token_of_a_turn_has_its_advantage(self) -> None:
        groups = [group(solo(1.0, tokens=1), solo(0.0, tokens=4))]
        credit = credit_of(GRPO(scale="none"), groups)
        assert credit[TurnKey(0, 0, 0)].advantage_T.tolist() == [0.5]
        assert credit[TurnKey(0, 1, 0)].advantage_T.tolist() == [-0.5] * 4
        assert {c.return_T for c in credit.values()} == {None}


class TestGroups:
    def test_a_failed_episode_leaves_its_group(self) -> None:
        failed = Episode(group(solo(1.0)).task, 0, ("a",), (turn("a", 0),), error="EpisodeError: gone")
        groups = [group(solo(1.0), failed, solo(0.0))]
        credit = credit_of(GRPO(scale="none"), groups)
        assert sorted(credit) == [TurnKey(0, 0, 0), TurnKey(0, 2, 0)]
        assert advantages(GRPO(scale="none"), groups) == pytest.approx([0.5, -0.5])

    def test_a_step_in_which_everything_failed_credits_nothing(self) -> None:
        failed = Episode(group(solo(1.0)).task, 0, ("a",), error="EpisodeError: gone")
        assert credit_of(GRPO(), [group(failed, failed)]) == {}

    @pytest.mark.parametrize(
        "algorithm", [GRPO(), GRPO(scale="none"), GRPO(scale="mean"), GRPO(compare="episode"), RLOO()]
    )
    def test_a_group_with_equal_returns_has_zero_advantages(self, algorithm: GRPO | RLOO) -> None:
        for reward in (0.0, 1.0, 0.1, 1 / 3):
            assert advantages(algorithm, [group(*[solo(reward)] * 5)]) == [0.0] * 5

    def test_a_lone_episode_after_failures_has_advantage_0_at_first(self) -> None:
        failed = Episode(group(solo(1.0)).task, 0, ("a",), error="EpisodeError: gone")
        assert advantages(GRPO(), [group(solo(0.75), failed)]) == [0.0]


class TestTeams:
    @staticmethod
    def pair(first: float, second: float) -> Episode:
        """a speaks twice, b once."""
        turns = (turn("a", 0), turn("b", 1, 3), turn("a", 2))
        return episode(*turns, rewards={"a": first, "b": second})

    def test_an_agent_is_compared_with_itself(self) -> None:
        groups = [group(self.pair(1.0, 10.0), self.pair(0.0, 30.0))]
        own = GRPO(scale="none", team_reward="individual")
        # a's two turns share its trajectory's advantage.
        assert advantages(own, groups) == pytest.approx([0.5, -10.0, 0.5, -0.5, 10.0, -0.5])
        shared = GRPO(scale="none", team_reward="sum")
        assert advantages(shared, groups) == pytest.approx([-9.5, -9.5, -9.5, 9.5, 9.5, 9.5])

    def test_a_whole_episode_is_compared_with_the_others(self) -> None:
        # Returns 11 and 30, for every agent, whoever earned them.
        groups = [group(self.pair(1.0, 10.0), self.pair(0.0, 30.0))]
        whole = GRPO(scale="none", team_reward="individual", compare="episode")
        assert advantages(whole, groups) == pytest.approx([-9.5] * 3 + [9.5] * 3)

    def test_turns_that_read_the_same_are_compared_with_one_another(self) -> None:
        """Two proposals; two solvers of one policy read each, and are right (1) or wrong."""

        def one(problem: tuple[int, ...], right: tuple[float, float], paid: float) -> Episode:
            turns = (
                turn("p", 0, prompt_ids=(1,)),
                turn("a", 1, policy="solver", prompt_ids=problem),
                turn("b", 2, policy="solver", prompt_ids=problem),
            )
            return episode(*turns, rewards={"p": paid, "a": right[0], "b": right[1]})

        own = GRPO(scale="none", team_reward="individual", compare="prompt")
        # The proposals: 1 and 0 around ½. Answers to a problem of its own: around ½, and around 0. Two of a possible three
        # make a full set.
        apart = [group(one((5,), (1.0, 0.0), 1.0), one((6,), (0.0, 0.0), 0.0))]
        assert advantages(own, apart) == pytest.approx([0.5, 0.5, -0.5, -0.5, 0.0, 0.0])
        # Answers to one problem of both episodes: 1, 0, 0, 0 around ¼. The proposals' set is half as large: 2/1 · 3/4 · ½.
        alike = [group(one((5,), (1.0, 0.0), 1.0), one((5,), (0.0, 0.0), 0.0))]
        assert advantages(own, alike) == pytest.approx([0.75, 0.75, -0.25, -0.75, -0.25, -0.25])

    def test_the_prompt_of_another_policy_task_or_turn_is_another_one(self) -> None:
        own = GRPO(scale="none", team_reward="individual", compare="prompt")
        other = Task("t1", "2+2")

        def one(reward: float, task: Task, policy: str) -> Episode:
            first, second = turn("a", 0, policy=policy), turn("a", 1, policy=policy)
            return episode(first, second, rewards={"a": reward}, task=task)

        groups = [
            group(one(1.0, TASK, "x"), one(0.0, TASK, "x"), one(9.0, TASK, "y"), one(5.0, TASK, "y")),
            group(one(70.0, other, "x"), one(50.0, other, "x")),
        ]
        # Of a prompt that is read twice in an episode each reading is compared with its like. Two of four: 2/1 · 3/4 as much.
        found = advantages(own, groups)
        assert found == pytest.approx(
            [1.5 * a for a in [*[0.5] * 2, *[-0.5] * 2, *[2.0] * 2, *[-2.0] * 2, *[10.0] * 2, *[-10.0] * 2]]
        )

    def test_comparing_prompts_needs_individual_rewards(self) -> None:
        with pytest.raises(ValidationError, match="team_reward: individual"):
            GRPO(compare="prompt")

    @pytest.mark.parametrize("agents", ["a", "ab", "abcd"])
    @pytest.mark.parametrize("how", ["mean", "sum", "max", "min", "last", "individual"])
    def test_a_whole_episode_counts_the_team_s_reward_once(self, agents: str, how: TeamReward) -> None:
        # Only who closes is scored, 1 or 0: ½ from the mean, however many agents share it.
        def one(reward: float) -> Episode:
            return episode(*(turn(name, k) for k, name in enumerate(agents)), rewards={agents[-1]: reward})

        whole = GRPO(scale="none", team_reward=how, compare="episode")
        found = advantages(whole, [group(one(1.0), one(0.0))])
        assert found == pytest.approx([0.5] * len(agents) + [-0.5] * len(agents))

    def test_an_agent_is_compared_over_the_episodes_in_which_it_acted(self) -> None:
        alone = episode(turn("a", 0), agents=("a", "b"), rewards={"a": 4.0, "b": 4.0})
        groups = [group(self.pair(1.0, 1.0), self.pair(0.0, 0.0), alone)]
        credit = credit_of(GRPO(scale="none"), groups)
        means = {"a": 5 / 3, "b": 0.5}
        # b's set holds two of three attempts: it weighs like a's by 2/1 · 2/3.
        assert float(credit[TurnKey(0, 0, 1)].advantage_T[0]) == pytest.approx((1.0 - means["b"]) * 4 / 3)
        assert float(credit[TurnKey(0, 2, 0)].advantage_T[0]) == pytest.approx(4.0 - means["a"])

    def test_frozen_agents_get_no_credit_but_count_in_the_team_reward(self) -> None:
        def one(reward: float) -> Episode:
            turns = (turn("a", 0), turn("b", 1, trained=False))
            return episode(*turns, rewards={"b": reward})

        credit = credit_of(GRPO(scale="none"), [group(one(1.0), one(0.0))])
        assert {key.turn for key in credit} == {0}
        assert float(credit[TurnKey(0, 0, 0)].advantage_T[0]) == 0.5


class TestTruncation:
    CUT = group(solo(1.0, finish_reason="length"), solo(0.0), solo(0.0))

    @staticmethod
    def weights(credit: dict[TurnKey, Credit]) -> list[float]:
        return [credit[key].weight for key in sorted(credit)]

    def test_kept(self) -> None:
        algorithm = GRPO(scale="none")
        assert advantages(algorithm, [self.CUT]) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
        assert self.weights(dict(credit_of(algorithm, [self.CUT]))) == [1.0, 1.0, 1.0]

    def test_masked_it_leaves_the_loss_and_stays_in_the_baseline(self) -> None:
        algorithm = GRPO(scale="none", truncated="mask")
        assert advantages(algorithm, [self.CUT]) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
        assert self.weights(dict(credit_of(algorithm, [self.CUT]))) == [0.0, 1.0, 1.0]

    def test_penalised(self) -> None:
        algorithm = GRPO(scale="none", truncated="penalise", truncation_penalty=0.4)
        assert advantages(algorithm, [self.CUT]) == pytest.approx([0.4, -0.2, -0.2])
        # The penalty of a turn without an end adds up with it: 1 − 0.4 − 0.3.
        both = algorithm.model_copy(update={"penalties": PenaltyConfig(no_stop=0.3)})
        assert advantages(both, [self.CUT]) == pytest.approx([0.2, -0.1, -0.1])

    def test_incomplete_truncation_settings_raise_an_error(self) -> None:
        for settings in ({"truncated": "penalise"}, {"truncation_penalty": 0.5}):
            with pytest.raises(ValidationError, match="set both or neither"):
                GRPO.model_validate(settings)


def test_log_probs_of_the_reference_are_those_of_the_sampling_temperature() -> None:
    """Before the first update the policy is its own reference, and the trainer agrees with the sampler."""
    loss = {"kl_coefficient": 0.1, "importance_cap": 2.0}
    team = {"agents": 1, "lora": {"rank": 2}, "sampling": {"max_tokens": 4, "temperature": 0.6}}
    algorithm = {"name": "grpo", "group_size": 2, "loss": loss}
    with Trainer(**sections(algorithm=algorithm, team=team, workflow={"name": "solo"})) as trainer:
        metrics = next(iter(trainer.steps(1))).metrics
    assert metrics["kl/agent_0"] == pytest.approx(0.0, abs=1e-8)
    assert metrics["importance/agent_0"] == pytest.approx(1.0, abs=1e-5)
