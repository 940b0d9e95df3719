"""Display the progress of a run in a terminal.

This module defines an observer that collects the progress, and a plain view with one line per event.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from kapelle.functional.statistics import MeanScore, missing_text, share_text
from kapelle.runs.definitions import DEMONSTRATED, UNSCORED, none_scored
from kapelle.runs.reader import is_run
from kapelle.runtime.console import printable, say
from kapelle.training.observer import REMARKS, Observer

if TYPE_CHECKING:
    from kapelle.rollout.evaluation.evaluate import Evaluation
    from kapelle.training.step_report import Step
    from kapelle.types import Episode, Group


Event = Literal["phase", "warmup", "step", "evaluation"]

RETURN = "return/"
"""The prefix of the metrics that contain the returns of agents."""
SHOWN = 3
"""The number of conversations that are displayed at once."""
RECENT = 30
"""The number of recent steps from which the remaining time is estimated."""
REMEMBERED = 1000
"""The number of recent steps whose success is stored."""


@dataclass(frozen=True, slots=True)
class ShownConversation:
    """One episode in the form in which it is displayed."""

    question: str
    texts: tuple[tuple[str, str], ...]
    """The texts of all turns as pairs (agent, text), in time order."""
    score: float | None
    """The success of the team, or None if the environment has no success or the episode failed."""
    returns: Mapping[str, float] = field(default_factory=dict)
    """The return of each agent in games, which have no success."""
    note: str = ""
    """A note that is displayed in place of the result, for demonstrations and failed episodes."""


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation on held-out problems."""

    step: int
    success: float | None
    interval: tuple[float, float] | None
    problems: int
    reward: Mapping[str, float]
    scored: int | None = None
    """The number of problems over which `success` is the mean."""
    failed: int = 0
    reason: str = ""
    verifier: Mapping[str, Any] | None = None
    """How well a trained verifier judges answers, as a row of `training.held_out.Judgement`."""
    games: bool = False
    """Whether the tasks have no questions (`Evaluation.games`)."""
    part_reward: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Mapping from each part of a mixture to the returns of the agents."""
    fewer: str = ""
    """The reason why fewer problems were evaluated than requested (`MeanScore.fewer`)."""

    @property
    def rate(self) -> MeanScore:
        """The success and the number of episodes over which it was computed."""
        scored = 0 if self.success is None else self.problems if self.scored is None else self.scored
        return MeanScore(
            self.success, self.interval, scored, self.problems, self.failed, self.reason, self.fewer
        )

    @property
    def is_game(self) -> bool:
        """Whether the agents received rewards but there is no success."""
        return self.success is None and bool(self.reward)

    def text(self) -> str:
        """Return the result as a string: the success, or the return of each agent in games."""
        return returns(self.reward) if self.is_game else share_text(self.success, self.interval)

    def counts(self, what: str = "") -> str:
        """Return the number of episodes as a string such as `scored 500 of 500`, or `played 16 of 16` in games, followed by `what`."""
        if self.is_game:
            counted = f"played {self.problems - self.failed} of {self.problems}{what}"
            return f"{counted}{missing_text(self.failed, self.fewer)}"
        if self.success is not None and self.scored is None:
            return f"of {self.problems}{what}; how many were scored was not recorded"
        return self.rate.counts(what)


def point_of(row: Mapping[str, Any]) -> Point:
    """Return the `Point` of a row of `evaluations.jsonl`."""
    interval = row["interval"]
    return Point(
        row["step"],
        row["success"],
        (interval[0], interval[1]) if interval else None,
        row["problems"],
        row["reward"],
        row.get("scored"),
        row.get("failed", 0),
        row.get("reason", ""),
        row.get("verifier"),
        bool(row.get("games")),
        row.get("part_reward", {}),
        row.get("fewer", ""),
    )


def judged(verifier: Mapping[str, Any]) -> str:
    """Return how well a verifier separates answers to one question, as a string such as `AUC 0.812 [0.785, 0.839]`."""
    if verifier["interval_within"] is None:
        return "no AUC, because too few questions had both correct and incorrect answers"
    low, high = verifier["interval_within"]
    return f"AUC {verifier['auc_within']:.3f} [{low:.3f}, {high:.3f}]"


@dataclass(frozen=True, slots=True)
class ProgressLine:
    """All values that a view can display.

    The object is replaced as a whole at every change, so that another thread reads a consistent state.
    """

    event: Event = "phase"
    """The kind of the last event."""
    phase: str = "start"
    detail: str = ""
    step: int = 0
    steps: int = 0
    """The number of steps of the current phase, or 0 for a phase without steps."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the last step of the warm-up or of training."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The mean return of each agent over those episodes of the last step in which the agent acted (the metrics
    `return/<agent>`)."""
    learning: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the loss in the last step, by the names in `LEARNING`."""
    idle: str = ""
    """The reason why the last step had no learning signal. The string is empty if there was a learning signal."""
    history: tuple[float, ...] = ()
    """The success or the mean return of the team in the last `REMEMBERED` steps with such a value."""
    points: tuple[Point, ...] = ()
    conversations: tuple[ShownConversation, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The seconds spent in each phase, excluding the current phase."""
    left: float | None = None
    """The estimated remaining time of the phase in seconds. The estimate is None before the second step and after the last
    step of the phase."""


def clock_text(seconds: float) -> str:
    """Return a time as a string such as `0:07`, `12:05` or `3:00:00`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


class Watch:
    """An `Observer` that collects the progress of a run and passes it to a view at every change."""

    def __init__(
        self,
        view: Callable[[ProgressLine], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        constant_sum: bool = False,
    ) -> None:
        """Set the view. If `constant_sum` is true, the mean return over agents has no meaning and is not displayed."""
        self.now = ProgressLine()
        self.notes: list[tuple[str, str]] = []
        """Notes about the run as pairs (name, text), for example the name `data` with a note about omitted rows."""
        self.changes: list[str] = []
        """Descriptions of what has changed since a resumed run was stopped."""
        self._constant_sum = constant_sum
        self._view = view
        self._clock = clock
        self._since = clock()
        self._ended: deque[float] = deque(maxlen=RECENT)
        """The times at which the last steps of the current phase ended."""

    def phase(self, name: str, detail: str) -> None:
        """Record that a new phase of the run has begun."""
        if name in ("cache", "data", "engine", "learning"):
            self.notes.append((name, detail))
        if name == "resume":
            self.changes.append(detail)
        if name in REMARKS:
            self._view(replace(self.now, event="phase", phase=name, detail=detail))
            return
        seconds = self.seconds()
        if name in ("warm-up", "stopping"):
            self._ended.clear()
        self._since = self._clock()
        # The progress bar of training continues after an evaluation; that of the warm-up does not.
        before = self.now
        if before.phase == "warm-up":
            before = replace(before, step=0, steps=0, metrics={}, left=None)
            self._ended.clear()
        self._show(replace(before, event="phase", phase=name, detail=detail, seconds=seconds))

    def warmup(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Record that a step of the warm-up is finished."""
        left = self._left(steps - step)
        self._show(replace(self.now, event="warmup", step=step, steps=steps, metrics=metrics, left=left))

    def step(self, step: Step, steps: int) -> None:
        """Record that a training step is finished."""
        rewards = {
            name.removeprefix(RETURN): value
            for name, value in step.metrics.items()
            if not none_scored(step.metrics)
            if name.startswith(RETURN)
            and "/" not in name.removeprefix(RETURN)  # a second slash marks a part of a mixture
        }
        score = [step.metrics["success"]] if "success" in step.metrics else []
        if not score and rewards and not self._constant_sum:
            score = [sum(rewards.values()) / len(rewards)]
        is_demonstrated = any(name.startswith(DEMONSTRATED) for name in step.metrics)
        shown = choose(step.groups, step.number)
        self._show(
            replace(
                self.now,
                event="step",
                step=step.number,
                steps=steps,
                left=self._left(steps - step.number),
                metrics=step.metrics,
                rewards=rewards,
                learning=learning(step.metrics),
                idle=step.idle,
                history=(*self.now.history, *score)[-REMEMBERED:],
                conversations=tuple(demonstrated(each) for each in shown) if is_demonstrated else shown,
            )
        )

    def _left(self, steps: int) -> float | None:
        """Return the estimated time in seconds of the remaining steps, based on recent steps and their evaluations."""
        self._ended.append(self._clock())
        taken = len(self._ended) - 1
        return (self._ended[-1] - self._ended[0]) / taken * steps if taken and steps > 0 else None

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Record the result of an evaluation after `step` steps."""
        point = point_of({"step": step, **result.row()})
        shown = self.now.conversations or choose(result.groups, 0)
        self._show(
            replace(self.now, event="evaluation", points=(*self.now.points, point), conversations=shown)
        )

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each phase, including the current phase up to now."""
        spent = dict(self.now.seconds)
        spent[self.now.phase] = spent.get(self.now.phase, 0.0) + self._clock() - self._since
        return spent

    def _show(self, progress: ProgressLine) -> None:
        self.now = progress
        self._view(progress)


def choose(groups: Sequence[Group], number: int) -> tuple[ShownConversation, ...]:
    """Return a few conversations of a step. Different values of `number` select different conversations."""
    places = dict.fromkeys((number + k * len(groups) // SHOWN) % len(groups) for k in range(SHOWN) if groups)
    chosen = [groups[place].episodes for place in places]
    return tuple(conversation(episodes[number % len(episodes)]) for episodes in chosen if episodes)


def conversation(episode: Episode) -> ShownConversation:
    """Return the question, the texts and the result of an episode."""
    texts = tuple((turn.agent, turn.text) for turn in episode.turns)
    if episode.error is not None:
        return ShownConversation(episode.task.question, texts, None, note="failed")
    rewarded = bool(episode.rewards) or any(turn.reward for turn in episode.turns)
    # For games without a question, the agents' returns are shown.
    score = episode.success if episode.task.question or not rewarded else None
    names = episode.agents if rewarded and score is None else ()
    earned = {name: episode.total(name) for name in names if name in episode.rewards or episode.by(name)}
    return ShownConversation(episode.task.question, texts, score, earned)


def demonstrated(shown: ShownConversation) -> ShownConversation:
    """Return the conversation marked as a demonstration, without the result of the scripted expert."""
    return replace(shown, score=None, returns={}, note="to be learned")


LEARNING = {
    "nll": "nats per token",
    "nll_heard": "nats an observed token",
    "preference_margin": "margin",
    "preference_accuracy": "pairs correct",
    "verifier_accuracy": "verifier correct",
    "verifier_auc": "verifier AUC",
}
"""Mapping from metrics of a loss to the names that are displayed in the terminal."""


def learning(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of the loss by their displayed names. If there are several policies, the name contains the policy."""
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        kind, _, policy = name.partition("/")
        if kind in LEARNING:
            found.setdefault(kind, {})[policy] = value
    return {
        LEARNING[kind] if len(values) == 1 else f"{LEARNING[kind]} ({policy})": value
        for kind, values in found.items()
        for policy, value in values.items()
    }


# -------- The plain view of a run: one line per event, readable in a log file

WARMUP_LINES = 10
"""The number of lines that are printed during a warm-up."""


class Lines:
    """A view that prints every change in the progress of a run as a line, which begins with the seconds since the start."""

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        *,
        before: Sequence[str] = (),
        run_dir: Path | None = None,
    ) -> None:
        """Set the stream.

        The lines `before` are printed first, and the path of `run_dir` is printed as soon as the run directory exists.
        """
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._before = list(before)
        self._run_dir = run_dir

    def __call__(self, progress: ProgressLine) -> None:
        """Print a line about the last event, unless nothing is to be reported."""
        while self._before:
            say(self._before.pop(0), self._stream)
        if self._run_dir is not None and is_run(self._run_dir):
            say(f"The run is saved in {self._run_dir}.", self._stream)
            self._run_dir = None
        text = _line(progress)
        if text:
            say(f"[{self._clock() - self._start:6.1f} s] {text}", self._stream)


class Logged:
    """An observer that forwards all events to another observer and writes the lines of the plain view to a log."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._early: list[str] = []
        self._write: Callable[[str], None] = self._early.append
        self._watch = Watch(self._note)

    def open(self, write: Callable[[str], None]) -> None:
        """Write all lines to a log, including the lines that were collected before this call."""
        for line in self._early:
            write(line)
        self._write = write

    def _note(self, progress: ProgressLine) -> None:
        if text := _line(progress):
            self._write(text)

    def phase(self, name: str, detail: str) -> None:
        """Forward the start of a new phase to the other observer and the log."""
        self._observer.phase(name, detail)
        self._watch.phase(name, detail)

    def warmup(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Forward a step of the warm-up to the other observer and the log."""
        self._observer.warmup(step, steps, metrics)
        self._watch.warmup(step, steps, metrics)

    def step(self, step: Step, steps: int) -> None:
        """Forward a training step to the other observer and the log."""
        self._observer.step(step, steps)
        self._watch.step(step, steps)

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Forward an evaluation to the other observer and the log."""
        self._observer.evaluation(step, result)
        self._watch.evaluation(step, result)


def _line(progress: ProgressLine) -> str:
    if progress.event == "warmup":
        every = max(1, progress.steps // WARMUP_LINES)
        if progress.step % every and progress.step != progress.steps:
            return ""
        loss = next((v for name, v in progress.metrics.items() if name.startswith("nll/")), None)
        suffix = "" if loss is None else f"  {loss:.3f} nats per token"
        return f"warm-up step {progress.step}/{progress.steps}{suffix}{_left(progress)}"
    if progress.event == "step":
        return _step(progress)
    if progress.event == "evaluation":
        point = progress.points[-1]
        if point.verifier is not None:
            return f"held-out questions after step {point.step}: {judged(point.verifier)} of {point.problems}"
        why = f": {point.reason}" if point.reason else ""
        what = "return " if point.is_game else ""
        return f"unseen problems after step {point.step}: {what}{point.text()}, {point.counts()}{why}"
    return f"{progress.phase}: {progress.detail}" if progress.detail else ""


def _step(progress: ProgressLine) -> str:
    rewards = "  ".join(f"{agent} {value:.3f}" for agent, value in progress.rewards.items())
    learned = "  ".join(f"{value:.3f} {name}" for name, value in progress.learning.items())
    speed = progress.metrics.get("time/tokens_per_second", 0.0)
    parts = [f"step {progress.step}/{progress.steps}", *([learned] if learned else [])]
    parts += [f"nothing to learn from: {progress.idle}"] if progress.idle else []
    parts += [f"return {rewards}"] if rewards else []
    parts += [*_counts(progress.metrics, idle=bool(progress.idle)), f"{speed:.0f} tokens/s{_left(progress)}"]
    if progress.conversations:
        parts.append(one_line(progress.conversations[0]))
    return "  ".join(parts)


def _left(progress: ProgressLine) -> str:
    return "" if progress.left is None else f"  {clock_text(progress.left)} left"


def _counts(metrics: Mapping[str, float], *, idle: bool = False) -> list[str]:
    """Return notes about a step: failed and unscored episodes, missing variance, and undone updates."""
    samples, failed = metrics.get("samples", 0.0), metrics.get("failed_episodes", 0.0)
    notes = [f"{round(failed * samples)} of {samples:.0f} episodes failed"] if failed else []
    if "success" in metrics and metrics.get("scored", samples) < samples:
        notes.insert(0, f"scored {metrics['scored']:.0f} of {samples:.0f}")
    elif unscored := metrics.get(UNSCORED):
        notes.insert(0, f"scored {samples - unscored - failed * samples:.0f} of {samples:.0f}")
    if (
        metrics.get("dead_groups") == 1.0
        and not idle
        and not any(name.startswith(DEMONSTRATED) for name in metrics)
    ):
        notes.append("all episodes of each task have the same return")
    undone = [name.partition("/")[2] for name in metrics if name.startswith("undone/")]
    notes += [f"an update of {', '.join(undone)} broke its weights and was undone"] if undone else []
    return [*notes, *(["the mixer's fit was undone"] if "mixer_undone" in metrics else [])]


def one_line(shown: ShownConversation, width: int = 100) -> str:
    """Return a conversation as one line with the question, the messages and the result, separated by arrows."""
    each = max(12, width // (1 + len(shown.texts)))
    words = [f"{agent}: {printable(text, each) or '(nothing)'}" for agent, text in shown.texts]
    pieces = [printable(shown.question, each), *words]
    return " → ".join([piece for piece in pieces if piece] + [verdict(shown)])


def verdict(shown: ShownConversation) -> str:
    """Return the result of a conversation as a string, such as `correct`, `incorrect` or a score, or the agents' returns in games."""
    if shown.note:
        return shown.note
    if shown.score is None:
        return returns(shown.returns) if shown.returns else "no score"
    return {1.0: "correct", 0.0: "incorrect"}.get(shown.score, f"{shown.score:.2f}")


def returns(values: Mapping[str, float]) -> str:
    """Return the agents' returns as a string such as `first 0.125, second -0.125`."""
    return ", ".join(f"{agent} {value:.3f}" for agent, value in values.items())
