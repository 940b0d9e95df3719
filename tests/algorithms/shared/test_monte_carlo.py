"""Algorithms without a critic, with advantages by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.support.episodes import episode, group, turn
from tests.support.tiny import team_of

from kapelle.algorithm import Algorithm, Credit, Outputs, Targets
from kapelle.algorithms.ccpo import CCPO
from kapelle.algorithms.dr_mas import DrMAS
from kapelle.algorithms.gigpo import GiGPO
from kapelle.algorithms.grpo import GRPO
from kapelle.algorithms.m_grpo import MGRPO
from kapelle.algorithms.magrpo import MAGRPO
from kapelle.algorithms.mars import MARS
from kapelle.algorithms.opo import OPO
from kapelle.algorithms.optimistic import Optimistic
from kapelle.algorithms.rae import RAE
from kapelle.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from kapelle.algorithms.remax import ReMax
from kapelle.algorithms.shared.groups import Earlier
from kapelle.algorithms.shared.rewards import PenaltyConfig
from kapelle.algorithms.signals.greedy import GreedyBaseline
from kapelle.algorithms.signals.reference import ReferenceLogProbs
from kapelle.rows import Signals, TurnKey
from kapelle.types import Episode, Group, Image, Intervention, Message, Turn

S2 = 1 / math.sqrt(2)


def credit_of(
    algorithm: Algorithm, groups: Sequence[Group], signals: Signals | None = None
) -> Mapping[TurnKey, Credit]:
    assert algorithm.credit is not None
    return algorithm.credit(groups, signals or Signals())


def firsts(credit: Mapping[TurnKey, Credit]) -> list[float]:
    """The advantage of each turn's first token, in order."""
    return [float(credit[key].advantage_T[0]) for key in sorted(credit)]


def solo(reward: float, tokens: int = 2, **fields: Any) -> Episode:
    return episode(turn("a", 0, tokens, **fields), rewards={"a": reward})


class TestOPO:
    def test_longer_trajectories_have_more_weight_in_the_baseline(self) -> None:
        # (1·4 + 0·1 + 0·3) / 8 = ½, where the plain mean is ⅓.
        groups = [group(solo(1.0, 4), solo(0.0, 1), solo(0.0, 3))]
        assert firsts(credit_of(OPO().build(), groups)) == pytest.approx([0.5, -0.5, -0.5])


class TestReMax:
    def test_the_greedy_return_is_subtracted(self) -> None:
        groups = [group(solo(1.0), solo(0.0)), group(solo(0.25))]
        greedy = {0: solo(0.75), 1: solo(1.0)}
        given = credit_of(ReMax().build(), groups, Signals(greedy=greedy))
        assert firsts(given) == pytest.approx([0.25, -0.75, -0.75])

    def test_a_task_without_a_greedy_episode_is_excluded(self) -> None:
        groups = [group(solo(1.0)), group(solo(0.25))]
        given = credit_of(ReMax().build(), groups, Signals(greedy={1: solo(1.0)}))
        assert [given[key].weight for key in sorted(given)] == [0.0, 1.0]
        assert firsts(given)[1] == pytest.approx(-0.75)

    def test_each_agent_has_its_own_greedy_baseline(self) -> None:
        settings = ReMax(team_reward="individual")
        one = episode(turn("a", 0), turn("b", 1), rewards={"a": 1.0, "b": 5.0})
        likeliest = episode(turn("a", 0), turn("b", 1), rewards={"a": 0.0, "b": 7.0})
        given = credit_of(settings.build(), [group(one)], Signals(greedy={0: likeliest}))
        assert firsts(given) == pytest.approx([1.0, -2.0])
        assert settings.build().need(GreedyBaseline)

    def test_an_agent_that_the_greedy_episode_lacks_is_compared_with_its_returns_in_earlier_steps(
        self,
    ) -> None:
        settings, earlier = ReMax(team_reward="individual"), Earlier()
        first, second = (
            episode(turn("a", 0), turn("b", 1), rewards={"a": 1.0, "b": reward}) for reward in (5.0, 8.0)
        )
        settings.credit([group(first)], Signals(greedy={0: first}), earlier)
        given = settings.credit([group(second)], Signals(greedy={0: solo(0.5)}), earlier)
        assert firsts(given) == pytest.approx([0.5, 3.0])


