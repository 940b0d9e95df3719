"""How the noise of an agent's update grows with its team, by credit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import FAR, Arm, TableRun, exact_gradient, moves, recipe_of

GROUP = 8
UNSCALED = {"group_size": GROUP, "epochs": 1, "gae": {"normalise": "none", "lam": 1.0}}
FIT = {"updates": 20, "lr": 0.01}


@dataclass(frozen=True)
class Contender:
    """An algorithm in a team of a size."""

    algorithm: dict[str, Any]
    agents: int
    warm: int = 0
    """Steps in which critics or mixers learn before anything is measured."""
    critic: dict[str, Any] = field(default_factory=dict)
    additive: bool = False


def measure(contender: Contender, seed: int, rate: float) -> Result:
    """Take the same first step again and again; say how much an agent's update varies around its mean."""
    arm = Arm(contender.algorithm, {"optimizer": contender.critic})
    game = {"name": "sum_game", "seats": contender.agents}
    run = TableRun(recipe_of(game, arm, rate, seed), additive=contender.additive)
    exact = exact_gradient(run)
    repeats = max(8, 64 // contender.agents)
    steps = list(moves(run, contender.warm + repeats))
    along = size = noise = 0.0
    for name, gradient in exact.items():
        moved = torch.stack([step[name] for step, _ in steps[contender.warm :]]).detach()
        along += float((moved.mean(0) * gradient).sum())
        size += float(gradient.square().sum())
        noise += float(moved.var(0).sum())
    # The update is a multiple of ∇J, which differs between algorithms (the mean of a group takes its own eighth).
    multiple = along / size
    samples = steps[-1][1] / contender.agents
    return Result(
        {
            "noise": noise / (multiple**2 * size) * samples,
            "warming": float(sum(tokens for _, tokens in steps[: contender.warm])),
        }
    )


def growth(name: str, most: int = 16) -> Any:
    """Return by what the noise of `most` agents is greater than that of 2."""

    def of(found: Found) -> float:
        return found[f"{name} @ {most}"]["noise"] / found[f"{name} @ 2"]["noise"]

    return of


def contenders(agents: int) -> dict[str, Contender]:
    """Return those of a size."""
    slow = {"critic_lr": FAR / agents}
    found = {
        "grpo": Contender({"name": "grpo", "scale": "none", "group_size": GROUP}, agents),
        "mappo": Contender({"name": "mappo", **UNSCALED}, agents, 12, {"critic_lr": 0.05 * agents * FAR}),
        "counterfactual": Contender({"name": "counterfactual", "group_size": GROUP}, agents),
        "ccpo": Contender({"name": "ccpo", "group_size": GROUP}, agents),
        "vdn": Contender({"name": "vdn", "group_size": GROUP, "fit": FIT}, agents, 48),
        "qmix": Contender({"name": "qmix", "group_size": GROUP, "fit": FIT}, agents, 48),
    }
    coma = {"name": "coma", "group_size": GROUP, "normalise": "none"}
    if agents <= 8:
        found["coma"] = Contender(coma, agents, 24, slow, additive=True)
    if agents <= 4:
        found["coma, nothing shared"] = Contender(coma, agents, 24, {"critic_lr": FAR})
    return {f"{name} @ {agents}": one for name, one in found.items()}


CLAIM = Claim(
    name="variance_and_team_size",
    algorithms=("grpo", "mappo", "coma", "counterfactual", "ccpo", "vdn", "qmix"),
    claim="With a team reward, the variance of an agent's gradient grows with every partner; with credit for the agent's own part, it hardly grows",
    source="Kuba et al. 2021, 2108.08612; COMA, 1705.08926; VDN, 1706.05296",
    setting=(
        "2 to 16 agents simultaneously choose one of four letters each; the reward is the share of correct "
        "letters. The measure is the variance of an agent's update divided by its squared mean, for one sampled "
        "letter of each agent (groups of 8; continuations count). Critics learn for 12 or 24 steps beforehand, "
        "mixers for 48, on fixed policies."
    ),
    arms={name: one for agents in (2, 4, 8, 16) for name, one in contenders(agents).items()},
    measure=measure,
    predictions=(
        Prediction(
            "noise of `grpo` with 16 agents, divided by that with 2 agents", growth("grpo"), at_least=6.0
        ).about("grpo"),
        Prediction(
            "noise of `mappo` with 16 agents, divided by that with 2 agents", growth("mappo"), at_least=6.0
        ).about("mappo"),
        Prediction(
            "noise of `counterfactual` with 16 agents, divided by that with 2 agents",
            growth("counterfactual"),
            at_most=2.0,
        ).about("counterfactual"),
        Prediction(
            "noise of `ccpo` with 16 agents, divided by that with 2 agents", growth("ccpo"), at_most=2.0
        ).about("ccpo"),
        Prediction(
            "noise of `vdn` with 16 agents, divided by that with 2 agents", growth("vdn"), at_most=2.0
        ).about("vdn"),
        Prediction(
            "noise of `qmix` with 16 agents, divided by that with 2 agents", growth("qmix"), at_most=2.0
        ).about("qmix"),
        Prediction(
            "noise of `coma` with 8 agents, divided by that with 2 agents", growth("coma", 8), at_most=2.0
        ).about("coma"),
        Prediction(
            "noise of `coma` with 4 agents, divided by that with 2 agents, if the critic shares nothing between answers",
            growth("coma, nothing shared", 4),
            at_least=2.0,
        ).about("coma"),
    ),
    plot="lines",
    plotted=("noise", "agents", "variance over squared signal"),
    logarithmic=True,
    remark=(
        "With p = ¼, the return of an agent has n − 1 terms that do not depend on the agent: 2 + 3(n − 1) by "
        "hand, without the group's own error. `mappo`'s critic is central and still does not help: a state value "
        "must not depend on simultaneous answers, and without them there is nothing to explain. A baseline helps "
        "if it depends on the other agents' answers and not on the agent's own: a sampled baseline "
        "(`counterfactual`, twice the tokens, and the noise of one alternative), removal of the agent (`ccpo`, "
        "nothing is sampled again here), or a learned baseline (`vdn`, `qmix`, `coma`). Learned baselines must "
        "generalise across answers: with a critic that is a sum over turns, `coma` is as good as the best, and "
        "with a critic that memorises every joint answer it is nearly `grpo` with four agents. The fit must have "
        "converged: after 24 steps in place of 48, `vdn` had 6.9 with 16 agents, three times as much as with 8, "
        "and contradicted its prediction; this is the only setting that was changed after a run."
    ),
)
