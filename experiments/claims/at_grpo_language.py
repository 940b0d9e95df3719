"""AT-GRPO's comparison sets and its exchange of weights with a tiny language model on short paths."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from experiments.claim import Claim, Prediction, Result, better
from experiments.claims.at_grpo_groups import GroupedReturns
from experiments.lab import Curve, tokens_of
from kapelle.rollout.evaluation.evaluate import evaluate_held_out
from kapelle.rollout.evaluation.swap import swapped
from kapelle.setup.recipe import resolve
from kapelle.training.trainer import Trainer

TOKENS = 10_000
EPISODES = 8
WINDOW = 4
"""Steps over which the success of training episodes is averaged for the curve."""


def measure(arm: Mapping[str, Any], seed: int, rate: float) -> Result:
    """Warm up and train a team; measure it on unseen paths before training, after it, and with exchanged weights."""
    algorithm = GroupedReturns(group_size=EPISODES, team_reward="individual", epochs=2, minibatches=2, **arm)
    recipe = {
        "model": {
            "path": "embedded",
            "embedded": {
                "hidden": 128,
                "layers": 2,
                "heads": 16,
                "kv_heads": 8,
                "intermediate": 256,
                "context": 64,
            },
        },
        "environment": {
            "name": "plan_path",
            "side": 3,
            "difficulty": [2, 4],
            "turns": 5,
            "wording": "short",
            "local_reward": 0.5,
            "flaws": {"planner": 0.5, "executor": 0.5},
        },
        "workflow": {"name": "play"},
        "algorithm": algorithm.model_dump(mode="json"),
        "team": {
            "sharing": "lora",
            "lora": {"rank": 16, "alpha": 32.0},
            "sampling": {"max_tokens": 1},  # one move per turn, although demonstrations are whole paths
            "agents": [{"name": "planner"}, {"name": "executor"}],
        },
        "warmup": {"steps": 200, "demonstrations": 2000},
        "optimizer": {"lr": rate},
        "training": {"steps": 1000, "tasks_per_step": 8},
        "evaluation": {"problems": 300, "before_and_after": False, "greedy": False},
        "record": {"credit_episodes": 0},
        "seed": seed,
    }
    spent, places, solved = 0, [0], list[float]()
    with Trainer(resolve(recipe)) as trainer:
        begun = trainer.evaluate()
        for step in trainer.steps():
            solved.append(fmean(float(each.success or 0.0) for one in step.groups for each in one.episodes))
            spent += tokens_of(step.groups)
            places.append(spent)
            if spent >= TOKENS:
                break
        ended = trainer.evaluate()
        evaluation = trainer.config.evaluation
        exchanged, _ = swapped(trainer.setup)
        after = evaluate_held_out(exchanged, evaluation, evaluation.problems, seed)
    found = {"begun": begun, "end": ended, "swapped": after}
    # What a step's episodes achieve is the success of the weights before it.
    values = [fmean(solved[k : k + WINDOW]) for k in range(len(solved))]
    curve = Curve(places, [*values, values[-1]])
    return Result(
        {"area": curve.area(TOKENS), **{name: each.success or 0.0 for name, each in found.items()}},
        list(zip(curve.tokens, curve.values, strict=True)),
    )


def remaining(found: Mapping[str, Mapping[str, float]]) -> float:
    """Return the share of the success with sets per agent and turn that remains after the exchange."""
    both = found["agent and turn"]
    return both["swapped"] / both["end"] if both["end"] else 1.0


CLAIM = Claim(
    name="at_grpo_language",
    algorithms=("at_grpo",),
    claim="With a tiny language model on short paths, success grows from one comparison set per task to sets per turn, per agent, and per agent and turn, and at most half of it remains if planner and executor exchange their weights",
    source="AT-GRPO, 2510.11062, ablations on Plan-Path",
    setting=(
        "A planner and an executor, an adapter of rank 16 each on two layers of width 128, solve unseen paths of two to "
        "four moves on 3×3 cells with walls (`plan_path`) in at most five turns. In each turn, the planner proposes a "
        "move, and the executor reads the board and the proposal and moves. Half of the planner's reward is for its own "
        "proposals. In the warm-up, half of the demonstrations of each agent are random moves. 10,000 sampled tokens in "
        "steps of 8 paths × 8 episodes, two epochs of two minibatches, advantages divided by the standard deviation, "
        "returns from each turn on, no tree. With `nothing`, all turns of a task are one comparison set. `begun`, `end` and `swapped` are the success on 300 unseen paths before "
        "training, after it, and after it with exchanged weights, sampled at temperature 1."
    ),
    arms={
        "nothing": {"by_agent": False, "by_turn": False},
        "turn": {"by_agent": False, "by_turn": True},
        "agent": {"by_agent": True, "by_turn": False},
        "agent and turn": {"by_agent": True, "by_turn": True},
    },
    measure=measure,
    rates=(1e-3,),
    seeds=5,
    predictions=(
        better("turn", "nothing", 0.03, "end"),
        better("agent", "turn", 0.03, "end"),
        better("agent and turn", "agent", 0.03, "end"),
        better("agent and turn", "nothing", 0.1, "end"),
        Prediction(
            "after the exchange, at most half of the success of `agent and turn` remains",
            remaining,
            at_most=0.5,
        ),
    ),
    plotted=("area", "", "success in training"),
    remark=(
        "The order of the paper was not found. Sets per agent and turn exceed one set per task by 4 percentage points in "
        "four of five seeds, and sets per agent by 7 on average. Sets per agent alone have the lowest success, 4 below "
        "sets per turn; why was not examined. After the exchange, 42 to 92 % of the success remains, and in four of five "
        "seeds it is at least 12 points above the success before training. A likely reason is that both roles answer "
        "with a move for the same board, so that what one learns serves the other. One rate, no sweep, and no tree. "
        "The size of the model, the warm-up and the rate were chosen with one other seed: at 15,000 tokens, a rate of 7e-4 "
        "brought `agent and turn` to 0.73 (0.6 after the exchange) and `nothing` to 0.695 (0.46), and a rate of 1.5e-3 "
        "brought `agent and turn` to 0.735. With width 64 and a rate of 2e-3, they reached 0.62 (0.265) and 0.58 (0.23) at "
        "17,000 tokens, from 0.235 before training (200 paths each). The number of seeds was set before the runs to "
        "eight, or to as many as are complete after fifty minutes, which were five."
    ),
)
