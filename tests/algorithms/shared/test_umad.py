"""UMAD's confidence factors and influence reward, by hand and through each algorithm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError
from tests.support.episodes import episode, group, turn
from tests.support.tiny import team_of

from kapelle.algorithm import Credit
from kapelle.algorithms.marft import MARFT
from kapelle.algorithms.ppo import IPPO
from kapelle.algorithms.shared.umad import UMADConfig, influence
from kapelle.errors import ConfigError
from kapelle.rows import Signals, TurnKey
from kapelle.types import Episode, Turn

PLACE = (0, 0)


def debate(*rounds: tuple[float, ...], **fields: Any) -> Episode:
    """A debate in which agents a, b, c … score these numbers in each round."""
    names = "abcdef"
    turns: list[Turn] = []
    for scores in rounds:
        for name, score in zip(names, scores, strict=False):
            turns.append(turn(name, len(turns), 1, score=score))
    return episode(*turns, **fields)


class TestInfluence:
    def test_by_hand(self) -> None:
        # From round 1 to 2: a stays wrong, b becomes right, c stays right. The others of a: mean (+1 + 0)/2 > 0;
        # of b: 0; of c: (0 + 1)/2 > 0. No one answers round 2.
        found = influence(PLACE, debate((0, 0, 1), (0, 1, 1)), Signals(), 0.3)
        assert found == {0: pytest.approx(0.3), 1: 0.0, 2: pytest.approx(0.3)}

    def test_without_scores_the_environment_s_rewards_are_taken(self) -> None:
        # b is paid 1 between its turns and −2 at the end, −2 < 1; a is paid 3 at the end only.
        played = episode(
            turn("a", 0),
            turn("b", 1, reward=1.0),
            turn("a", 2),
            turn("b", 3),
            rewards={"a": 3.0, "b": -2.0},
        )
        assert influence(PLACE, played, Signals(), 1.0) == {0: -1.0, 1: 1.0}

    def test_a_verifier_comes_before_the_environment_s_rewards(self) -> None:
        played = episode(turn("a", 0), turn("b", 1), turn("a", 2), turn("b", 3), rewards={"b": 5.0})
        seen = {TurnKey(0, 0, 1): 0.9, TurnKey(0, 0, 3): 0.2}
        assert influence(PLACE, played, Signals(score=seen), 1.0)[0] == -1.0

    def test_an_agent_s_last_turn_influences_the_others_too(self) -> None:
        played = episode(
            turn("a", 0, score=1.0), turn("b", 1, score=0.0), turn("b", 2, score=1.0), agents=("a", "b")
        )
        assert influence(PLACE, played, Signals(), 1.0) == {0: 1.0}

    def test_influence_is_added_to_rewards_and_computed_without_them(self) -> None:
        # Every turn is paid 10: influence looks at the scores, not at what it pays.
        played = debate((0, 0), (0, 1))
        tens = {TurnKey(0, 0, index): 10.0 for index in (0, 1, 3)}
        paid = UMADConfig(influence=0.5).with_influence(tens, [group(played)], Signals())
        assert paid == {TurnKey(0, 0, 0): 10.5, TurnKey(0, 0, 1): 10.0, TurnKey(0, 0, 3): 10.0}


def credited(*advantages: float) -> dict[TurnKey, Credit]:
    return {
        TurnKey(0, e, 0): Credit(torch.tensor([value, value]), torch.tensor([7.0]), 0.5)
        for e, value in enumerate(advantages)
    }


class TestConfidence:
    # Mean NLL 1 and 3 nats, of four tokens and of one: z = ∓1/√2 (ddof 1), whatever the scale.
    GROUPS = (
        group(
            episode(turn("a", 0, 4, logprobs=(-0.5, -1.5) * 2)),
            episode(turn("a", 0, 1, logprobs=(-3.0,))),
        ),
    )

    def test_by_hand(self) -> None:
        given = UMADConfig(confidence=0.4).gain(self.GROUPS, credited(2.0, -2.0))
        gain = math.exp(0.4 * math.sqrt(0.5))
        assert given[TurnKey(0, 0, 0)].advantage_T.tolist() == pytest.approx([2 * gain] * 2)
        assert given[TurnKey(0, 1, 0)].advantage_T.tolist() == pytest.approx([-2 / gain] * 2)

    def test_targets_and_weights_stay(self) -> None:
        given = UMADConfig(confidence=0.4).gain(self.GROUPS, credited(2.0, -2.0))
        first = given[TurnKey(0, 0, 0)]
        assert first.return_T is not None
        assert first.return_T.tolist() == [7.0]
        assert first.weight == 0.5

    def test_turns_are_compared_with_the_same_agent_s_same_turn_only(self) -> None:
        # Each set has one turn: nothing to compare with, so the advantage stays.
        one = [
            group(
                episode(
                    turn("a", 0, 1, logprobs=(-1.0,)),
                    turn("b", 1, 1, logprobs=(-9.0,)),
                    turn("a", 2, 1, logprobs=(-4.0,)),
                )
            )
        ]
        credit = {TurnKey(0, 0, k): Credit(torch.tensor([3.0])) for k in range(3)}
        given = UMADConfig(confidence=5.0).gain(one, credit)
        assert [given[key].advantage_T.item() for key in credit] == [3.0, 3.0, 3.0]

    def test_relative_by_hand(self) -> None:
        # NLL 1, 2, 6 in one round; a against (2 + 6)/2 = 4, b against 3.5, c against 1.5.
        played = episode(
            *(turn(n, k, 1, logprobs=(-x,)) for k, (n, x) in enumerate(zip("abc", (1, 2, 6), strict=True)))
        )
        credit = {TurnKey(0, 0, k): Credit(torch.tensor([1.0])) for k in range(3)}
        given = UMADConfig(relative=0.1).gain([group(played)], credit)
        found = [given[key].advantage_T.item() for key in credit]
        assert found == pytest.approx([math.exp(0.3), math.exp(0.15), math.exp(-0.45)])

    def test_both_gains_multiply(self) -> None:
        groups = [
            group(
                episode(turn("a", 0, 1, logprobs=(-1.0,)), turn("b", 1, 1, logprobs=(-2.0,))),
                episode(turn("a", 0, 1, logprobs=(-3.0,)), turn("b", 1, 1, logprobs=(-2.0,))),
            )
        ]
        credit = {TurnKey(0, e, k): Credit(torch.tensor([1.0])) for e in (0, 1) for k in (0, 1)}
        given = UMADConfig(confidence=1.0, relative=1.0).gain(groups, credit)
        assert given[TurnKey(0, 0, 0)].advantage_T.item() == pytest.approx(math.exp(math.sqrt(0.5) + 1))
        # b has no spread of its own: only the relative gain.
        assert given[TurnKey(0, 0, 1)].advantage_T.item() == pytest.approx(math.exp(-1))


@pytest.mark.parametrize("key", ["relative", "influence"])
def test_a_team_of_one_raises_an_error(key: str) -> None:
    with pytest.raises(ConfigError, match=f"umad.{key}"):
        UMADConfig.model_validate({key: 0.1}).check(team_of("a"))
    UMADConfig.model_validate({key: 0.1}).check(team_of("a", "b"))


class TestActorCritics:
    """That IPPO and MARFT pay influence and gain confidence."""

    GROUPS = (
        group(
            episode(
                turn("a", 0, 1, score=0.0),
                turn("b", 1, 1, score=0.0, logprobs=(-3.0,)),
                turn("a", 2, 1, score=0.0),
                turn("b", 3, 1, score=1.0),
                rewards={"a": 0.0, "b": 1.0},
            )
        ),
    )
    VALUES: ClassVar = {TurnKey(0, 0, k): torch.zeros(1) for k in range(4)}
    PLAIN: ClassVar = {"gae": {"gamma_turn": 0.0, "normalise": "none"}, "team_reward": "individual"}

    @pytest.mark.parametrize("settings", [IPPO, MARFT])
    def test_influence_is_placed_on_the_turn_that_was_read(self, settings: type[IPPO | MARFT]) -> None:
        # γ = 0: an advantage is what its turn is paid.
        chosen = settings.model_validate({**self.PLAIN, "umad": {"influence": 0.25}})
        given = self.credit(chosen)
        assert [float(given[TurnKey(0, 0, k)].advantage_T) for k in range(4)] == [0.25, 0.0, 0.0, 1.0]

    @pytest.mark.parametrize("settings", [IPPO, MARFT])
    def test_confident_turns_gain(self, settings: type[IPPO | MARFT]) -> None:
        chosen = settings.model_validate({**self.PLAIN, "umad": {"influence": 0.25, "relative": 0.5}})
        given = self.credit(chosen)
        # Round 1: a at 1 nat, b at 3; round 2 both at 1.
        assert float(given[TurnKey(0, 0, 0)].advantage_T) == pytest.approx(0.25 * math.e)
        assert float(given[TurnKey(0, 0, 3)].advantage_T) == pytest.approx(1.0)
        target = given[TurnKey(0, 0, 0)].return_T
        assert target is not None
        assert float(target) == pytest.approx(0.25), "what a critic learns is no matter of confidence"

    def credit(self, settings: IPPO | MARFT) -> Mapping[TurnKey, Credit]:
        algorithm = settings.build()
        assert algorithm.credit is not None
        return algorithm.credit(self.GROUPS, Signals(self.VALUES))

    def test_confidence_without_a_group_raises_an_error(self) -> None:
        with pytest.raises(ValidationError, match=r"umad.confidence.*group_size: 1"):
            IPPO.model_validate({"umad": {"confidence": 0.1}})
        IPPO.model_validate({"umad": {"confidence": 0.1}, "group_size": 2})
