"""Credit by GAE, by hand: over tokens and turns, with penalties, truncation and normalisation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from tests.support.episodes import episode, group, turn

from kapelle.algorithm import Algorithm, Credit, algorithm_class
from kapelle.algorithms.mappo import MAPPO
from kapelle.algorithms.ppo import IPPO, PPO, actor_critic_row
from kapelle.algorithms.signals.reference import ReferenceLogProbs
from kapelle.rows import Signals, TurnKey
from kapelle.types import Group

PLAIN = {"gamma_turn": 0.5, "lam": 0.5, "normalise": "none"}


def credit(algorithm: Algorithm, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
    assert algorithm.credit is not None
    return algorithm.credit(groups, signals)


def ppo(**gae: object) -> Algorithm:
    return IPPO.model_validate({"team_reward": "individual", "gae": {**PLAIN, **gae}}).build()


def no_values(groups: Sequence[Group]) -> dict[TurnKey, torch.Tensor]:
    return {
        TurnKey(g, e, t.index): torch.zeros(len(t.completion_ids))
        for g, members in enumerate(groups)
        for e, one in enumerate(members.episodes)
        for t in one.turns
    }


class TestTwoTurns:
    """An agent speaks 2 tokens, is paid 1, hears someone, speaks 1 token, and earns 2 at the end."""

    GROUPS = (
        group(
            episode(
                turn("a", 0, 2, reward=1.0),
                turn("b", 1, 3, trained=False),
                turn("a", 2, 1),
                rewards={"a": 2.0},
            )
        ),
    )
    FIRST, SECOND = TurnKey(0, 0, 0), TurnKey(0, 0, 2)
    VALUES: ClassVar = {FIRST: torch.tensor([0.5, 0.25]), SECOND: torch.tensor([1.0])}

    def test_by_hand(self) -> None:
        # r = 0, 1, 2; γ = 1 inside a turn and ½ between turns; V = 0.5, 0.25, 1; λ = ½.
        # δ = 0.25 − 0.5, 1 + ½·1 − 0.25, 2 − 1 = −0.25, 1.25, 1
        # A = −0.25 + ½·1.5, 1.25 + ½·½·1, 1 = 0.5, 1.5, 1
        given = credit(ppo(), self.GROUPS, Signals(self.VALUES))
        assert given[self.FIRST].advantage_T.tolist() == pytest.approx([0.5, 1.5])
        assert given[self.SECOND].advantage_T.tolist() == pytest.approx([1.0])
        first, second = given[self.FIRST].return_T, given[self.SECOND].return_T
        assert first is not None
        assert second is not None
        assert first.tolist() == pytest.approx([1.0, 1.75])
        assert second.tolist() == pytest.approx([2.0])

    def test_turns_of_other_agents_are_skipped(self) -> None:
        assert set(credit(ppo(), self.GROUPS, Signals(self.VALUES))) == {self.FIRST, self.SECOND}

    def test_a_token_discount(self) -> None:
        # δ0 = ½·0.25 − 0.5 = −0.375; A0 = −0.375 + ½·½·1.5 = 0
        given = credit(ppo(gamma_token=0.5), self.GROUPS, Signals(self.VALUES))
        assert given[self.FIRST].advantage_T.tolist() == pytest.approx([0.0, 1.5])

    def test_a_penalty_to_the_reference_stands_on_each_token(self) -> None:
        # β·(log π_b − log π_ref) = 0.1·(−1 − −1.5), 0.1·(−1 − −1), 0.1·(−1 − 0.0) = 0.05, 0, −0.1
        reference = {self.FIRST: torch.tensor([-1.5, -1.0]), self.SECOND: torch.tensor([0.0])}
        given = credit(ppo(kl_in_reward=0.1), self.GROUPS, Signals(self.VALUES, reference=reference))
        # δ = −0.3, 1.25, 1.1: A = −0.3 + ½·1.525, 1.25 + ¼·1.1, 1.1
        assert given[self.FIRST].advantage_T.tolist() == pytest.approx([0.4625, 1.525])
        assert given[self.SECOND].advantage_T.tolist() == pytest.approx([1.1])

    def test_the_critic_s_value_replaces_a_truncated_future(self) -> None:
        # What is to come, 2, is discounted to the turn's end: δ2 = 2 + 2 − 1 = 3; A1 = 1.25 + ¼·3 = 2; A0 = −0.25 + ½·2
        cut = [group(replace(self.GROUPS[0].episodes[0], truncated=True))]
        after = {self.FIRST: torch.tensor(1.0), self.SECOND: torch.tensor(2.0)}
        signals = Signals(self.VALUES, bootstrap={self.SECOND: after[self.SECOND]}, after=after)
        given = credit(ppo(), cut, signals)
        assert given[self.FIRST].advantage_T.tolist() == pytest.approx([0.75, 2.0])
        assert given[self.SECOND].advantage_T.tolist() == pytest.approx([3.0])
        # After the first turn came ½ of the target at the second, 3 + 1; what comes after the second is not known.
        learned = given[self.FIRST].after
        assert learned is not None
        assert float(learned) == pytest.approx(2.0)
        assert given[self.SECOND].after is None
        ended = credit(ppo(truncated="terminate"), cut, signals)
        assert ended[self.SECOND].advantage_T.tolist() == pytest.approx([1.0])

    def test_without_a_followed_turn_a_truncation_is_a_termination(self) -> None:
        cut = [group(episode(turn("a", 0, 1), rewards={"a": 2.0}, truncated=True))]
        key = TurnKey(0, 0, 0)
        signals = Signals({key: torch.tensor([0.5])}, bootstrap={key: torch.tensor(9.0)})
        assert credit(ppo(), cut, signals)[key].advantage_T.tolist() == pytest.approx([1.5])


class TestNormalisation:
    """Two policies of one token a turn; advantages are the rewards, for V = 0 and λ = γ = 1."""

    @staticmethod
    def advantages(how: str, *, shared: bool = False) -> dict[str, list[float]]:
        policy = {"policy": "p"} if shared else {}
        groups = [
            group(
                episode(
                    turn("a", 0, 1, **policy), turn("b", 1, 1, **policy), rewards={"a": first, "b": second}
                )
            )
            for first, second in ((1.0, 10.0), (3.0, 50.0))
        ]
        gae = {"gamma_turn": 1.0, "lam": 1.0, "normalise": how}
        algorithm = IPPO.model_validate({"team_reward": "individual", "gae": gae}).build()
        given = credit(algorithm, groups, Signals(no_values(groups)))
        return {
            agent: [float(given[TurnKey(g, 0, k)].advantage_T) for g in range(2)]
            for k, agent in enumerate("ab")
        }

    def test_none(self) -> None:
        assert self.advantages("none") == {"a": [1.0, 3.0], "b": [10.0, 50.0]}

    def test_each_policy_has_its_own_mean_and_spread(self) -> None:
        # Two numbers whitened (ddof 1) are ∓1/√2, whatever their scale.
        half = math.sqrt(0.5)
        assert self.advantages("policy") == {
            "a": pytest.approx([-half, half], abs=1e-5),
            "b": pytest.approx([-half, half], abs=1e-5),
        }

    def test_agents_of_one_policy_are_normalised_together_or_apart(self) -> None:
        half = math.sqrt(0.5)
        apart = self.advantages("agent", shared=True)
        assert apart["a"] == pytest.approx([-half, half], abs=1e-5)
        together = self.advantages("policy", shared=True)
        # 1, 3, 10, 50: mean 16, variance (225 + 169 + 36 + 1156)/3 = 528.667
        spread = math.sqrt(1586 / 3)
        assert together["a"] == pytest.approx([-15 / spread, -13 / spread], abs=1e-5)
        assert together["b"] == pytest.approx([-6 / spread, 34 / spread], abs=1e-5)
        assert together == self.advantages("batch")


class TestTargets:
    """What critics are fitted to is a return, in the units of the reward, whatever is done to advantages."""

    GROUPS = (
        group(episode(turn("a", 0, 2), rewards={"a": 10.0}), episode(turn("a", 0, 2), rewards={"a": -30.0})),
    )

    @pytest.mark.parametrize("normalise", ["policy", "agent", "batch", "none"])
    @pytest.mark.parametrize("name", ["ippo", "mappo", "happo", "marft"])
    def test_they_are_never_whitened(self, name: str, normalise: str) -> None:
        kind: Any = algorithm_class(name)
        algorithm = kind.model_validate({"gae": {"lam": 1.0, "normalise": normalise}}).build()
        per_turn = algorithm.critic is not None and algorithm.critic.unit == "turn"
        ask = {key: values_T[: 1 if per_turn else None] for key, values_T in no_values(self.GROUPS).items()}
        given = credit(algorithm, self.GROUPS, Signals(ask))
        targets = [given[TurnKey(0, e, 0)].return_T for e in (0, 1)]
        length = 1 if per_turn else 2
        assert [t.tolist() for t in targets if t is not None] == [[10.0] * length, [-30.0] * length]


class TestStaleSamples:
    """One turn of two tokens, sampled at −1 each by weights that now say −2 and −0.5: ρ = 1/e and √e."""

    GROUPS = (group(episode(turn("a", 0, 2), rewards={"a": 1.0})),)
    KEY = TurnKey(0, 0, 0)
    VALUES: ClassVar = {KEY: torch.tensor([0.5, 0.25])}
    PROXIMAL: ClassVar = {KEY: torch.tensor([-2.0, -0.5])}

    def test_v_trace_by_hand(self) -> None:
        # ρ̄ = c = 1/e and 1 (cut). δ = (0.25 − 0.5)/e and 1 − 0.25.
        # v_2 = 0.25 + 0.75 = 1; v_1 = 0.5 + (−0.25 + 0.75)/e.
        # Advantages r + v' − V carry no ρ̄: 1 − 0.5 and 1 − 0.25.
        given = credit(
            ppo(lam=1.0, gamma_turn=1.0, vtrace=True),
            self.GROUPS,
            Signals(self.VALUES, proximal=self.PROXIMAL),
        )
        target_T = given[self.KEY].return_T
        assert target_T is not None
        assert target_T.tolist() == pytest.approx([0.5 + 0.5 / math.e, 1.0])
        assert given[self.KEY].advantage_T.tolist() == pytest.approx([0.5, 0.75])

    def test_the_ratio_of_a_whole_turn_is_the_product_over_its_tokens(self) -> None:
        # ρ̄ = √e/e, and v = 0.5 + ρ̄·(1 − 0.5).
        settings = ppo(lam=1.0, gamma_turn=1.0, vtrace=True, unit="turn")
        values = {self.KEY: torch.tensor([0.5])}
        given = credit(settings, self.GROUPS, Signals(values, proximal=self.PROXIMAL))
        target_T = given[self.KEY].return_T
        assert target_T is not None
        assert target_T.tolist() == pytest.approx([0.5 + 0.5 / math.sqrt(math.e)])


class TestFailures:
    def test_a_failed_episode_has_no_credit(self) -> None:
        good = episode(turn("a", 0, 1), rewards={"a": 1.0})
        failed = episode(turn("a", 0, 1), error="EpisodeError: gone")
        groups = [group(good, failed)]
        given = credit(ppo(), groups, Signals({TurnKey(0, 0, 0): torch.zeros(1)}))
        assert list(given) == [TurnKey(0, 0, 0)]


class TestIdentities:
    def test_ippo_ppo_and_mappo_with_a_local_view_are_one_row(self) -> None:
        groups = TestTwoTurns.GROUPS
        settings = {
            "gae": {"gamma_turn": 0.9, "lam": 0.8, "normalise": "agent"},
            "team_reward": "sum",
            "epochs": 3,
            "minibatches": 2,
            "loss": {"clip_low": 0.1, "entropy_coefficient": 0.01},
        }
        rows = [
            PPO.model_validate(settings).build(),
            IPPO.model_validate(settings).build(),
            actor_critic_row(MAPPO.model_validate(settings), "mappo", "local"),
        ]
        reference, *others = [credit(row, groups, Signals(TestTwoTurns.VALUES)) for row in rows]
        for other in others:
            assert other.keys() == reference.keys()
            for key in reference:
                assert torch.equal(other[key].advantage_T, reference[key].advantage_T)
        for row in rows[1:]:
            assert row.data.group_size == 1
            assert (row.update.epochs, row.update.minibatches, row.update.entropy) == (3, 2, True)
            assert row.need(ReferenceLogProbs) is None
            assert row.critic is not None
            assert row.critic.view == "local"

    def test_mappo_differs_from_ippo_only_in_its_critic(self) -> None:
        central, local = MAPPO().build(), IPPO().build()
        assert central.critic is not None
        assert local.critic is not None
        assert (central.critic.view, central.critic.sharing) == ("central", "shared")
        assert (local.critic.view, local.critic.sharing) == ("local", "own")
        assert MAPPO().model_dump(exclude={"name"}) == IPPO().model_dump(exclude={"name"})
