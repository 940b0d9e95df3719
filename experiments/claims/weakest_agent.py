"""The agent of four that earns least of their sum: what keeps it from learning, and what lets it."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from experiments.claim import Claim, Found, Prediction, Result, better
from experiments.lab import Arm, Curve, TableRun, learn, recipe_of, tokens_of
from kapelle.environments.diagnostics import SumGame
from kapelle.setup.recipe import resolve
from kapelle.training.trainer import Trainer

WEIGHTS = (1.0, 0.3, 0.1, 0.03)
GAME = {"name": "sum_game", "seats": 4, "letters": 2, "weights": WEIGHTS}
WEAKEST = 3
TOKENS = 5000
"""39 steps."""
FIT = {"updates": 25, "lr": 0.003}
STEP = {"tasks_per_step": 4}
GRPO: dict[str, Any] = {"name": "grpo", "group_size": 8, "scale": "none", "team_reward": "sum"}
VDN: dict[str, Any] = {"name": "vdn", "group_size": 8, "fit": FIT}
CCPO: dict[str, Any] = {"name": "ccpo", "group_size": 8, "team_reward": "sum"}
HELD = {"training": {"critic_warmup": 5}}


def measure(arm: tuple[str, Arm], seed: int, rate: float) -> Result:
    """Let the team learn by Adam; follow the chance that its weakest agent says its letter."""
    player, own = arm
    if player == "language model":
        curve, weight = of_models(own, seed)
    else:
        curve, weight = of_tables(own, seed, rate)
    return Result(
        {"area": curve.area(TOKENS), "end": curve.end, "explained": weight},
        list(zip(curve.tokens, curve.values, strict=True)),
    )


def of_tables(arm: Arm, seed: int, rate: float) -> tuple[Curve, float]:
    """Return the weakest agent's chance, and how much the mixer explains on average from step 6 on."""
    adam = {"lr": rate, "eps": 1e-8, "betas": (0.9, 0.999), **arm.over.get("optimizer", {})}
    over = {**arm.over, "optimizer": adam}
    run = TableRun(recipe_of(GAME, Arm(arm.algorithm, over), rate, seed, training=STEP))
    weights: list[float] = []
    game = SumGame.model_validate(GAME)

    def chance(run: TableRun) -> float:
        weights.append(run.last.get("credit_weight", 0.0))
        return run.say(WEAKEST, game.sees(0, WEAKEST, ()))[game.right(0, WEAKEST, ())]

    curve = learn(run, TOKENS, worth=chance)
    return curve, fmean(weights[6:])


