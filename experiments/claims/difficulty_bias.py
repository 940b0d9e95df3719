"""GRPO's division by a group's spread, which Dr.GRPO omits."""

from __future__ import annotations

from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import Arm, TableRun, anatomy, recipe_of

GAME = {"name": "unequal", "seats": 1, "letters": 16, "right_letters": (1, 8, 15)}


def measure(arm: tuple[str, int], seed: int, rate: float) -> Result:
    """Measure how many times the exact gradient of each task the expected update is; 32 attempts at each task in a step."""
    scale, size = arm
    algorithm = {"name": "grpo", "group_size": size, "scale": scale}
    training = {"tasks_per_step": 3 * 32 // size}
    run = TableRun(recipe_of(GAME, Arm(algorithm), rate, seed, training=training))
    found = anatomy(run, 48)
    hard, even, easy = found.multiples("agent_0", [run.row(f"1/1 {case}") for case in range(3)])
    return Result({"excess": (hard + easy) / (2 * even), "hard": hard / even, "easy": easy / even})


def excess(arm: str, measure: str, tasks: str, by: float) -> Prediction:
    """Return the prediction that tasks weigh by so much more than one that is solved every other time."""
    return Prediction(
        f"`{arm}`: a task that is solved {tasks} weighs {by:g} times one that is solved every other time",
        lambda found: found[arm][measure],
        at_least=by,
        turned=1.0,
    )


def even(arm: str) -> Prediction:
    """Return the prediction that all tasks weigh alike."""

    def off(found: Found) -> float:
        return found[arm]["excess"]

    return Prediction(f"`{arm}`: both weigh at most 1.25 times as much", off, at_most=1.25)


CLAIM = Claim(
    name="difficulty_bias",
    algorithms=("grpo",),
    claim="Division by a group's standard deviation gives very easy and very hard tasks more weight, and the effect grows with the group's size",
    source="Understanding R1-Zero-Like Training (Dr.GRPO), 2503.20783, §3.1",
    setting=(
        "One agent, three tasks of 16 letters of which 1, 8 and 15 are correct. For each task, the expected first "
        "update is divided by its exact gradient and compared with that of the task that is solved half of the "
        "time; 1536 episodes per task. In theory, a task that is solved with probability p has the weight E[√(k(G "
        "− k)(G − 1)/G)]/(G·p(1 − p)), k ~ Binomial(G, p): 1.06, 1.63 and 1.87 times for G = 4, 16 and 32."
    ),
    arms={
        **{f"std @ {size}": ("std", size) for size in (4, 16, 32)},
        **{f"none @ {size}": ("none", size) for size in (4, 32)},
    },
    measure=measure,
    quick=2,
    predictions=(
        excess("std @ 32", "hard", "once in 16 times", 1.4),
        excess("std @ 32", "easy", "15 times in 16", 1.4),
        excess("std @ 16", "excess", "once or 15 times in 16", 1.35),
        even("std @ 4"),
        even("none @ 4"),
        even("none @ 32"),
    ),
    plot="lines",
    plotted=("excess", "episodes per task", "weight of hard and easy tasks"),
)
