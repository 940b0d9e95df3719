"""Identities between algorithms, as their pages state them, on any returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.episodes import episode, group, turn

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.dr_mas import DrMAS
from kapelle.algorithms.grpo import GRPO
from kapelle.algorithms.magrpo import MAGRPO
from kapelle.algorithms.marft import MARFT
from kapelle.algorithms.opo import OPO
from kapelle.algorithms.ppo import IPPO
from kapelle.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from kapelle.algorithms.remax import ReMax
from kapelle.algorithms.rloo import RLOO
from kapelle.rows import Signals, TurnKey
from kapelle.types import Episode, Group

FEW = settings(max_examples=25, deadline=None)
PRIZES = st.integers(-8, 8).map(lambda n: n / 4)
RETURNS = st.lists(PRIZES, min_size=2, max_size=6)


def advantages(
    algorithm: Algorithm, groups: Sequence[Group], signals: Signals | None = None
) -> dict[TurnKey, list[float]]:
    assert algorithm.credit is not None
    given: Mapping[TurnKey, Credit] = algorithm.credit(groups, signals or Signals())
    return {key: one.advantage_T.tolist() for key, one in given.items()}


def near(expected: Mapping[TurnKey, list[float]], times: float = 1.0) -> dict[TurnKey, object]:
    return {key: pytest.approx([times * x for x in row], abs=1e-5) for key, row in expected.items()}


def duets(returns: Sequence[float], shift: float = 0.0) -> list[Group]:
    """One task; in each episode two agents speak once, two tokens and one, and the second is scored."""
    return [group(*(episode(turn("a", 0), turn("b", 1, 1), rewards={"b": r + shift}) for r in returns))]


@FEW
@given(RETURNS)
def test_one_turn_an_agent_dr_mas_is_grpo(returns: list[float]) -> None:
    assert advantages(DrMAS().build(), duets(returns)) == advantages(GRPO().build(), duets(returns))


@FEW
@given(RETURNS, st.sampled_from(["std", "none"]))
def test_one_round_magrpo_is_grpo_on_the_team_s_mean(returns: list[float], scale: str) -> None:
    joint = MAGRPO.model_validate({"scale": scale}).build()
    assert advantages(joint, duets(returns)) == near(
        advantages(GRPO.model_validate({"scale": scale}).build(), duets(returns))
    )


@FEW
@given(RETURNS)
def test_rloo_is_centred_grpo_times_a_constant(returns: list[float]) -> None:
    centred = advantages(GRPO(scale="none").build(), duets(returns))
    times = len(returns) / (len(returns) - 1)
    assert advantages(RLOO().build(), duets(returns)) == near(centred, times)


@FEW
@given(RETURNS)
def test_with_equal_lengths_opo_is_centred_grpo(returns: list[float]) -> None:
    assert advantages(OPO().build(), duets(returns)) == near(
        advantages(GRPO(scale="none").build(), duets(returns))
    )


@FEW
@given(RETURNS)
def test_one_agent_compared_with_itself_or_by_episodes(returns: list[float]) -> None:
    groups = [group(*(episode(turn("a", 0), turn("a", 1), rewards={"a": r}) for r in returns))]
    assert advantages(GRPO(compare="agent").build(), groups) == advantages(
        GRPO(compare="episode").build(), groups
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("algorithm", [GRPO(), RLOO(), OPO(), DrMAS(), MAGRPO(), ReinforcePlusPlus()])
@FEW
@given(RETURNS, PRIZES)
def test_a_shift_of_all_rewards_changes_nothing(
    algorithm: GRPO | RLOO | OPO | DrMAS | MAGRPO | ReinforcePlusPlus, returns: list[float], shift: float
) -> None:
    built = algorithm.build()
    assert advantages(built, duets(returns, shift)) == near(advantages(built, duets(returns)))


@FEW
@given(RETURNS, PRIZES, PRIZES)
def test_a_shift_takes_the_greedy_return_with_it(returns: list[float], greedy: float, shift: float) -> None:
    remax = ReMax().build()
    before, after = (
        advantages(remax, duets(returns, s), Signals(greedy={0: duets([greedy], s)[0].episodes[0]}))
        for s in (0.0, shift)
    )
    assert after == near(before)


@FEW
@given(st.lists(PRIZES, min_size=9, max_size=9), PRIZES, st.sampled_from([0.0, 0.5, 1.0]))
def test_one_agent_s_chain_of_tokens_is_its_own_path(values: list[float], prize: float, lam: float) -> None:
    one: Episode = episode(turn("a", 0, 3), turn("a", 1, 2), turn("a", 2, 4), rewards={"a": prize})
    pieces = torch.tensor(values).split([3, 2, 4])
    signals = Signals({TurnKey(0, 0, k): piece for k, piece in enumerate(pieces)})
    gae = {"gamma_turn": 0.5, "lam": lam, "normalise": "none"}
    chain = MARFT.model_validate({"level": "token", "gae": gae}).build()
    own = IPPO.model_validate({"gae": gae}).build()
    assert advantages(chain, [group(one)], signals) == advantages(own, [group(one)], signals)
