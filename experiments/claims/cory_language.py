"""CORY's exchange of roles on a language model whose observer begins by ignoring what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from experiments.claim import Claim, Prediction, Result, better
from experiments.lab import tokens_of
from kapelle.rollout.evaluation.evaluate import Evaluation
from kapelle.setup.recipe import resolve
from kapelle.training.trainer import Trainer

TOKENS = 10_000
GRPO: dict[str, Any] = {"name": "grpo", "group_size": 8}


def measure(algorithm: Mapping[str, Any], seed: int, rate: float) -> Result:
    """Warm up, let both learn, and test each in its role and at the question alone."""
    recipe = {
        "model": {"path": "embedded", "embedded": {"context": 96}},
        "environment": {
            "name": "arithmetic",
            "digits": 2,
            "carry_share": 0.6,
            "flaws": {"pioneer": 0.6, "observer": 0.6},
        },
        "workflow": {"name": "cory"},
        "algorithm": algorithm,
        "team": {
            "sharing": "lora",
            "lora": {"rank": 16, "alpha": 32.0},
            "sampling": {"max_tokens": 6},
            "agents": [
                {"name": "pioneer", "prompt": "{question}"},
                {"name": "observer", "prompt": "{question} {pioneer}"},
            ],
        },
        "warmup": {"steps": 440, "demonstrations": 3000},
        "optimizer": {"lr": rate},
        "training": {"steps": 1000, "tasks_per_step": 16},
        "evaluation": {"problems": 300, "before_and_after": False},
        "record": {"credit_episodes": 0},
        "seed": seed,
    }
    spent = 0
    with Trainer(resolve(recipe)) as trainer, TemporaryDirectory() as folder:
        begun = trainer.evaluate()
        for step in trainer.steps():
            spent += tokens_of(step.groups)
            if spent >= TOKENS:
                break
        ended = trainer.evaluate()
        trainer.save_policies(Path(folder))
        places = {name: str(Path(folder) / "policies" / name) for name in ("pioneer", "observer")}
        changed = {"pioneer": places["observer"], "observer": places["pioneer"]}
        with Trainer(resolve({**recipe, "start_from": changed})) as other:
            second = said(other.evaluate())["pioneer"]
    now, then = said(ended), said(begun)
    return Result(
        {
            "alone": min(now["pioneer"], second),
            "observer": now["observer"],
            "mended": now["mended"],
            "mended at first": then["mended"],
            "alone at first": then["pioneer"],
        }
    )


def said(found: Evaluation) -> dict[str, float]:
    """Return how often each is right, and how often the observer is where the pioneer is not."""
    answers = []
    for one in found.groups:
        [episode] = one.episodes
        first, second = (turn.text.strip() for turn in episode.turns)
        answers.append((first, second, str(one.task.data["answer"])))
    wrong = [(first, second, right) for first, second, right in answers if first != right]
    return {
        "pioneer": fmean(first == right for first, _, right in answers),
        "observer": fmean(second == right for _, second, right in answers),
        "mended": fmean(second == right for _, second, right in wrong) if wrong else 0.0,
    }


CLAIM = Claim(
    name="cory_language",
    algorithms=("cory",),
    claim="With a language model, CORY's exchange of roles teaches both sets of weights to answer alone, and it does not weaken an observer that ignores the pioneer",
    source="CORY, 2410.06101, §3",
    setting=(
        "Sums of two digits with the tiny language model, 10,000 sampled tokens, GRPO with 8 episodes for each of "
        "16 sums per step, and an adapter of rank 16 for each of two agents. Pioneer and observer are warmed up "
        "on demonstrations that omit a carry in 60 % of the cases; the observer's demonstrations are independent "
        "of the pioneer's answer, so the observer starts by ignoring it. Tested on 300 unseen sums with greedy "
        "decoding; `alone` is the lower accuracy of the two sets of weights with the pioneer's prompt."
    ),
    arms={
        "exchange": {"name": "cory", "swap_every": 5, "base": GRPO},
        "no exchange": {"name": "cory", "swap_every": 0, "base": GRPO},
    },
    measure=measure,
    rates=(1e-3,),
    seeds=5,
    predictions=(
        better("exchange", "no exchange", 0.1, "alone"),
        Prediction(
            "with the exchange the observer is worse by at most 0.05 than without the exchange",
            lambda found: found["no exchange"]["observer"] - found["exchange"]["observer"],
            at_most=0.05,
        ),
    ),
    plot="bars",
    plotted=("alone", "", "correct unseen sums alone, the lower of the two"),
    remark=(
        "Both predictions failed for the same reason: what an observer learns about a sum with an answer next to "
        "it also improves its answers to the sum alone, which is impossible for a table ([the experiment with "
        "tables](#cory_swap)). Without an exchange, both sets of weights therefore answer alone equally well, and "
        "the exchange costs the observer 8 percentage points, because each set of weights has each role only half "
        "of the time. In neither arm does the observer learn to use the pioneer's answer: where the pioneer is "
        "incorrect, the observer is correct in 7 % and 6 % of cases, because its own answer is mostly the same. "
        "In one of five seeds, the warm-up left both agents at 4 %, and neither arm improved much from there. "
        "GRPO on each agent alone was omitted: its prompts differ, so its warm-up differs as well, and in the one "
        "seed that was run the warm-up left it at 3 %. One learning rate, short runs."
    ),
)
