"""A mistake in an algorithm's own code ends training in one sentence that names the algorithm, and the agent and turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from tests.support.tiny import sections

from kapelle.algorithm import Algorithm, Credit, Loss, Outputs, Targets
from kapelle.algorithms.grpo import GRPO
from kapelle.algorithms.mappo import MAPPO
from kapelle.errors import AlgorithmError, EngineError, KapelleError, NumericsError
from kapelle.rows import Learners, Sampled, Signals, TurnKey
from kapelle.team import Team
from kapelle.training.trainer import Trainer
from kapelle.types import Group

FIRST = TurnKey(0, 0, 0)
AGENT = r"agent 'agent_0' for turn 0 of episode 0 of group 0"

Change = Callable[[Algorithm], Algorithm]


def trained(change: Change, base: type[GRPO | MAPPO] = GRPO, **over: Any) -> Trainer:
    """Take one step with a changed algorithm."""

    class Mine(base):  # type: ignore[misc, valid-type]
        name: Literal["mine"] = "mine"

        def build(self) -> Algorithm:
            return change(replace(base().build(), name="mine"))

    made = Trainer(**sections(algorithm=Mine(), **over))
    with made:
        list(made.steps(1))
    return made


def with_credit(change: Callable[[dict[TurnKey, Credit]], object]) -> Change:
    """Return an algorithm whose credit is changed after it was computed."""

    def changed(algorithm: Algorithm) -> Algorithm:
        given = algorithm.memory or algorithm.credit
        assert given is not None

        def credit(groups: Sequence[Group], signals: Signals) -> Any:
            assert algorithm.credit is not None
            found = dict(algorithm.credit(groups, signals))
            returned = change(found)
            return found if returned is None else returned

        return replace(algorithm, credit=credit, memory=None)

    return changed


def give(**parts: Any) -> Callable[[dict[TurnKey, Credit]], object]:
    """Replace parts of the first turn's credit."""
    return lambda credit: credit.update({FIRST: replace(credit[FIRST], **parts)})


def dropped(credit: dict[TurnKey, Credit]) -> None:
    del credit[FIRST]


def longer(credit: dict[TurnKey, Credit]) -> None:
    credit[FIRST] = replace(credit[FIRST], advantage_T=torch.zeros(len(credit[FIRST].advantage_T) + 1))


def missing(credit: dict[TurnKey, Credit]) -> None:
    raise KeyError(FIRST)


def broken(credit: dict[TurnKey, Credit]) -> None:
    raise ZeroDivisionError("no reward at all")


