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
    claim="In a chain, a tree in which every turn is trained needs fewer tokens than complete episodes",
    source="C3, 2603.06859, and its ablation without replay",
    setting=(
        "The game is a chain of two or four agents: each agent must choose, from four letters, the letter that "
        "follows the previous agent's letter, and at first it does so with probability one half. Each agent's "
        "reward, including a reward of 0, is inverted with probability 0.05. A step has four groups of eight "
        "episodes: as trees (`c3`), as trees whose turns are compared with the rest of their group and not with "
        "their siblings (`whole group`), and as separate episodes (`replay off`). `lost` is the mean distance "
        "from the optimum over the sampled tokens."
    ),
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
    remark=(
        "The tree is better by about as much as its cheaper steps suggest, but the siblings do not contribute: "
        "with comparison to the rest of the group, the same tree loses as much or less. Siblings read the same "
        "prompt, so their mean return is a correct baseline for each state, but with two or three siblings this "
        "baseline is noisy. In comparison, the variance of earlier turns that a whole group adds is small. "
        "Without noise in the rewards, the first success is enough for the tables to learn, with any form of "
        "credit: there a step of twelve episodes costs 16 tokens in place of 24, and the loss was 0.67 times as "
        "large."
    ),
)
