"""What the documentation says of causes, for a reader of a verdict who has only the viewer: its tables, row by row.

`tests/viewer/test_guides.py` holds them to the documentation's.
"""

from __future__ import annotations

from dataclasses import dataclass

from kapelle.runs.verdict import FLAT_PAGE, LEARN_PAGE


@dataclass(frozen=True, slots=True)
class Symptom:
    """What one may see in a run, what usually causes it, and what to do (empty where the cause says it)."""

    seen: str
    cause: str
    remedy: str = ""


TITLES = {
    "flat-reward": "My reward is flat: it does not move",
    "no-learning": "Find out why your team does not learn",
}
"""The parts of the page of advice below the verdicts."""
PAGES = {FLAT_PAGE: "flat-reward", LEARN_PAGE: "no-learning"}
"""The part of the page of advice that has a documentation page's table."""
FOUND: dict[str, tuple[Symptom, ...]] = {
    "flat-reward": (
        Symptom("`nothing to learn from: …` in the line of a step", "the reason that it names: equal rewards, no pair for DPO, no score at all", "as for `dead_groups`; where nothing was scored, return a number from the reward function"),
        Symptom("`dead_groups` near 1", "all attempts at a task earn the same: no advantage, no gradient", "a warm-up or a better model if all fail, harder tasks if all succeed, a larger `algorithm.group_size`, partial credit"),
        Symptom("`finish_length/<agent>` above 0.1", "answers are cut off before they are finished", "raise `team.sampling.max_tokens`"),
        Symptom("`entropy/<policy>` near 0", "always the same answer: nothing else is ever tried", "`algorithm.loss.entropy_coefficient=0.01`, a lower rate"),
        Symptom("`entropy/<policy>` jumps up", "the rate destroyed the weights", "a tenth of `optimizer.lr`"),
        Symptom("`grad_norm` healthy, success flat", "steps too small", "three times `optimizer.lr` (LoRA takes ten times what full weights do)"),
        Symptom("`failed_episodes` above 0", "the environment or an endpoint fails", "read the `error` of such episodes (troubleshooting)"),
    ),
    "no-learning": (
        Symptom("`dead groups` near 1 from the start, entropy unchanged", "tasks too easy or too hard, or a reward out of reach"),
        Symptom("entropy falls to 0 while success stands still", "collapse: lower the rate, or raise `algorithm.loss.entropy_coefficient`"),
        Symptom("entropy jumps up, length at its limit", "the rate is too high"),
        Symptom("success rises in training and not on unseen problems", "memorised tasks"),
        Symptom("read by nobody else under every turn of an agent", "its prompt does not reach the others: look at `team.agents.N.prompt`"),
        Symptom("of several reward functions one rises and the others fall (What each reward paid)", "it is cheaper to please: give it less weight, or the others more"),
        Symptom("one agent's tokens have all the credit", "the others' advantages are 0: look at the reward of each agent"),
    ),
}  # fmt: skip
"""The rows of each part."""
