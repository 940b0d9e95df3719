"""One adapter for each role on real weights against one adapter for both."""

from __future__ import annotations

from experiments.claim import Claim, Prediction
from experiments.claims.real_team_or_one import SHARED, TEAM, measure

CLAIM = Claim(
    name="real_sharing",
    algorithms=("grpo",),
    claim="On a pretrained model, a reader and a judge with an adapter each learn faster than with one adapter for both",
    source="Role-specialised policies, AT-GRPO, 2510.11062",
    setting="As in `real_team_or_one`; the shared adapter has the same rank and learning rate.",
    arms={"an adapter each": TEAM, "one adapter": SHARED},
    measure=measure,
    predictions=(
        Prediction(
            "Mean training reward over 10 steps: two adapters' less one adapter's",
            lambda found: found["an adapter each"]["area"] - found["one adapter"]["area"],
            at_least=0.02,
            turned=0.0,
        ),
    ),
    rates=(3e-4,),
    seeds=3,
    plot="bars",
    plotted=("area", "", "mean training reward over 10 steps"),
    remark=(
        "Final accuracies on 200 unseen words: 97, 63 and 96 % with an adapter each, 96, 57 and 53 % with one adapter. After ten "
        "steps, one of three teams with separate adapters had learned nothing, and two of three with a shared adapter."
    ),
)
