"""V-trace's targets beside truncated importance weights, and without either, with samples of weights up to 16 steps old."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import FAR, Arm, TableRun, recipe_of, relay_start
from kapelle.algorithms.signals.critic_values import CriticValues
from kapelle.environments.diagnostics import Diagnostic
from kapelle.rows import Sampled
from kapelle.types import Group

GAME = {"name": "relay", "seats": 3}
START = relay_start((0.25, 0.4, 0.4))
STEPS = 100
BEST = 1.0


def value_error(run: TableRun, groups: Sequence[Group]) -> float:
    """Return the mean square error of the critic's values of the states of some episodes, against the present team's exact ones."""
    [values] = [signal for signal in run.algorithm.needs if isinstance(signal, CriticValues)]
    sampled = Sampled(run.number, groups, run.team, lambda: ())
    found = values.gather(sampled, run.engine)["values"]
    game = cast("Diagnostic", run.environment)

    @functools.cache
    def exact(said: str) -> float:
        def say(seat: int, seen: str) -> Mapping[str, float]:
            return {said[seat]: 1.0} if seat < len(said) else run.say(seat, seen)

        return sum(game.expected(say))

    errors = []
    for key, value in found.items():
        turns = groups[key.group].episodes[key.episode].turns[: key.turn]
        errors.append((float(value) - exact("".join(turn.text for turn in turns))) ** 2)
    return sum(errors) / len(errors)


def measure(arm: tuple[str, int], seed: int, rate: float) -> Result:
    """Let a chain learn from samples so many steps old; say by how much it falls short of the best, and its critic's values of the truth."""
    way, age = arm
    over = {"max_staleness": age}
    recipe = recipe_of(GAME, Arm(WAYS[way]), rate, seed, training=over, optimizer={"critic_lr": 0.5 * FAR})
    run = TableRun(recipe, START)
    regrets, errors = [], []
    for _ in range(STEPS):
        groups, _ = run.step()
        errors.append(value_error(run, groups))
        regrets.append(BEST - run.value)
    regret = sum(regrets) / STEPS
    return Result({"area": BEST - regret, "regret": regret, "error": math.sqrt(sum(errors) / STEPS)})


COMMON: dict[str, Any] = {"name": "marft", "group_size": 16, "epochs": 1, "team_reward": "sum"}
GAE = {"normalise": "none", "lam": 1.0}
CAPPED = {"importance_cap": 2.0}
WAYS: dict[str, dict[str, Any]] = {
    "V-trace and TIS": {**COMMON, "gae": {**GAE, "vtrace": True}, "loss": CAPPED},
    "TIS": {**COMMON, "gae": GAE, "loss": CAPPED},
    "no correction": {**COMMON, "gae": GAE, "name": "experiments.ablations:UncorrectedChain"},
}


def times(measure: str, one: str, other: str, at_least: float) -> Prediction:
    """Return the prediction that an arm's measure is so many times another's; contradicted if it is smaller."""

    def ratio(found: Found) -> float:
        return found[one][measure] / found[other][measure]

    text = f"{SAYS[measure]}, `{one}` over `{other}`"
    return Prediction(text, ratio, at_least=at_least, turned=1.0)


SAYS = {"regret": "Regret", "error": "Error of the critic's values"}
CLAIM = Claim(
    name="vtrace",
    algorithms=("marft", "ppo"),
    claim="With stale samples, V-trace targets keep a critic's values closer to those of the current team",
    source="IMPALA, 1802.01561, §4.1 and §5.2.1",
    setting=(
        "Three agents act one after another: each must choose the letter that follows the previous agent's "
        "letter. At first the first agent is correct with probability 0.25 and the others with 0.4. MARFT with λ "
        "= 1, 16 episodes per step, 100 steps, sampled with the weights of 0, 1, 4 or 16 steps before, with one "
        "learning rate for all arms. The error is the root mean square, over steps and visited states, of the "
        "critic's value minus the exact value of the current team. Regret is the average over the steps of the "
        "difference between 1 and the team's return."
    ),
    arms={f"{way} @ {age}": (way, age) for way in WAYS for age in (0, 1, 4, 16)},
    measure=measure,
    rates=(8.0,),
    predictions=(
        times("error", "TIS @ 16", "V-trace and TIS @ 16", 1.2),
        times("error", "no correction @ 16", "V-trace and TIS @ 16", 1.2),
        times("error", "TIS @ 4", "V-trace and TIS @ 4", 1.05),
        Prediction(
            "Error of the critic's values on fresh samples, `V-trace and TIS` over `TIS`, which are equal there",
            lambda found: found["V-trace and TIS @ 0"]["error"] / found["TIS @ 0"]["error"],
            at_most=1.001,
        ),
        times("regret", "TIS @ 16", "V-trace and TIS @ 16", 1.1),
    ),
    plot="lines",
    plotted=("error", "age of the samples, steps", "error of the critic's values"),
    remark=(
        "V-trace's fixed point is the value of a policy between the sampling policy and the current policy, "
        "because its weights are truncated at 1: it removes a fifth to a quarter of the error and not all of it. "
        "The regret of the policies falls by a sixteenth, and without any correction of the policies it is even "
        "lower here: in a game in which every agent only improves, old samples are not misleading, and an update "
        "without correction is simply larger. If a policy must converge to a mixture that can be overshot, "
        "correction of the policies helps ([staleness](#staleness))."
    ),
)