class TestReinforcePlusPlus:
    def test_returns_of_all_tokens_are_whitened_together(self) -> None:
        # Tokens' returns: 1, 1 and 0 → mean ⅔, unbiased variance ⅓.
        groups = [group(solo(1.0, 2)), group(solo(0.0, 1))]
        given = credit_of(ReinforcePlusPlus().build(), groups)
        high, low = (1 / 3) / math.sqrt(1 / 3), (-2 / 3) / math.sqrt(1 / 3)
        assert given[TurnKey(0, 0, 0)].advantage_T.tolist() == pytest.approx([high, high])
        assert given[TurnKey(1, 0, 0)].advantage_T.tolist() == pytest.approx([low])

    def test_the_penalty_stands_on_each_token_and_is_discounted(self) -> None:
        # β(log π_b − log π_ref) = ½·(−1 − −2), ½·(−1 − −1) = ½, 0: rewards −½, 1.
        # Returns at γ = ½: −½ + ½·1 = 0 and 1 → whitened ∓½/√½.
        algorithm = ReinforcePlusPlus(kl_in_reward=0.5, gamma=0.5).build()
        reference = {TurnKey(0, 0, 0): torch.tensor([-2.0, -1.0])}
        given = credit_of(algorithm, [group(solo(1.0, 2))], Signals(reference=reference))
        assert given[TurnKey(0, 0, 0)].advantage_T.tolist() == pytest.approx(
            [-math.sqrt(0.5), math.sqrt(0.5)]
        )
        assert algorithm.need(ReferenceLogProbs)
        assert algorithm.after_update == ()

    def test_policies_are_whitened_apart(self) -> None:
        one = [
            episode(turn("a", 0, 1), turn("b", 1, 1), rewards={"a": x, "b": 100 * x}) for x in (0.0, 1.0, 2.0)
        ]
        settings = ReinforcePlusPlus(team_reward="individual")
        given = credit_of(settings.build(), [group(e) for e in one])
        assert firsts(given) == pytest.approx([-1.0, -1.0, 0.0, 0.0, 1.0, 1.0])

    def test_with_a_group_baseline_trajectories_are_centred_then_whitened(self) -> None:
        # Centred ½, −½ and 2, −2: variance (½ + 8)/3; a longer attempt counts once.
        groups = [group(solo(1.0, 5), solo(0.0)), group(solo(4.0), solo(0.0))]
        given = credit_of(ReinforcePlusPlus(baseline="group", group_size=2).build(), groups)
        std = math.sqrt(8.5 / 3)
        assert firsts(given) == pytest.approx([0.5 / std, -0.5 / std, 2 / std, -2 / std])

    def test_with_a_group_baseline_tokens_may_weigh_the_same(self) -> None:
        # R − mean = 2, −2 over three tokens and one: mean (3·2 − 2)/4 = 1, unbiased variance (3·1 + 9)/3 = 4.
        groups = [group(solo(4.0, 3), solo(0.0, 1))]
        settings = {"group_size": 2, "baseline": "group", "whiten": "tokens"}
        given = credit_of(ReinforcePlusPlus.model_validate(settings).build(), groups)
        assert firsts(given) == pytest.approx([0.5, -1.5])
        with pytest.raises(ValidationError, match="baseline: group"):
            ReinforcePlusPlus(whiten="tokens")

    def test_invalid_settings_raise_an_error(self) -> None:
        with pytest.raises(ValidationError, match="group_size: 2"):
            ReinforcePlusPlus(baseline="group", group_size=1)
        with pytest.raises(ValidationError, match="kl_coefficient"):
            ReinforcePlusPlus(baseline="group", group_size=2, kl_in_reward=0.1)


