"""A team of two on real weights against one agent that samples as many tokens."""

from __future__ import annotations

from experiments.claim import Claim, Prediction
from experiments.real_team import ANSWERS, TEAM, THINKS, measure

CLAIM = Claim(
    name="real_team_or_one",
    algorithms=("grpo",),
    claim="On a pretrained model, a reader and a judge answer better than one agent with as many tokens",
    source="Multi-agent debate and role papers compare teams with one agent that has fewer tokens; this is the comparison with as many",
    setting=(
        "Gemma 3 270M (base) in bfloat16, LoRA of rank 8, GRPO with 8 words and 8 episodes each per step, 15 steps at one learning rate for all arms; the words of `docs/real_model.md`. "
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
    plotted=("accuracy", "", "training reward"),
)
