"""The chain through all agents by hand, over turns and tokens, and the placement of rewards in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError
from tests.support.episodes import episode, group, turn

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.marft import MARFT
from kapelle.algorithms.shared.rewards import TeamReward, chain_rewards
from kapelle.rows import Signals, TurnKey

PLAIN = {"gamma_turn": 0.5, "lam": 0.5, "normalise": "none"}
A0, B1, A2 = (TurnKey(0, 0, k) for k in range(3))


def marft(level: str, **gae: object) -> Algorithm:
    return MARFT.model_validate({"level": level, "gae": {**PLAIN, **gae}}).build()


def credit(algorithm: Algorithm, signals: Signals, **fields: Any) -> Mapping[TurnKey, Credit]:
    assert algorithm.credit is not None
    one = episode(turn("a", 0, 2), turn("b", 1, 2), turn("a", 2, 1), rewards={"a": 4.0, "b": 4.0}, **fields)
    return algorithm.credit([group(one)], signals)


class TestActions:
    """a, b, a; one value before each turn: 1, 3, 2. The team earns 4, once, at the end."""

    VALUES: ClassVar = {A0: torch.tensor([1.0]), B1: torch.tensor([3.0]), A2: torch.tensor([2.0])}

    def test_a_turn_is_backed_up_from_the_next_agents_observation(self) -> None:
        # δ = ½·3 − 1, ½·2 − 3, 4 − 2 = ½, −2, 2; γλ = ¼: A = 2, −2 + ½, ½ − ¼·1.5
        given = credit(marft("action"), Signals(self.VALUES))
        assert given[A2].advantage_T.tolist() == pytest.approx([2.0])
        assert given[B1].advantage_T.tolist() == pytest.approx([-1.5, -1.5])
        assert given[A0].advantage_T.tolist() == pytest.approx([0.125, 0.125])
        targets = [given[key].return_T for key in (A0, B1, A2)]
        assert [t.tolist() for t in targets if t is not None] == [[1.125], [1.5], [4.0]]

    def test_advantages_are_no_integers(self) -> None:
        assert {c.advantage_T.dtype for c in credit(marft("action"), Signals(self.VALUES)).values()} == {
            torch.float32
        }

    def test_cut_short_the_chain_is_bootstrapped(self) -> None:
        signals = Signals(self.VALUES, bootstrap={A2: torch.tensor(6.0), B1: torch.tensor(100.0)})
        given = credit(marft("action"), signals, truncated=True)
        assert given[A2].advantage_T.tolist() == pytest.approx([2.0 + 6.0])


class TestTokens:
    VALUES: ClassVar = {A0: torch.tensor([1.0, 2.0]), B1: torch.tensor([3.0, 1.0]), A2: torch.tensor([2.0])}

    def test_gamma_crosses_turns_only(self) -> None:
        # δ: 2 − 1, ½·3 − 2, 1 − 3, ½·2 − 1, 4 − 2 = 1, −½, −2, 0, 2; λ = ½, γ = 1 inside a turn and ½ across.
        # A: 1 + ½(−¾ …): from the end 2; 0 + ¼·2 = ½; −2 + ½·½ = −1.75; −½ − ¼·1.75 = −0.9375; 1 − ½·0.9375
        given = credit(marft("token"), Signals(self.VALUES))
        assert given[A2].advantage_T.tolist() == pytest.approx([2.0])
        assert given[B1].advantage_T.tolist() == pytest.approx([-1.75, 0.5])
        assert given[A0].advantage_T.tolist() == pytest.approx([0.53125, -0.9375])


class TestSettings:
    def test_the_level_is_set_once(self) -> None:
        with pytest.raises(ValidationError, match=r"loss\.level"):
            MARFT.model_validate({"loss": {"level": "sequence"}})
        with pytest.raises(ValidationError, match=r"gae\.unit"):
            MARFT.model_validate({"gae": {"unit": "turn"}})

    def test_an_action_is_not_counted_by_its_tokens(self) -> None:
        with pytest.raises(ValidationError, match=r"loss\.aggregation"):
            MARFT.model_validate({"loss": {"aggregation": "token_mean"}})
        by_tokens = MARFT.model_validate({"level": "token", "loss": {"aggregation": "token_mean"}})
        assert by_tokens.loss.aggregation == "token_mean"

    def test_resolved_settings_are_read_again(self) -> None:
        settings = MARFT.model_validate({"level": "action"})
        assert MARFT.model_validate(settings.model_dump()) == settings


class TestChainRewards:
    """a0 b1 a2 b3, paid 1 and 2 after the first turns and 5, 7 at the end."""

    @pytest.mark.parametrize(
        ("how", "expected"),
        [
            ("sum", [1.0, 2.0, 0.0, 12.0]),
            ("mean", [0.5, 1.0, 0.0, 6.0]),
            ("max", [1.0, 2.0, 0.0, 7.0]),
            ("individual", [1.0, 2.0, 5.0, 7.0]),
            ("last", [0.0, 2.0, 0.0, 7.0]),
        ],
    )
    def test_the_team_s_reward_counts_once(self, how: TeamReward, expected: list[float]) -> None:
        turns = (turn("a", 0, reward=1.0), turn("b", 1, reward=2.0), turn("a", 2), turn("b", 3))
        one = episode(*turns, rewards={"a": 5.0, "b": 7.0})
        assert list(chain_rewards(one, how).values()) == expected

    def test_a_frozen_turn_s_reward_moves_to_the_previous_trained_turn(self) -> None:
        turns = (turn("f", 0, reward=9.0, trained=False), turn("a", 1), turn("f", 2, trained=False))
        one = episode(*turns, rewards={"a": 4.0, "f": 3.0})
        # No one who learns had a part in the 9 at the start.
        assert chain_rewards(one, "individual") == {1: 7.0}