class TestRAE:
    @staticmethod
    def memory(**settings: Any) -> Any:
        algorithm = RAE(**settings).build()
        assert algorithm.memory is not None
        return algorithm.memory(team_of("a", "b"), 0)

    def test_each_role_has_a_running_mean(self) -> None:
        # b_a: 0.05, then 0.95·0.05 + 0.05·1 = 0.0975; b_b: −0.05, −0.0975.
        memory = self.memory()
        duel = episode(turn("a", 0), turn("b", 1), rewards={"a": 1.0, "b": -1.0})
        assert firsts(memory([group(duel), group(duel)], Signals())) == pytest.approx(
            [0.95, -0.95, 0.9025, -0.9025]
        )
        assert memory.metrics() == pytest.approx({"baseline/a": 0.0975, "baseline/b": -0.0975})

    def test_a_resumed_memory_is_bitwise_identical(self) -> None:
        one, other = self.memory(decay=0.9), self.memory(decay=0.9)
        duel = episode(turn("a", 0), turn("b", 1), rewards={"a": 0.3, "b": -0.7})
        one([group(duel)], Signals())
        other.load_state(one.state())
        assert firsts(one([group(duel)], Signals())) == firsts(other([group(duel)], Signals()))


class TestMAGRPO:
    def test_every_round_compares_the_team_s_return_to_go(self) -> None:
        # Round 0: 1 + 2 = 3 and 0 + 1 = 1. Round 1: 2 and 1. Each ± its difference from the mean.
        def one(first: float, second: float) -> Episode:
            turns = (turn("a", 0), turn("b", 1, reward=first), turn("a", 2), turn("b", 3))
            return episode(*turns, rewards={"a": second, "b": second})

        groups = [group(one(2.0, 2.0), one(0.0, 1.0))]
        given = credit_of(MAGRPO(scale="none").build(), groups)
        # The mean of what a (0) and b (2) were paid in round 0 is 1.
        assert firsts(given) == pytest.approx([1.0, 1.0, 0.5, 0.5, -1.0, -1.0, -0.5, -0.5])

    def test_the_terminal_reward_counts_from_every_round_on(self) -> None:
        # Rounds: solver, critic, judge · solver · solver. All of them lead to what the judge closes with.
        names = ("solver", "critic", "solver", "solver", "judge")

        def one(reward: float) -> Episode:
            return episode(*(turn(name, k) for k, name in enumerate(names)), rewards={"judge": reward})

        given = credit_of(MAGRPO(scale="none").build(), [group(one(0.5), one(0.0))])
        assert firsts(given) == pytest.approx([0.25] * 5 + [-0.25] * 5)

    def test_agents_of_a_round_share_one_advantage_and_the_reward_counts_once(self) -> None:
        groups = [group(*(episode(turn("a", 0), turn("b", 1), rewards={"a": r, "b": r}) for r in (1.0, 0.0)))]
        assert firsts(credit_of(MAGRPO().build(), groups)) == pytest.approx([0.5] * 2 + [-0.5] * 2)
        expected = 0.5 / (math.sqrt(0.5) + 1e-6)
        scaled = firsts(credit_of(MAGRPO(scale="std").build(), groups))
        assert scaled == pytest.approx([expected] * 2 + [-expected] * 2)

    def test_log_probs_are_summed_over_a_turn_and_averaged_over_turns(self) -> None:
        logp_K = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
        columns = {"behaviour": logp_K.detach(), "advantage": torch.tensor([1.0, 1.0, -2.0])}
        targets = Targets(torch.tensor([0, 0, 1]), 2, torch.ones(3), columns)
        loss = MAGRPO().build().policy_loss(Outputs(logp_K), targets)
        assert MAGRPO.model_validate({"loss": {"clip_high": 0.3}}).loss.aggregation == "sequence_sum"
        assert MAGRPO.model_validate({"loss": {"level": "turn"}}).loss.aggregation is None
        # −½·∇[1·(log π_1 + log π_2) − 2·log π_3]
        (gradient,) = torch.autograd.grad(loss.total / loss.weight, logp_K)
        assert gradient.tolist() == pytest.approx([-0.5, -0.5, 1.0])


class TestDrMAS:
    def test_an_agents_turns_are_its_set(self) -> None:
        # a: two turns of an attempt that earned 1, one turn of one that earned 0 → mean ⅔, variance ⅓.
        twice = episode(turn("a", 0), turn("b", 1), turn("a", 2), rewards={"a": 1.0, "b": 10.0})
        once = episode(turn("a", 0), turn("b", 1), rewards={"a": 0.0, "b": 30.0})
        given = credit_of(DrMAS(team_reward="individual").build(), [group(twice, once)])
        std = math.sqrt(1 / 3) + 1e-6
        b = 10 / (math.sqrt(200) + 1e-6)
        assert firsts(given) == pytest.approx([1 / 3 / std, -b, 1 / 3 / std, -2 / 3 / std, b])


