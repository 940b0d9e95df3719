"""C3's tree in chains of two and four: against the same attempts without a tree, and against a tree without siblings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.ablations import TreeAgainstAll
from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import Arm, TableRun, learn, recipe_of, relay_start

WIDTHS = {2: [4, 2], 4: [2, 2, 2, 1]}
TOKENS = {2: 1200, 4: 3000}
TREE = {"whole group": TreeAgainstAll.model_fields["name"].default, "c3": "c3", "replay off": "c3"}


def measure(arm: tuple[int, Mapping[str, Any]], seed: int, rate: float) -> Result:
    """Let a chain learn."""
    agents, algorithm = arm
    game = {"name": "relay", "seats": agents, "noise": 0.05}
    recipe = recipe_of(game, Arm(algorithm), rate, seed, training={"tasks_per_step": 4})
    curve = learn(TableRun(recipe, relay_start([0.5] * agents)), TOKENS[agents], every=2)
    return Result({"area": curve.area(TOKENS[agents]), "lost": 1.0 - curve.area(TOKENS[agents])})


def arms() -> dict[str, tuple[int, dict[str, Any]]]:
    """Return every contender by the number of agents."""
    return {
        f"{label} @ {agents}": (
            agents,
            {"name": name, "widths": widths, "team_reward": "sum", "replay": label != "replay off"},
        )
        for agents, widths in WIDTHS.items()
        for label, name in TREE.items()
    }


def share(agents: int, other: str, at_most: float, why: str = "") -> Prediction:
    """Predict what share of another's loss C3 has."""

    def of(found: Found) -> float:
        return found[f"c3 @ {agents}"]["lost"] / found[f"{other} @ {agents}"]["lost"]

    return Prediction(
        f"{agents} agents: `c3` loses {at_most:g} times as much as `{other}`, or less{why}",
        of,
        at_most=at_most,
        turned=1.0,
    )


CLAIM = Claim(
    name="c3_chains",
    algorithms=("c3",),
    claim="In a chain, a tree that trains every turn needs fewer tokens than complete episodes",
    source="C3, 2603.06859, and its ablation without replay",
    setting="Chains of two and four agents: each must say the letter that follows the one before, of four letters, and does so with a chance of a half at first. Each seat's payment, also that of seats which earn nothing, is inverted with a chance of "
    "0.05. Four groups of eight attempts a step: as trees (`c3`), as trees whose turns are compared with the rest of their group in place of their siblings (`whole group`), and one by one (`replay off`). Lost is the mean "
    "distance from the optimum over the sampled tokens.",
    arms=arms(),
    measure=measure,
    rates=(3.0, 10.0, 30.0),
    predictions=(
        share(2, "replay off", 0.85, " (predicted 0.75: 12 turns in place of 16)"),
        share(4, "replay off", 0.85, " (predicted 0.69: 22 turns in place of 32)"),
        share(4, "whole group", 1.0),
    ),
    seeds=24,
    plot="lines",
    plotted=("lost", "agents", "lost on the way"),
    remark="The tree gains what its cheaper steps promise, but not by its siblings: compared with the rest of the group, the same tree loses as much or less. A sibling reads the same prompt, so that its worth is a right baseline for each state; but with two or three of "
    "them it is a noisy one, and the luck of earlier turns that a whole group shares matters little beside that. Without noise in what is paid, the first success teaches tables all there is, at any credit: there a step of twelve attempts costs 16 tokens in place of 24, and 0.67 times as much was lost.",
)