def of_models(arm: Arm, seed: int) -> tuple[Curve, float]:
    """Return the same of tiny language models, the chance by what is sampled in a step."""
    recipe = {
        "model": {
            "path": "embedded",
            "embedded": {
                "layers": 2,
                "heads": 2,
                "kv_heads": 1,
                "hidden": 64,
                "intermediate": 128,
                "context": 64,
            },
        },
        "environment": GAME,
        "workflow": {"name": "play"},
        "algorithm": arm.algorithm,
        "team": {
            "agents": 4,
            "sharing": "lora",
            "lora": {"rank": 4, "alpha": 8.0},
            "sampling": {"max_tokens": 2},
        },
        "warmup": {"steps": 100, "demonstrations": 400},
        "training": {"steps": 1000, **STEP, **arm.over.get("training", {})},
        "evaluation": {"before_and_after": False},
        "optimizer": {"lr": 3e-3},
        "record": {"credit_episodes": 0},
        "seed": seed,
    }
    right = SumGame.model_validate(GAME).right(0, WEAKEST, ())
    places, values, weights = [0], [], []
    with Trainer(resolve(recipe)) as trainer:
        for step in trainer.steps():
            said = [
                turn.text
                for one in step.groups
                for each in one.episodes
                for turn in each.by(f"agent_{WEAKEST}")
            ]
            values.append(fmean(text.strip() == right for text in said))
            weights.append(step.metrics.get("credit_weight", 0.0))
            places.append(places[-1] + tokens_of(step.groups))
            if places[-1] >= 2 * TOKENS:  # a letter and its end
                break
    steady = [fmean(values[k : k + 4]) for k in range(len(values))]
    return Curve([place // 2 for place in places], [*steady, steady[-1]]), fmean(weights[6:])


def lag(found: Found) -> float:
    """Return by how much less the weakest learns than with exact credit, where the mixer learned first."""
    return found["ccpo"]["area"] - found["vdn, mixer first"]["area"]


CLAIM = Claim(
    name="weakest_agent",
    algorithms=("vdn", "qmix", "ccpo"),
    claim="Under Adam, an agent with one thirtieth of the strongest agent's reward learns as fast as that agent, if from the first step its credit excludes the randomness of the other agents' actions",
    source="our own tables of VDN, in which the fourth of four agents gained nothing",
    setting=(
        "Four agents simultaneously choose one of two letters and, for their own correct letter, add 1, 0.3, 0.1 "
        "and 0.03 to a total of 1.43. Adam with one learning rate for all agents, as in training of language "
        "models, 32 episodes per step. The plot shows the probability that the fourth agent chooses its letter. "
        "For five steps, `vdn` gives every agent the team's return while its utilities are already being learned; "
        "with `mixer first` the policies do not change in these steps (`training.critic_warmup: 5`). `short "
        "memory` is `vdn` with Adam's β₂ of 0.9 in place of 0.999. Tables, and tiny language models with adapters "
        "of rank 4 at a learning rate of 0.003, where a letter and its end count as one token."
    ),
    arms={
        "grpo": ("table", Arm(GRPO)),
        "vdn": ("table", Arm(VDN)),
        "vdn, short memory": ("table", Arm(VDN, {"optimizer": {"betas": (0.9, 0.9)}})),
        "vdn, mixer first": ("table", Arm(VDN, HELD)),
        "ccpo": ("table", Arm(CCPO)),
        "vdn, language model": ("language model", Arm(VDN)),
        "vdn, mixer first, language model": ("language model", Arm(VDN, HELD)),
        "ccpo, language model": ("language model", Arm(CCPO)),
    },
    measure=measure,
    rates=(0.03,),
    predictions=(
        Prediction(
            "with tables, share of the return that `vdn`'s utilities explain from the sixth step",
            lambda found: found["vdn"]["explained"],
            at_least=0.98,
        ),
        better("vdn", "grpo", 0.02),
        better("vdn, short memory", "vdn", 0.02, "end"),
        better("vdn, mixer first", "vdn", 0.1),
        Prediction(
            "`vdn, mixer first` stays within 0.1 of `ccpo`; the five steps account for 0.05 of the difference",
            lag,
            at_most=0.1,
        ),
        better("ccpo, language model", "vdn, language model", 0.2),
        better("vdn, mixer first, language model", "vdn, language model", 0.02),
    ),
    remark=(
        "The fourth agent's letter contributes a thousandth of the return's variance, so with `grpo` the "
        "randomness of the other agents' actions moves it. From the sixth step, `vdn` explains all of the return, "
        "but the fourth agent stays at 0.67 (others: 0.9): Adam divides by a mean of squares in which the first "
        "five steps outweigh hundreds of later ones. Without these steps, or with a shorter memory, the agent "
        "learns, at the same speed in every run (0.87 or 0.88 at the end, in place of 0.54 to 0.77). If nothing "
        "can be explained, the five steps are lost. With language models, the utilities explain much less of new "
        "returns (0.1 and 0.2 on average), and even less when the team has nearly converged and little varies. It is "
        "not certain that `mixer first` helps there; credit by replay does help. Rate, fit and number of steps "
        "were chosen with three other seeds of the table and four of the language model. The bounds were set "
        "before the run; where a prediction is not shown, the effect is smaller than predicted or not certain."
    ),
)