class TestGiGPO:
    """One agent in rooms: what it reads is where it is, and each attempt is paid at its end."""

    ROOMS = MappingProxyType({"hall": (1,), "attic": (2,), "cellar": (3,)})

    def attempt(self, rooms: str, reward: float, **fields: Any) -> Episode:
        turns = [
            turn("a", k, prompt_ids=self.ROOMS[room], new_messages=(Message("user", room[0]),), **fields)
            for k, room in enumerate(rooms.split())
        ]
        return episode(*turns, rewards={"a": reward})

    def three(self) -> list[Group]:
        return [
            group(
                self.attempt("hall attic", 4.0),
                self.attempt("hall cellar", 0.0),
                self.attempt("hall attic", 2.0),
            )
        ]

    def test_both_levels_by_hand(self) -> None:
        # Returns 4, 0 and 2: A^E = 2, −2, 0. To go from the hall at γ = ½: 2, 0, 1 → 1, −1, 0. The attic: 4 and 2; a set of
        # two of three weighs 2/1 · 2/3 of ±1. No one else was in the cellar.
        settings = {"scale": "none", "gamma": 0.5, "omega": 3.0}
        given = firsts(credit_of(GiGPO.model_validate(settings).build(), self.three()))
        assert given == pytest.approx([2 + 3, 2 + 4, -2 - 3, -2.0, 0.0, -4.0])
        settings["alone"] = "episode"
        given = firsts(credit_of(GiGPO.model_validate(settings).build(), self.three()))
        assert given == pytest.approx([2 + 3, 2 + 4, -2 - 3, -2 - 6, 0.0, -4.0])

    def test_both_levels_are_divided_by_their_own_spread(self) -> None:
        # A^E: ±2 over a deviation of 2. The hall: 2, 0, 1 over 1. The attic: ±1 over √2.
        given = firsts(credit_of(GiGPO(gamma=0.5).build(), self.three()))
        assert given == pytest.approx([2.0, 1 + S2, -2.0, -1.0, 0.0, -S2], abs=1e-5)

    def test_without_the_inner_level_it_is_grpo(self) -> None:
        groups = self.three()
        assert firsts(credit_of(GiGPO(omega=0.0).build(), groups)) == firsts(
            credit_of(GRPO().build(), groups)
        )

    def test_a_repeated_state_is_compared_with_other_episodes(self) -> None:
        # Attempt 0 is in the hall twice and earns 6, to go from each; attempt 1 earns 0.
        groups = [group(self.attempt("hall hall", 6.0), self.attempt("hall", 0.0))]
        given = firsts(credit_of(GiGPO(scale="none", gamma=1.0).build(), groups))
        # A^E ±3; A^S ½·(6 − 0) for either visit, and ½·(0 − mean of 6 and 6).
        assert given == pytest.approx([3 + 3, 3 + 3, -3 - 3])
        # Only its own attempt met the attic twice.
        groups = [group(self.attempt("attic attic", 6.0), self.attempt("hall", 0.0))]
        given = firsts(credit_of(GiGPO(scale="none").build(), groups))
        assert given == pytest.approx([3.0, 3.0, -3.0])

    def test_tasks_agents_and_pictures_are_kept_apart(self) -> None:
        red, blue = (Image(name, "image/png", b"") for name in ("red", "blue"))
        settings = GiGPO(scale="none", gamma=1.0, team_reward="individual").build()
        one = self.attempt("hall", 4.0, images=(red,))
        groups = [group(one, self.attempt("hall", 0.0, images=(blue,)))]
        assert firsts(credit_of(settings, groups)) == pytest.approx([2.0, -2.0])
        assert firsts(credit_of(settings, [group(one, self.attempt("hall", 0.0, images=(red,)))]))[0] == 4.0
        both = [
            episode(turn("a", 0), turn("b", 1, prompt_ids=(5, 10, 11)), rewards={"a": r}) for r in (4.0, 0.0)
        ]
        assert firsts(credit_of(settings, [group(*both)])) == pytest.approx([4.0, 0.0, -4.0, 0.0])
        assert firsts(credit_of(settings, [group(one), group(one)])) == [0.0, 0.0]

    def test_the_latest_messages_can_be_the_state(self) -> None:
        # What stands before it differs: the prompts are never equal from the second turn on.
        def kept(first: str, reward: float) -> Episode:
            seen = self.attempt(f"{first} hall", reward)
            return replace(
                seen,
                turns=(seen.turns[0], replace(seen.turns[1], prompt_ids=(*self.ROOMS[first], 1))),
            )

        groups = [group(kept("attic", 2.0), kept("cellar", 0.0))]
        settings = {"scale": "none", "gamma": 1.0}
        assert firsts(credit_of(GiGPO.model_validate(settings).build(), groups)) == [1.0, 1.0, -1.0, -1.0]
        settings["state"] = "new_messages"
        assert firsts(credit_of(GiGPO.model_validate(settings).build(), groups)) == [1.0, 2.0, -1.0, -2.0]


