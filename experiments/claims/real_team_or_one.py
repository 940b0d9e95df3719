"""A team of two on real weights against one agent that samples as many tokens, and the runs of three claims on real weights.

`python examples/real/prepare.py` fetches the model and the words. Every run is kept in `build/real/runs`, since the claims share arms.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.claim import Claim, Prediction, Result

RECIPE = Path("examples/real/team.yaml")
KEPT = Path("build/real/runs")
STEPS = 10
UNSEEN = 200
"""Words of the test split that are asked after the last step."""

TEAM: Mapping[str, Any] = {}
"""The recipe as it is: an adapter for each role, the reward of the team as every agent's credit."""
SHARED: Mapping[str, Any] = {
    "team": {"agents": {name: {"weights": {"adapter": "both"}} for name in ("reader", "judge")}}
}
COUNTERFACTUAL: Mapping[str, Any] = {"algorithm": {"name": "counterfactual", "group_size": 4}}
THINKS: Mapping[str, Any] = {
    "team": {
        "agents": [
            {
                "name": "thinker",
                "prompt": "Word: {question}. What does it mean? Is it positive or negative?",
                "sampling": {"max_tokens": 14},
                "examples": [
                    {
                        "user": "Word: umbrella. What does it mean? Is it positive or negative?",
                        "assistant": "A thing that keeps off the rain: positive",
                    },
                    {
                        "user": "Word: crash. What does it mean? Is it positive or negative?",
                        "assistant": "When a car hits a wall: negative",
                    },
                ],
            }
        ]
    },
    "environment": {"rewards": [{"function": "experiments/claims/real_team_or_one.py:last_word"}]},
    "workflow": {"name": "solo"},
}
"""One agent that writes a meaning and its answer in 14 tokens, as many as the team has."""
ANSWERS: Mapping[str, Any] = {
    "team": {
        "agents": [
            {
                "name": "judge",
                "prompt": "Word: {question}\nIs it positive or negative?",
                "sampling": {"choices": [" positive", " negative"], "max_tokens": 2},
            }
        ]
    },
    "workflow": {"name": "solo"},
    "training": {"tasks_per_step": 56},
}
"""One agent that answers at once, in 2 tokens, with seven times as many words in each step."""


def last_word(completion: str, answer: str) -> float:
    """Return 1 if the last word of a completion is the answer, else 0."""
    words = completion.replace(".", " ").split()
    return float(bool(words) and words[-1] == answer)


def measure(arm: Mapping[str, Any], seed: int, rate: float) -> Result:
    """Train an arm; return its accuracy on unseen words, and the mean over all steps of its training reward (`area`)."""
    from kapelle import Trainer

    settings = (
        f"seed={seed}",
        f"optimizer.lr={rate}",
        "optimizer.warmup_steps=0",
        f"training.steps={STEPS}",
        f"evaluation.every={2 * STEPS}",
    )
    text = json.dumps(arm, sort_keys=True, indent=1)
    name = hashlib.sha256(f"{RECIPE.read_text('utf-8')}{text}{settings}".encode()).hexdigest()[:16]
    result = KEPT / f"{name}.json"
    if not result.is_file():
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{name}.yaml").write_text(text, "utf-8")
        rewards, tokens = [], 0.0
        overlays = (str(KEPT / f"{name}.yaml"),)
        with Trainer.from_recipe(str(RECIPE), *settings, overlays=overlays) as trainer:
            for step in trainer.steps():
                found = step.metrics
                tokens += sum(value for key, value in found.items() if key.startswith("tokens/"))
                rewards += [value for key, value in found.items() if key.startswith("reward_function/")]
            after = trainer.evaluate(UNSEEN)
        accuracy = sum(after.reward.values()) / len(after.reward)
        measures = {"accuracy": accuracy, "area": sum(rewards) / len(rewards), "tokens": tokens}
        result.write_text(json.dumps(measures), "utf-8")
    return Result(json.loads(result.read_text("utf-8")))


CLAIM = Claim(
    name="real_team_or_one",
    algorithms=("grpo",),
    claim="On a pretrained model, a reader and a judge answer better than one agent with as many tokens",
    source="Multi-agent debate and role papers compare teams with one agent that has fewer tokens; this is the comparison with as many",
    setting=(
        "Gemma 3 270M (base) in bfloat16, LoRA of rank 8, GRPO with 8 words and 8 episodes each per step, 10 steps at one learning rate for all arms, without a warm-up of the rate; the words of `docs/real_model.md`. "
        "`thinks` writes a meaning and its answer in 14 tokens; `answers` chooses an answer at once, with 56 words per step. All arms sample at most 900 tokens per step."
    ),
    arms={"team": TEAM, "thinks": THINKS, "answers": ANSWERS},
    measure=measure,
    predictions=(
        Prediction(
            "Accuracy on 200 unseen words: the team's less that of the agent that thinks",
            lambda found: found["team"]["accuracy"] - found["thinks"]["accuracy"],
            at_least=0.02,
            turned=0.0,
        ),
        Prediction(
            "The team's less that of the agent that answers at once",
            lambda found: found["team"]["accuracy"] - found["answers"]["accuracy"],
            at_least=0.02,
            turned=0.0,
        ),
    ),
    rates=(3e-4,),
    seeds=3,
    plot="bars",
    plotted=("accuracy", "", "accuracy on 200 unseen words"),
    remark=(
        "The agent that answers at once learns fastest: 97, 97 and 96 % in its three seeds, the team 97, 63 and 96 %, the "
        "agent that thinks 97, 76 and 91 %. A word is enough for this task, so that an explanation can only lose information. "
        "The team's second seed had learned nothing after ten steps. The recipe in `examples/real` warms the learning rate up over "
        "ten steps, because the first updates can make the judge give one answer to almost every word."
    ),
)