WRONG_CREDIT: dict[str, tuple[Callable[[dict[TurnKey, Credit]], object], str]] = {
    "a turn left out": (dropped, f"gave no credit to {AGENT}"),
    "all turns left out": (lambda credit: {}, f"gave no credit to {AGENT}"),
    "a turn of no episode": (
        lambda credit: credit.update({TurnKey(0, 9, 0): credit[FIRST]}),
        r"gave credit to TurnKey\(group=0, episode=9, turn=0\), which is not a turn",
    ),
    "a name as a key": (
        lambda credit: credit.update({"agent_0": credit[FIRST]}),  # type: ignore[dict-item]
        r"gave credit to 'agent_0' \(a str\), which is not a turn",
    ),
    "nothing": (lambda credit: 0, "`credit` returned 0. Return a dict"),
    "a list": (lambda credit: list(credit.values()), "`credit` returned a list. Return a dict"),
    "a number for a turn": (
        lambda credit: credit.update({FIRST: 1.0}),  # type: ignore[dict-item]
        rf"gave {AGENT} 1\.0\. Give it a `kapelle.Credit`",
    ),
    "nothing for a turn": (
        lambda credit: credit.update({FIRST: None}),  # type: ignore[dict-item]
        rf"gave {AGENT} None\. Give it a `kapelle.Credit`",
    ),
    "one advantage for the whole turn": (
        give(advantage_T=torch.tensor(1.0)),
        rf"gave {AGENT} a tensor of shape \[\] and type float32 as `advantage_T`.*completion's \d+ tokens",
    ),
    "one token too many": (longer, rf"gave {AGENT} a tensor of shape \[\d\] .* as `advantage_T`"),
    "a column": (give(advantage_T=torch.zeros(4, 1)), r"shape \[4, 1\] and type float32 as `advantage_T`"),
    "whole numbers": (give(advantage_T=torch.zeros(4, dtype=torch.int64)), "type int64 as `advantage_T`"),
    "a list of numbers": (give(advantage_T=[1.0]), r"gave .* \[1\.0\] \(a list\) as `advantage_T`"),
    "no advantage": (give(advantage_T=None), f"gave {AGENT} None as `advantage_T`"),
    "a negative weight": (give(weight=-1.0), rf"gave {AGENT} the weight -1\.0"),
    "a weight that is not a number": (give(weight="all"), rf"gave {AGENT} the weight 'all'"),
    "an endless weight": (give(weight=float("inf")), f"gave {AGENT} the weight inf"),
    "a pair by name": (give(pair="left"), f"gave {AGENT} the pair 'left'"),
    "a look-up that finds nothing": (
        missing,
        rf"`credit` raised KeyError \(test_boundary.py, line \d+\): it has no value for {AGENT}",
    ),
    "an error of its own": (
        broken,
        r"`credit` raised ZeroDivisionError \(test_boundary.py, line \d+\): no reward at all",
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("wrong", WRONG_CREDIT, ids=str)
def test_wrong_credit_is_one_sentence(wrong: str) -> None:
    change, says = WRONG_CREDIT[wrong]
    with pytest.raises(AlgorithmError, match=rf"(?s)^Algorithm 'mine'.*{says}") as caught:
        trained(with_credit(change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_advantage_that_is_not_finite_stops_with_its_turn_or_is_left_out(value: float) -> None:
    def spoilt(credit: dict[TurnKey, Credit]) -> None:
        advantage_T = credit[FIRST].advantage_T
        credit[FIRST] = replace(credit[FIRST], advantage_T=torch.full_like(advantage_T, value))

    with pytest.raises(NumericsError, match=f"'mine' gave {AGENT} a `advantage_T` that is not finite"):
        trained(with_credit(spoilt))
    training = {"steps": 1, "tasks_per_step": 2, "non_finite": "skip"}
    made = trained(with_credit(spoilt), training=training)
    assert made.team.trained == ("agent_0", "agent_1")


def test_returns_are_what_the_critic_values() -> None:
    def cut(credit: dict[TurnKey, Credit]) -> None:
        credit[FIRST] = replace(credit[FIRST], return_T=torch.zeros(9))

    with pytest.raises(AlgorithmError, match=rf"gave {AGENT} a tensor of shape \[9\] .* as `return_T`"):
        trained(with_credit(cut), MAPPO)


def test_turns_that_are_left_out_and_tuples_as_keys_are_fine() -> None:
    def out(credit: dict[TurnKey, Credit]) -> object:
        credit[FIRST] = Credit(torch.zeros(1), weight=0.0)
        return {tuple(key): given for key, given in credit.items()}

    trained(with_credit(out))


# -------- Losses, signals and hooks


def detached(outputs: Outputs, targets: Targets) -> Any:
    return Loss(outputs.logp_K.sum().detach(), targets.mask_K.sum())


def per_token(outputs: Outputs, targets: Targets) -> Any:
    return Loss(outputs.logp_K, targets.mask_K.sum())


def as_a_tensor(outputs: Outputs, targets: Targets) -> Any:
    return outputs.logp_K.sum()


def weight_as_a_number(outputs: Outputs, targets: Targets) -> Any:
    return Loss(outputs.logp_K.sum(), 3)  # type: ignore[arg-type]


def misspelt(outputs: Outputs, targets: Targets) -> Any:
    return Loss(outputs.logp_K.sum() * targets["advantages"].sum(), targets.mask_K.sum())


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (detached, "returned a `total` without a gradient"),
        (per_token, r"returned a `total` that is a tensor of shape \[\d+\]"),
        (as_a_tensor, r"returned a tensor of shape \[\] .*Return `kapelle.algorithm.Loss\(total, weight\)`"),
        (weight_as_a_number, "returned a `weight` that is 3"),
        (misspelt, r"raised KeyError \(test_boundary.py, line \d+\): 'advantages'"),
    ],
)
def test_a_wrong_loss_is_one_sentence(loss: Any, says: str) -> None:
    with pytest.raises(AlgorithmError, match=f"Algorithm 'mine': `policy_loss` {says}"):
        trained(lambda algorithm: replace(algorithm, policy_loss=loss))


def test_a_wrong_annealed_loss_is_one_sentence() -> None:
    with pytest.raises(AlgorithmError, match="Algorithm 'mine': `annealed` returned a `weight` that is 3"):
        trained(lambda algorithm: replace(algorithm, annealed=lambda done: weight_as_a_number))


@dataclass(frozen=True)
class Counting:
    """A signal that returns what it was made with."""

    found: Any

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[Any, Any]]:
        return self.found(step) if callable(self.found) else self.found  # type: ignore[no-any-return]


async def later() -> dict[str, dict[TurnKey, float]]:
    return {}


def misses(step: Sampled) -> Any:
    return {"values": step.nothing}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "`gather` of the signal `Counting` returned None"),
        ({"counts": 3}, r"`gather` of the signal `Counting` returned \{'counts': 3\}"),
        (misses, r"the signal `Counting` raised AttributeError \(test_boundary.py, line \d+\)"),
        (
            lambda step: {"reference": {FIRST: torch.zeros(99)}},
            rf"gave {AGENT} a tensor of shape \[99\] .* as `Signals.reference`",
        ),
        (lambda step: later(), "the signal `Counting` is async"),
        (
            {"step": {}},
            "`gather` of the signal `Counting` returned a result named 'step'. Rename it",
        ),
        (
            {"more": {}},
            "`gather` of the signal `Counting` returned a result named 'more'. Rename it",
        ),
        ({3: {}}, "`gather` of the signal `Counting` returned a result named 3. Rename it"),
    ],
)
def test_a_wrong_signal_is_one_sentence(found: Any, says: str) -> None:
    with pytest.raises(AlgorithmError, match=rf"^Algorithm 'mine'.*{says}"):
        trained(lambda algorithm: replace(algorithm, needs=(Counting(found),)))


class Clumsy:
    """A hook that fails after every update."""

    moves_weights = False

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, step: int, team: Team, engine: Learners) -> None:
        raise self.error


def test_errors_that_are_not_the_algorithms_own_keep_their_class() -> None:
    lost = EngineError("lost a worker")
    with pytest.raises(KapelleError) as caught:
        trained(lambda algorithm: replace(algorithm, after_update=(Clumsy(lost),)))
    assert caught.value is lost
