"""Games that only experiments play: relays that are demonstrated, calls, and letters that are explained."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from kapelle.environment import EXPLANATIONS, Outcome
from kapelle.environments.diagnostics import Diagnostic, DiagnosticState, History, Relay, Say, SumGame
from kapelle.types import Message, Task


class ShownRelay(Relay):
    """A relay whose demonstrations are right, but for those of the first seat, which err in a share."""

    name: Literal["experiments.relays:ShownRelay"] = "experiments.relays:ShownRelay"  # type: ignore[assignment]
    errs: float = Field(default=0.0, ge=0.0, le=1.0)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the letter that follows the last one; the first seat may say any other than its own."""
        seat, _, new_messages = messages[-1].content.partition(" ")
        if new_messages:
            return self.right(0, int(seat.split("/")[0]) - 1, ((0, new_messages),))
        draw = random.Random(f"{seed}/{agent}")
        return draw.choice(self.alphabet[1:]) if draw.random() < self.errs else self.alphabet[0]


class Calls(Diagnostic):
    """The first seat calls the second, once in the first case and more often in others; of each call the right answer is worth its share of 1.

    What the first seat says means nothing. All is paid at the end.
    """

    name: Literal["experiments.relays:Calls"] = "experiments.relays:Calls"
    counts: tuple[int, ...] = (1, 4)
    """For each case, how often the second seat is called."""
    told: bool = False
    """Whether it reads which case it is."""

    @property
    def cases(self) -> int:
        """One for each number of calls."""
        return len(self.counts)

    def movers(self, case: int, said: History) -> tuple[int, ...]:
        """Caller and called in turn."""
        return (len(said) % 2,) if len(said) < 2 * self.counts[case] else ()

    def sees(self, case: int, seat: int, said: History) -> str:
        """Its place, and for the second the case if it is told."""
        return f"{seat + 1}/2 {case if seat and self.told else ''}".strip()

    def right(self, case: int, seat: int, said: History) -> str:
        """The first letter."""
        return "A"

    def earned(self, case: int, said: History) -> tuple[float, ...]:
        """The share of calls that were answered rightly, for the second seat, once all are over."""
        if self.movers(case, said):
            return (0.0, 0.0)
        return (0.0, sum(text == "A" for seat, text in said if seat) / self.counts[case])

    def expected(self, say: Say) -> tuple[float, ...]:
        """As for any game; every call counts by itself."""
        rights = [say(1, self.sees(case, 1, ())).get("A", 0.0) for case in range(self.cases)]
        return (0.0, sum(rights) / self.cases)


class Explained(SumGame):
    """A sum game that reports at the end what each agent should have written, or that its letter was incorrect."""

    name: Literal["experiments.relays:Explained"] = "experiments.relays:Explained"  # type: ignore[assignment]
    report: Literal["letter", "error", "misleading"] = "letter"
    """The correct letter; `not X` for each incorrect letter X, and nothing otherwise; or the letter after the correct one."""

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ExplainedState:
        """Start an episode of a case."""
        self.check(agents)
        return ExplainedState(self, task, agents, seed)


class ExplainedState(DiagnosticState):
    """An episode with a report."""

    _game: Explained

    def outcome(self) -> Outcome:
        """Return the outcome with a report for each agent."""
        game, said = self._game, dict(self._history)
        reports = {}
        for seat, agent in enumerate(self.agents):
            right = game.right(self._case, seat, ())
            if game.report == "error":
                reports[agent] = "" if said[seat] == right else f"not {said[seat]}"
            else:
                step = game.report == "misleading"
                reports[agent] = game.alphabet[(game.alphabet.index(right) + step) % game.letters]
        return replace(super().outcome(), info={EXPLANATIONS: reports})