class TestMGRPO:
    """A planner, p, and those that it calls."""

    @staticmethod
    def attempt(order: str, reward: float) -> Episode:
        turns = [turn(name, k) for k, name in enumerate(order)]
        return episode(*turns, agents=tuple("psc"), rewards=dict.fromkeys("psc", reward))

    def test_calls_weigh_the_less_the_more_there_are(self) -> None:
        # s is called three times and once, twice on average: ⅔ and 2 of its ±2. p's turns are one trajectory.
        groups = [group(self.attempt("pspspsp", 4.0), self.attempt("psp", 0.0))]
        given = firsts(credit_of(MGRPO(scale="none").build(), groups))
        assert given == pytest.approx([2, 4 / 3, 2, 4 / 3, 2, 4 / 3, 2, -2, -4, -2])
        given = firsts(credit_of(MGRPO(scale="none", align="none").build(), groups))
        assert given == pytest.approx([2.0] * 7 + [-2.0] * 3)

    def test_turns_until_the_caller_acts_are_one_call(self) -> None:
        # s works for three turns and c for one in the first attempt's only calls; in the second each is called twice.
        groups = [group(self.attempt("psscsp", 2.0), self.attempt("pscpscp", 0.0))]
        given = firsts(credit_of(MGRPO(scale="none").build(), groups))
        assert given == pytest.approx([1, 1.5, 1.5, 1.5, 1.5, 1, -1, -0.75, -0.75, -1, -0.75, -0.75, -1])

    def test_turns_that_the_same_turn_called_for_are_one_call(self) -> None:
        # p speaks twice before s answers either, and s works at both in turns: two calls, though no one of a higher level speaks in
        # between. The other attempt calls once: 1.5 on average.
        spoken = [turn("p", 0), turn("p", 1), *(turn("s", k) for k in range(2, 6))]
        called = [replace(each, caller={2: 0, 3: 1, 4: 0, 5: 1}.get(each.index)) for each in spoken]
        both = episode(*called, agents=tuple("psc"), rewards=dict.fromkeys("psc", 4.0))
        given = firsts(credit_of(MGRPO(scale="none").build(), [group(both, self.attempt("psp", 0.0))]))
        assert given == pytest.approx([2, 2, 1.5, 1.5, 1.5, 1.5, -2, -3, -2])

    def test_a_sub_agent_may_call_others(self) -> None:
        # p calls s once in either attempt. s calls c twice in the first, whose own turns continue: one call of s.
        groups = [group(self.attempt("pscscsp", 2.0), self.attempt("pscsp", 0.0))]
        nested = MGRPO(scale="none", levels=(("p",), ("s",), ("c",)))
        given = firsts(credit_of(nested.build(), groups))
        assert given == pytest.approx([1, 1, 0.75, 1, 0.75, 1, 1, -1, -1, -1.5, -1, -1])

    def test_levels_are_separate_and_episodes_without_calls_are_excluded(self) -> None:
        # c is called in two of three attempts: 6 and 2, ±2, a set of two of three weighs 4/3.
        groups = [group(self.attempt("pcp", 6.0), self.attempt("pcp", 2.0), self.attempt("psp", 1.0))]
        given = firsts(credit_of(MGRPO(scale="none").build(), groups))
        assert given[1] == pytest.approx(2 * 4 / 3)
        assert given[4] == pytest.approx(-2 * 4 / 3)
        assert given[::3] == pytest.approx([3, -1, -2])

    def test_all_may_get_the_main_agents_advantage(self) -> None:
        paid = [
            episode(turn("p", 0), turn("c", 1), turn("p", 2), agents=tuple("psc"), rewards={"p": r, "c": -r})
            for r in (3.0, 1.0)
        ]
        settings = {"scale": "none", "team_reward": "individual", "compare": "main"}
        assert (
            firsts(credit_of(MGRPO.model_validate(settings).build(), [group(*paid)]))
            == [1.0] * 3 + [-1.0] * 3
        )
        settings["compare"] = "level"
        given = firsts(credit_of(MGRPO.model_validate(settings).build(), [group(*paid)]))
        assert given == [1.0, -1.0, 1.0, -1.0, 1.0, -1.0]

    def test_with_one_call_per_episode_it_is_grpo(self) -> None:
        groups = [group(self.attempt("pscp", 2.0), self.attempt("pcsp", 0.5), self.attempt("pcsp", 0.0))]
        assert firsts(credit_of(MGRPO().build(), groups)) == firsts(credit_of(GRPO().build(), groups))

    @pytest.mark.parametrize(
        ("levels", "mending"),
        [
            ([["p", "s"], ["c"]], "one main agent"),
            ([["p"]], "at least one level below it"),
            ([["p"], []], "at least one level below it"),
            ([["p"], ["s"], ["s"]], "names 's' twice"),
        ],
    )
    def test_invalid_levels_raise_an_error(self, levels: Any, mending: str) -> None:
        with pytest.raises(ValidationError, match=mending):
            MGRPO.model_validate({"levels": levels})


