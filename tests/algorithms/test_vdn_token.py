"""VDN's token form: the sum of values compared with the team's return, by hand and as an identity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError
from tests.support.episodes import episode, group, turn

from kapelle.algorithm import Credit
from kapelle.algorithms.ppo import IPPO
from kapelle.algorithms.vdn_token import VDNToken
from kapelle.rows import Signals, TurnKey
from kapelle.types import Group

PLAIN = {"gamma_turn": 0.5, "lam": 1.0, "normalise": "none"}


def credit(groups: list[Group], signals: Signals, **gae: Any) -> Mapping[TurnKey, Credit]:
    give = VDNToken.model_validate({"gae": {**PLAIN, **gae}}).build().credit
    assert give is not None
    return give(groups, signals)


class TestByHand:
    """`a` says 3 tokens and `b` 2 side by side; then `a` alone says one more. The round pays 1, the end 4."""

    GROUPS: ClassVar = [
        group(
            episode(
                turn("a", 0, 3, reward=1.0),
                turn("b", 1, 2, reward=1.0, completed_before=0),
                turn("a", 2, 1),
                rewards={"a": 4.0, "b": 4.0},
            )
        )
    ]
    VALUES: ClassVar = {
        TurnKey(0, 0, 0): torch.tensor([0.5, 1.0, 2.0]),
        TurnKey(0, 0, 1): torch.tensor([0.25, 0.75]),
        TurnKey(0, 0, 2): torch.tensor([3.0]),
    }

    def test_with_lambda_1_it_is_the_team_s_return_less_the_sum(self) -> None:
        # The return of round 1 is 1 + ½·4 = 3, of round 2 it is 4. Sums: 0.75, 1.75, and b keeps 0.75: 2.75; then 3.
        given = credit(self.GROUPS, Signals(self.VALUES))
        assert given[TurnKey(0, 0, 0)].advantage_T.tolist() == [2.25, 1.25, 0.25]
        assert given[TurnKey(0, 0, 1)].advantage_T.tolist() == [2.25, 1.25]
        assert given[TurnKey(0, 0, 2)].advantage_T.tolist() == [1.0]

    def test_each_critic_s_target_is_the_return_less_the_others_values(self) -> None:
        given = credit(self.GROUPS, Signals(self.VALUES))
        a, b = given[TurnKey(0, 0, 0)].return_T, given[TurnKey(0, 0, 1)].return_T
        assert a is not None
        assert b is not None
        assert a.tolist() == [2.75, 2.25, 2.25]  # 3 less 0.25, 0.75 and, kept, 0.75
        assert b.tolist() == [2.5, 2.0]  # 3 less 0.5 and 1

    def test_agents_that_have_read_a_turn_are_excluded_from_its_baseline(self) -> None:
        # b speaks after a: V_b knows what a has said. a is judged against its own values alone, b against both.
        chain = [
            group(
                episode(
                    turn("a", 0, 3, reward=1.0),
                    turn("b", 1, 2, reward=1.0),
                    turn("a", 2, 1),
                    rewards={"a": 4.0, "b": 4.0},
                )
            )
        ]
        given = credit(chain, Signals(self.VALUES))
        assert given[TurnKey(0, 0, 0)].advantage_T.tolist() == [2.5, 2.0, 1.0]
        assert given[TurnKey(0, 0, 1)].advantage_T.tolist() == [2.25, 1.25]

    def test_lambda_0_looks_one_position_ahead(self) -> None:
        # δ: 1.75 − 0.75, 2.75 − 1.75, 1 + ½·3 − 2.75, 4 − 3.
        given = credit(self.GROUPS, Signals(self.VALUES), lam=0.0)
        assert given[TurnKey(0, 0, 0)].advantage_T.tolist() == [1.0, 1.0, -0.25]
        assert given[TurnKey(0, 0, 2)].advantage_T.tolist() == [1.0]

    def test_the_gradient_of_the_targets_is_that_of_the_squared_sum(self) -> None:
        given = credit(self.GROUPS, Signals(self.VALUES))
        a, b = (self.VALUES[TurnKey(0, 0, k)][:2].clone().requires_grad_() for k in (0, 1))
        targets = [given[TurnKey(0, 0, k)].return_T for k in (0, 1)]
        assert targets[0] is not None
        assert targets[1] is not None
        apart = (a - targets[0][:2]).square().sum() + (b - targets[1]).square().sum()
        together = (a + b - 3.0).square().sum()
        for one, other in zip(
            torch.autograd.grad(apart, [a, b]), torch.autograd.grad(together, [a, b]), strict=True
        ):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("cut", [False, True])
def test_one_agent_is_ippo(cut: bool) -> None:
    groups = [
        group(
            episode(turn("a", 0, 3, reward=0.3), turn("a", 1, 2), rewards={"a": 1.0}),
            episode(turn("a", 0, 1), turn("a", 1, 4), rewards={"a": 0.0}, truncated=cut),
        )
    ]
    generator = torch.Generator().manual_seed(0)
    values = {
        TurnKey(0, e, t.index): torch.randn(len(t.completion_ids), generator=generator)
        for e, played in enumerate(groups[0].episodes)
        for t in played.turns
    }
    settings = {"gae": {"gamma_turn": 0.9, "gamma_token": 0.95, "lam": 0.8, "normalise": "policy"}}
    rows = [kind.model_validate(settings).build().credit for kind in (IPPO, VDNToken)]
    after = {key: torch.randn((), generator=generator) for key in values} if cut else {}
    last = TurnKey(0, 1, 1)
    signals = Signals(values, {last: after[last]} if cut else {}, after)
    ippo, summed = (give(groups, signals) for give in rows if give is not None)
    for key in values:
        torch.testing.assert_close(summed[key].after, ippo[key].after)
        torch.testing.assert_close(summed[key].advantage_T, ippo[key].advantage_T)
        torch.testing.assert_close(summed[key].return_T, ippo[key].return_T)


def test_a_truncated_episode_is_bootstrapped_from_the_summed_values() -> None:
    turns = [turn(agent, k, 1) for k, agent in enumerate("abab")]
    groups = [group(episode(*turns, truncated=True))]
    keys = [TurnKey(0, 0, k) for k in range(4)]
    after = {key: torch.tensor(float(k)) for k, key in enumerate(keys)}
    signals = Signals({key: torch.ones(1) for key in keys}, {key: after[key] for key in keys[2:]}, after)
    # 2 + 3 are to come after the second round; a's advantage omits the value of b, who has read a's words.
    given = credit(groups, signals)
    assert given[keys[2]].advantage_T.tolist() == [5.0 - 1.0]
    assert given[keys[3]].advantage_T.tolist() == [5.0 - 2.0]
    # After the first round came ½ · 5; its values there were 0 and 1, and what is missing to 2.5 is asked of both.
    learned = [given[key].after for key in keys]
    assert [None if target is None else float(target) for target in learned] == [1.5, 2.5, None, None]
    assert credit(groups, signals, truncated="terminate")[keys[3]].advantage_T.tolist() == [-2.0]


def test_a_single_round_gives_no_target_after_it() -> None:
    groups = [group(episode(turn("a", 0, 1), turn("b", 1, 1), truncated=True))]
    keys = [TurnKey(0, 0, 0), TurnKey(0, 0, 1)]
    after = {key: torch.tensor(4.0) for key in keys}
    signals = Signals({key: torch.zeros(1) for key in keys}, after, after)
    assert credit(groups, signals)[keys[0]].advantage_T.tolist() == [0.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"team_reward": "individual"}, "team_reward: individual"),
        ({"gae": {"unit": "turn"}}, "gae.unit"),
        ({"gae": {"kl_in_reward": 0.1}}, "gae.kl_in_reward"),
        ({"umad": {"influence": 0.1}}, "umad.influence"),
    ],
)
def test_inconsistent_settings_raise_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        VDNToken.model_validate(settings)
