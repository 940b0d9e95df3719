"""What is known of a run at a moment: the listener that gathers it, for any view to show."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from kapelle.evaluation import Evaluation
    from kapelle.loop import Step
    from kapelle.types import Episode, Group

Event = Literal["phase", "warmup", "step", "evaluation"]

RETURN = "return/"
"""Metrics that say what an agent learns from, see `metrics.METRICS`."""

SHOWN = 3
"""Conversations that are shown at a time."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One episode for people to read."""

    question: str
    said: tuple[tuple[str, str], ...]
    """(agent, text), in time order."""
    score: float | None


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation on unseen problems."""

    step: int
    success: float | None
    interval: tuple[float, float] | None
    problems: int
    reward: Mapping[str, float]


def point_of(row: Mapping[str, Any]) -> Point:
    """Return a row of `evaluations.jsonl` as a point."""
    interval = row["interval"]
    return Point(
        row["step"],
        row["success"],
        (interval[0], interval[1]) if interval else None,
        row["problems"],
        row["reward"],
    )


@dataclass(frozen=True, slots=True)
class Progress:
    """Everything that a view may show; replaced as a whole, so that a drawing thread sees one state."""

    event: Event = "phase"
    """What has just happened."""
    phase: str = "start"
    detail: str = ""
    step: int = 0
    steps: int = 0
    """Of the phase that is running; 0 where it has none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last step of warm-up or training."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Mean return that each agent learns from, over the last step's episodes."""
    history: tuple[float, ...] = ()
    """The team's success (or mean reward) at every step."""
    points: tuple[Point, ...] = ()
    conversations: tuple[Conversation, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Time spent by phase, the running one left out."""


class Watch:
    """A listener (`trainer.Listener`) that keeps the progress and hands it to a view at every change."""

    def __init__(self, view: Callable[[Progress], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.now = Progress()
        self._view = view
        self._clock = clock
        self._since = clock()

    def phase(self, name: str, detail: str) -> None:
        """Hear that the run does something else now."""
        seconds = self.seconds()
        self._since = self._clock()
        # Training goes on after an evaluation, and its bar with it; that of the warm-up does not.
        before = replace(self.now, step=0, steps=0, metrics={}) if self.now.phase == "warm-up" else self.now
        self._show(replace(before, event="phase", phase=name, detail=detail, seconds=seconds))

    def warmup(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Hear of a step of the warm-up."""
        self._show(replace(self.now, event="warmup", step=step, steps=steps, metrics=metrics))

    def step(self, step: Step, steps: int) -> None:
        """Hear of a step of training."""
        rewards = {
            name.removeprefix(RETURN): value
            for name, value in step.metrics.items()
            if name.startswith(RETURN) and "/" not in name.removeprefix(RETURN)  # parts have theirs beside
        }
        mean = sum(rewards.values()) / len(rewards) if rewards else 0.0
        self._show(
            replace(
                self.now,
                event="step",
                step=step.number,
                steps=steps,
                metrics=step.metrics,
                rewards=rewards,
                history=(*self.now.history, step.metrics.get("success", mean)),
                conversations=choose(step.groups, step.number),
            )
        )

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Hear of an evaluation after `step` steps."""
        point = point_of({"step": step, **result.row()})
        shown = self.now.conversations or choose(result.groups, 0)
        self._show(
            replace(self.now, event="evaluation", points=(*self.now.points, point), conversations=shown)
        )

    def seconds(self) -> dict[str, float]:
        """Return the time spent in each phase, the running one up to now."""
        spent = dict(self.now.seconds)
        spent[self.now.phase] = spent.get(self.now.phase, 0.0) + self._clock() - self._since
        return spent

    def _show(self, progress: Progress) -> None:
        self.now = progress
        self._view(progress)


def choose(groups: Sequence[Group], number: int) -> tuple[Conversation, ...]:
    """Return conversations from different places of a step, others at every `number`."""
    places = dict.fromkeys((number + k * len(groups) // SHOWN) % len(groups) for k in range(SHOWN) if groups)
    episodes = [groups[place].episodes for place in places]
    return tuple(conversation(attempts[number % len(attempts)]) for attempts in episodes if attempts)


def conversation(episode: Episode) -> Conversation:
    """Return what was asked, said and earned."""
    score = episode.success
    if score is None and episode.rewards:
        score = sum(episode.rewards.values()) / len(episode.rewards)
    said = tuple((turn.agent, turn.text) for turn in episode.turns)
    return Conversation(episode.task.question, said, None if episode.error else score)