class TestCCPO:
    def test_the_mean_return_without_the_agent_is_taken_off(self) -> None:
        def one(reward: float, *without: float) -> Episode:
            removed = Intervention("remove", ("a",), None, tuple({"a": value} for value in without))
            return episode(turn("a", 0), rewards={"a": reward}, interventions=(removed,))

        # 3 − 1 and 1 − 3/2, each less the other's.
        groups = [group(one(3.0, 0.0, 2.0), one(1.0, 1.0, 2.0))]
        assert firsts(credit_of(CCPO(continuations=2).build(), groups)) == [2.5, -2.5]


class TestOptimistic:
    """Two players move at once, after the same prompt each; a completion is one letter."""

    A, B = (65,), (66,)

    def played(self, *attempts: tuple[str, float]) -> list[Group]:
        def move(agent: str, k: int, letter: str) -> Turn:
            return turn(agent, k, 1, completion_ids=getattr(self, letter), prompt_ids=(k,))

        return [
            group(
                *(
                    episode(move("a", 0, m[0]), move("b", 1, m[1]), rewards={"a": r, "b": r})
                    for m, r in attempts
                )
            )
        ]

    CLIMB = (("AA", 11.0), ("AB", -30.0), ("BA", -30.0), ("BB", 7.0))

    def test_an_action_has_the_value_of_its_best_returns(self) -> None:
        # a's A: 11 and −30, the better half 11; B: 7. Mean 9, so ±2; b the same.
        given = firsts(credit_of(Optimistic(scale="none", best_share=0.5).build(), self.played(*self.CLIMB)))
        assert given == pytest.approx([2.0, 2.0, 2.0, -2.0, -2.0, 2.0, -2.0, -2.0])

    def test_the_mean_of_all_of_them_prefers_what_is_safe(self) -> None:
        # −9½ and −11½ on average: A's mean is better by 2 here; with one more (AB) it is −16⅓.
        given = firsts(credit_of(Optimistic(scale="none", best_share=1.0).build(), self.played(*self.CLIMB)))
        assert given == pytest.approx([1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0, -1.0])
        more = self.played(*self.CLIMB, ("AB", -30.0))
        assert firsts(credit_of(Optimistic(scale="none", best_share=1.0).build(), more))[0] < 0
        assert firsts(credit_of(Optimistic(scale="none", best_share=0.3).build(), more))[0] > 0

    @pytest.mark.parametrize(
        ("share", "worth"), [(0.01, 4.0), (0.25, 4.0), (0.26, 3.5), (0.5, 3.5), (0.51, 3.0), (1.0, 2.5)]
    )
    def test_the_share_is_rounded_up(self, share: float, worth: float) -> None:
        groups = self.played(("AA", 1.0), ("AA", 2.0), ("AA", 3.0), ("AA", 4.0), ("BB", 0.0))
        given = firsts(credit_of(Optimistic(scale="none", best_share=share).build(), groups))
        assert given[0] - given[-1] == pytest.approx(worth)

    def test_rounding_errors_are_not_rounded_up(self) -> None:
        """0.28 of 25 returns are 7, not 7.000000000000001: the best, 19 to 25, have the mean 22."""
        groups = self.played(*(("AA", float(k)) for k in range(1, 26)), ("BB", 0.0))
        given = firsts(credit_of(Optimistic(scale="none", best_share=0.28).build(), groups))
        assert given[0] - given[-1] == pytest.approx(22.0)

    def test_an_equal_completion_of_another_prompt_is_another_action(self) -> None:
        def one(prompt: int, reward: float) -> Episode:
            return episode(
                turn("a", 0, 1, completion_ids=self.A, prompt_ids=(prompt,)), rewards={"a": reward}
            )

        settings = Optimistic(scale="none", best_share=0.5).build()
        assert firsts(credit_of(settings, [group(one(1, 4.0), one(1, 0.0))])) == [0.0, 0.0]
        assert firsts(credit_of(settings, [group(one(1, 4.0), one(2, 0.0))])) == [2.0, -2.0]
        apart = [group(one(1, 4.0), one(1, 4.0)), group(one(1, 0.0), one(1, 0.0))]
        assert firsts(credit_of(settings, apart)) == [0.0] * 4


