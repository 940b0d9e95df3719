"""Steps that have nothing to learn from: why, and when to tell the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kapelle.algorithm import Algorithm
from kapelle.errors import TrainingHalted
from kapelle.metrics.definitions import UNSCORED, none_scored, paid_by
from kapelle.types import Group

if TYPE_CHECKING:
    from kapelle.training.loop import Step

LONG = 10
"""Steps in a row without anything to learn from, after which the user is told, or nobody being paid ends the run."""
NOT_SCORED = "no episode was scored"
WHERE = "docs/howto/reward_does_not_move.md"


def why_idle(algorithm: Algorithm, metrics: Mapping[str, float], *, updated: bool, judged: bool) -> str:
    """Return why a step had nothing to learn from, in words; empty where it had.

    `metrics` are the step's, `updated` is whether anything had credit, `judged` whether turns are worth something that no
    environment says (a reward model's scores). Equal rewards teach a critic, no rewards teach it nothing.
    """
    advantages = [
        value for name, value in metrics.items() if name.startswith(("advantage/", "advantage_std/"))
    ]
    flat = algorithm.critic is None and bool(advantages) and not any(advantages)
    unscored = none_scored(metrics) and not judged and not algorithm.judges
    if updated and not flat and not unscored:
        return ""
    if metrics.get("failed_episodes") == 1.0:
        return "every episode failed"
    if unscored:
        return NOT_SCORED
    if not updated:
        return algorithm.lacks
    return (
        "every attempt at a task earned the same"
        if metrics.get("dead_groups") == 1.0
        else "every advantage is 0"
    )


class IdleSteps:
    """Counts them, and what functions that pay have returned; `say` gets each line once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._row = 0
        self._unscored = 0
        self._named: set[str] = set()

    def note(self, step: Step) -> None:
        """Take a step; TrainingHalted where `LONG` steps in a row have scored no episode."""
        for name, (paid, asked) in paid_by(step.groups).items():
            if paid < asked and name not in self._named:
                self._named.add(name)
                self._say(
                    f"the reward function `{name}` scored {paid} of {asked} episodes of step {step.number}; for the others it "
                    "returned None, which pays nothing"
                )
        self._row = self._row + 1 if step.idle else 0
        self._unscored = self._unscored + 1 if step.idle == NOT_SCORED else 0
        if self._unscored == LONG:
            raise TrainingHalted(
                f"No episode of the last {LONG} steps was scored, so that nothing is learned: {_reason(step.groups)}. Return a number "
                "for every answer that is good or bad, 0.0 where it is worth nothing."
            )
        if self._row == LONG:
            self._say(f"{LONG} steps in a row had nothing to learn from: {step.idle}. What to do: {WHERE}")


def _reason(groups: Sequence[Group]) -> str:
    said = [str(e.info[UNSCORED]) for group in groups for e in group.valid if UNSCORED in e.info]
    return max(said, key=said.count)