class TestMARS:
    @staticmethod
    def games(players: str) -> list[Group]:
        """Two games; each player speaks twice, is paid 1, 0 at first and 2, −2 … at the end, by its seat."""
        made = []
        for game in (0, 1):
            turns = [turn(p, k, reward=float(k == game)) for k, p in enumerate(players * 2)]
            rewards = {p: float((-1) ** game * (2 + s)) for s, p in enumerate(players)}
            made.append(group(episode(*turns, rewards=rewards)))
        return made

    def test_two_players_by_hand(self) -> None:
        # a: game 0: r = 1, 2 → to go 3, 2; game 1: 0, −2 → −2, −2: mean ¼, variance (2.75² + 1.75² + 2·2.25²)/3.
        # b: game 0: 0, 3 → 3, 3; game 1: 1, −3 → −2, −3: mean ¼, variance (2·2.75² + 2.25² + 3.25²)/3.
        given = credit_of(MARS().build(), self.games("ab"))
        a = math.sqrt((2.75**2 + 1.75**2 + 2 * 2.25**2) / 3) + 1e-6
        b = math.sqrt((2 * 2.75**2 + 2.25**2 + 3.25**2) / 3) + 1e-6
        expected = [2.75 / a, 2.75 / b, 1.75 / a, 2.75 / b, -2.25 / a, -2.25 / b, -2.25 / a, -3.25 / b]
        assert firsts(given) == pytest.approx(expected)

    @pytest.mark.parametrize("players", ["ab", "abc"])
    @pytest.mark.parametrize("order", ["sum_then_normalise", "normalise_then_sum"])
    def test_every_role_has_the_same_average_advantage(self, players: str, order: Any) -> None:
        given = credit_of(MARS(normalise=order).build(), self.games(players))
        values = firsts(given)
        for seat in range(len(players)):
            own = values[seat :: len(players)]
            centre = own if order == "sum_then_normalise" else sorted({round(v, 6) for v in own})
            assert sum(centre) == pytest.approx(0.0, abs=1e-5)


class TestPenalties:
    def test_the_form_of_a_completion_costs(self) -> None:
        penalties = PenaltyConfig(length=0.5, length_limit=8, no_stop=0.25)
        settings = MAGRPO(scale="none", penalties=penalties)
        # 4 of 8 tokens cost ¼; 8 of them ½, and ¼ more for being cut.
        groups = [group(solo(1.0, 4), solo(1.0, 8, finish_reason="length"))]
        assert firsts(credit_of(settings.build(), groups)) == pytest.approx([0.25, -0.25])
        returns = settings.build().returns
        assert returns is not None
        assert [returns(e)["a"] for e in groups[0].episodes] == pytest.approx([0.75, 0.25])
