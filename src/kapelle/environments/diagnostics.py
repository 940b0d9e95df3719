"""Diagnostic environments: small games with a known optimum, each with one difficulty that separates algorithms.

A game has cases, one for each task. Agents (seats) write texts, most often a letter, in turn or at once, and each receives a
reward from 0 to 1. An observation is all that a seat may know. `expected` is the exact return of a team whose probability of
every text is known. `landmarks` are the returns of the best team, the best single agent, a team in which each agent replies to
chance, and chance itself.

| name | difficulty |
|---|---|
| `sum_game` | many agents share a sum, in which the part of each is small; free riders, noise |
| `relay` | each agent must answer the one before, and only the last one receives a reward |
| `hidden_sign` | half of the reward depends on what one agent alone can see |
| `speaker` | one agent writes, the others read and answer; the speaker knows the correct letter and helps or lies, or it leads |
| `long_game` | many letters, with rewards one by one or at the end |
| `essay` | texts of any length in which one letter decides |
| `unequal` | tasks of unequal difficulty, with unequal rewards for any text |
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from string import ascii_uppercase
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, model_validator

from kapelle.environment import Outcome, Scripted
from kapelle.environments.base import BaseEnvironment, BaseState, need_movers
from kapelle.errors import ConfigError
from kapelle.runtime.randomness import derive_seed
from kapelle.types import Message, Split, Task

History = tuple[tuple[int, str], ...]
"""The texts so far, in order: (seat from 0, text)."""
Say = Callable[[int, str], Mapping[str, float]]
"""A policy: a seat and its observation → the probability of each text."""


class Diagnostic(BaseEnvironment, Scripted):
    """A game of finitely many cases; a subclass defines who moves, the observations, the best texts and the rewards."""

    seats: int = Field(default=2, ge=1, le=64)
    """Agents of the team."""
    letters: int = Field(default=4, ge=2, le=26)
    """Number of letters, from `A` on."""
    noise: float = Field(default=0.0, ge=0.0, le=1.0)
    """Probability, for each seat independently, that its reward r becomes 1 − r, also if it can receive none. `expected` ignores
    it."""

    @property
    def cases(self) -> int:
        """Number of different tasks; the task at an index is the case of that number, modulo this one."""
        return 1

    @property
    def alphabet(self) -> str:
        """The letters."""
        return ascii_uppercase[: self.letters]

    @property
    def texts(self) -> Sequence[str]:
        """The sensible texts of a seat."""
        return self.alphabet

    @abstractmethod
    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return the seats that write next, all at once; empty at the end."""

    @abstractmethod
    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the observation of a seat."""

    @abstractmethod
    def right(self, case: int, seat: int, history: History) -> str:
        """Return the text of a seat of the best team."""

    @abstractmethod
    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return each seat's reward so far."""

    def renamed(self, seat: int, seed: int) -> Mapping[str, str]:
        """Return a letter of the game → its name for a seat in an episode; empty if all names are equal."""
        return {}

    def success(self, case: int, history: History) -> float:
        """Return the team's reward as a share of the best team's."""
        best: History = ()
        while self.movers(case, best):
            best = self.rightly(case, best)
        return min(1.0, sum(self.earned(case, history)) / sum(self.earned(case, best)))

    # -------- Exact values

    def expected(self, say: Say) -> tuple[float, ...]:
        """Return each seat's expected reward over the cases, without noise."""
        by_case = [self._expected(case, (), say) for case in range(self.cases)]
        return tuple(sum(column) / len(by_case) for column in zip(*by_case, strict=True))

    def _expected(self, case: int, history: History, say: Say) -> tuple[float, ...]:
        movers = self.movers(case, history)
        if not movers:
            return self.earned(case, history)
        total = [0.0] * self.seats
        policies = [say(seat, self.sees(case, seat, history)) for seat in movers]
        for joint in product(*(each.items() for each in policies)):
            probability = 1.0
            for _, share in joint:
                probability *= share
            if probability:
                now = (*history, *zip(movers, (text for text, _ in joint), strict=True))
                for seat, reward in enumerate(self._expected(case, now, say)):
                    total[seat] += probability * reward
        return tuple(total)

    def landmarks(self) -> dict[str, float]:
        """Return the team's total reward: best team, best single agent among chance, replies to chance, and chance."""
        chance = dict.fromkeys(self.texts, 1 / len(self.texts))
        best = self._best()

        def mixed(seats: Sequence[int], replies: Mapping[tuple[int, str], str]) -> float:
            return sum(
                self.expected(lambda seat, seen: {replies[seat, seen]: 1.0} if seat in seats else chance)
            )

        def value(view: tuple[int, str], text: str) -> float:
            """Return the team's reward if one seat writes a text at one observation, and all else is chance."""
            return sum(self.expected(lambda *other: {text: 1.0} if other == view else chance))

        everybody = range(self.seats)
        replies = {view: max(self.texts, key=lambda text: value(view, text)) for view in best}
        return {
            "optimum": mixed(everybody, best),
            "best single agent": max(mixed([seat], best) for seat in everybody),
            "each replies to chance": mixed(everybody, replies),
            "chance": mixed([], {}),
        }

    def _best(self) -> dict[tuple[int, str], str]:
        """Return the texts of the best team, by seat and observation."""
        found: dict[tuple[int, str], str] = {}
        for case in range(self.cases):
            waiting: list[History] = [()]
            seen: set[History] = set()
            while waiting:
                history = waiting.pop()
                movers = self.movers(case, history)
                for seat in movers:
                    found[seat, self.sees(case, seat, history)] = self.right(case, seat, history)
                following = [self.rightly(case, history)]
                if len(movers) == 1:  # the others must also answer texts that are not the best
                    following = [(*history, (movers[0], text)) for text in self.texts]
                new = [each for each in following if movers and each not in seen]
                seen.update(new)
                waiting += new
        return found

    def rightly(self, case: int, history: History) -> History:
        """Return the texts after the best team's next move."""
        return (*history, *((seat, self.right(case, seat, history)) for seat in self.movers(case, history)))

    # -------- As an environment

    @property
    def sources(self) -> Mapping[Split, str]:
        """The game itself, in both splits."""
        return {
            "train": f"the {self.cases} cases of the game",
            "test": "the same cases: a game has nothing to hold out",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError unless there is one agent for each seat."""
        if len(agents) != self.seats:
            raise ConfigError(
                f"`environment.seats` is {self.seats}, and the team has {len(agents)} agents ({', '.join(agents)}). "
                f"Set `environment.seats: {len(agents)}`, or as many `team.agents`."
            )

    def task(self, split: Split, index: int) -> Task:
        """Return a case by its number."""
        return Task(f"{split}-{index}", "", {"case": index % self.cases})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> DiagnosticState:
        """Start an episode of a case."""
        self.check(agents)
        return DiagnosticState(self, task, agents, seed)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return a random text, which demonstrates the form alone."""
        return random.Random(f"{seed}/{agent}").choice(self.texts)


class DiagnosticState(BaseState):
    """An episode of a case."""

    def __init__(self, game: Diagnostic, task: Task, agents: Sequence[str], seed: int) -> None:
        super().__init__(task, agents)
        self._game, self._case = game, int(task.data["case"])
        self._said: History = ()
        draw = random.Random(f"{seed}/noise")
        names = [game.renamed(seat, seed) for seat, _ in enumerate(agents)]
        self._to_seat = [str.maketrans(dict(own)) for own in names]
        """By seat: a letter of the game → its name for the seat."""
        self._to_game = [str.maketrans({name: letter for letter, name in own.items()}) for own in names]
        self._flipped = [draw.random() < game.noise for _ in agents] if game.noise else [False] * len(agents)
        self._earned = list(game.earned(self._case, ()))

    def observe(self, agent: str) -> str:
        """Return the observation of the agent's seat."""
        seat = self.agents.index(agent)
        return self._game.sees(self._case, seat, self._said).translate(self._to_seat[seat])

    def movers(self) -> tuple[str, ...]:
        """Return who writes next."""
        return tuple(self.agents[seat] for seat in self._game.movers(self._case, self._said))

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Take the texts and return the new rewards; EpisodeError unless exactly the movers acted."""
        movers = self.movers()
        need_movers(actions, movers)
        for name in movers:
            seat = self.agents.index(name)
            self._said += ((seat, actions[name].strip().translate(self._to_game[seat])),)
        before, self._earned = self._earned, list(self._game.earned(self._case, self._said))
        if not self.movers() and any(self._flipped):
            pairs = zip(self._earned, self._flipped, strict=True)
            self._earned = [1.0 - reward if flipped else reward for reward, flipped in pairs]
        return {
            name: now - then
            for name, now, then in zip(self.agents, self._earned, before, strict=True)
            if now != then
        }

    def outcome(self) -> Outcome:
        """Return the success; `step` has returned all rewards."""
        return Outcome(
            rewards=dict.fromkeys(self.agents, 0.0),
            success=self._game.success(self._case, self._said),
            truncated=bool(self.movers()),
        )


class _OneText(Diagnostic):
    """Every seat writes one text, all at once, and its reward depends on its own text alone."""

    @abstractmethod
    def reward(self, case: int, seat: int, text: str) -> float:
        """Return the reward of a seat's text."""

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """All at once, and then none."""
        return () if history else tuple(range(self.seats))

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Each seat's own reward."""
        if not history:
            return (0.0,) * self.seats
        return tuple(self.reward(case, seat, text) for seat, text in history)

    def expected(self, say: Say) -> tuple[float, ...]:
        """The same as for any game, without enumerating joint texts."""
        found = [0.0] * self.seats
        for seat in range(self.seats):
            for case in range(self.cases):
                policy = say(seat, self.sees(case, seat, ()))
                found[seat] += sum(share * self.reward(case, seat, text) for text, share in policy.items())
        return tuple(each / self.cases for each in found)


class SumGame(_OneText):
    """Each seat has a letter of its own, which it cannot observe; the seat receives its share of 1 for this letter.

    With `pays: all` all seats must be correct for any reward. In another case other letters are correct.
    """

    name: Literal["sum_game"] = "sum_game"
    pays: Literal["sum", "all"] = "sum"
    """Whether each correct seat receives a reward, or all of them if all are correct."""
    riders: int = Field(default=0, ge=0)
    """Number of seats, the last ones, that never receive a reward."""
    number_of_cases: int = Field(default=1, ge=1)
    """Tasks; each seat reads the task's number."""
    roles: int | None = Field(default=None, ge=1)
    """Number of seats with different correct letters; the next seats repeat them in order. null: all differ."""
    weights: tuple[Annotated[FiniteFloat, Field(gt=0)], ...] | None = None
    """Shares of the 1 for the seats that receive a reward, up to a factor; null: equal shares."""

    @model_validator(mode="after")
    def _check_earners(self) -> SumGame:
        earners = self.seats - self.riders
        if earners < 1:
            raise ValueError(f"`riders: {self.riders}` leaves none of {self.seats} `seats` with a reward.")
        if self.weights is not None and len(self.weights) != earners:
            raise ValueError(
                f"`weights` has {len(self.weights)} entries for {earners} seats with a reward. Give one for each."
            )
        if self.weights is not None and self.pays == "all":
            raise ValueError("`weights` divides a sum; with `pays: all` all rewards are equal. Remove it.")
        return self

    @property
    def cases(self) -> int:
        """Tasks."""
        return self.number_of_cases

    def sees(self, case: int, seat: int, history: History) -> str:
        """Its place, and the task's number."""
        return f"{seat + 1}/{self.seats} {case}"

    def right(self, case: int, seat: int, history: History) -> str:
        """Another letter for every role and case."""
        return self.alphabet[(seat % (self.roles or self.seats) + case) % self.letters]

    def reward(self, case: int, seat: int, text: str) -> float:
        """Its share for the correct letter."""
        return (text == self.right(case, seat, ())) * self._share(seat)

    def _share(self, seat: int) -> float:
        earners = self.seats - self.riders
        if seat >= earners:
            return 0.0
        return 1.0 / earners if self.weights is None else self.weights[seat] / sum(self.weights)

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """A share of 1 for each correct seat; with `pays: all` for all or none."""
        own = super().earned(case, history)
        if self.pays == "sum":
            return own
        correct = bool(history) and all(own[: self.seats - self.riders])
        return tuple(correct * self._share(seat) for seat in range(self.seats))

    def expected(self, say: Say) -> tuple[float, ...]:
        """By enumeration if seats depend on each other."""
        return Diagnostic.expected(self, say) if self.pays == "all" else super().expected(say)


class Relay(Diagnostic):
    """Each seat reads the letter before its own and must write the one that follows it; the last one receives 1 if all did.

    The first seat reads nothing, and writes `A`.
    """

    name: Literal["relay"] = "relay"

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """One after another."""
        return (len(history),) if len(history) < self.seats else ()

    def sees(self, case: int, seat: int, history: History) -> str:
        """Its place, and the last letter."""
        return f"{seat + 1}/{self.seats} {history[-1][1] if history else ''}".strip()

    def right(self, case: int, seat: int, history: History) -> str:
        """The letter that follows the last one, `A` after the last of the alphabet."""
        if not history:
            return "A"
        return self.alphabet[(self.alphabet.find(history[-1][1]) + 1) % self.letters]

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """1 for the last seat, if all were correct."""
        whole = len(history) == self.seats and all(
            text == self.right(case, seat, history[:seat]) for seat, text in history
        )
        return (*[0.0] * (self.seats - 1), float(whole))


class HiddenSign(_OneText):
    """Each seat has a letter to write, and half of the reward is a gift or missing: the first seat alone sees which."""

    name: Literal["hidden_sign"] = "hidden_sign"

    @property
    def cases(self) -> int:
        """With the gift and without."""
        return 2

    def sees(self, case: int, seat: int, history: History) -> str:
        """Its place; the first seat sees the sign too."""
        return f"{seat + 1}/{self.seats}{' +-'[case + 1 if seat == 0 else 0]}".strip()

    def right(self, case: int, seat: int, history: History) -> str:
        """A letter for every seat."""
        return self.alphabet[seat % self.letters]

    def reward(self, case: int, seat: int, text: str) -> float:
        """Half a share of 1 for the correct letter, and half for the gift."""
        return ((text == self.right(case, seat, ())) + (case == 0)) / (2 * self.seats)


class Speaker(Diagnostic):
    """The first seat sees the correct letter and writes one; the others read it, and each receives its share of 1 for the correct one.

    A speaker that helps receives their total r, one that lies 1 − r. A speaker that leads sees nothing: its own letter is
    correct, and it receives r. All letters are interchangeable: exchanging two of them everywhere changes nothing.
    """

    name: Literal["speaker"] = "speaker"
    speaker: Literal["helps", "lies", "leads"] = "helps"
    """Whether the first seat is rewarded if the others are correct, or if they are incorrect, or chooses the correct letter."""
    other_play: bool = False
    """Whether each seat but the first reads and writes the letters under other names, drawn in each episode. With such a partner
    no letter can become a code for another one (other-play, 2003.02979). `expected` ignores it."""

    @model_validator(mode="after")
    def _has_a_hearer(self) -> Speaker:
        if self.seats < 2:
            raise ValueError("A speaker needs a hearer: set `seats: 2` or more.")
        return self

    @property
    def cases(self) -> int:
        """One for each letter; a single one where the speaker leads."""
        return 1 if self.speaker == "leads" else self.letters

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """The speaker, then all others at once."""
        if not history:
            return (0,)
        return tuple(range(1, self.seats)) if len(history) == 1 else ()

    def sees(self, case: int, seat: int, history: History) -> str:
        """The correct letter for a speaker that helps or lies; the speaker's text for the others."""
        message = history[0][1] if history else ""
        secret = "" if self.speaker == "leads" else self.alphabet[case]
        return f"{seat + 1}/{self.seats} {message if seat else secret}".strip()

    def right(self, case: int, seat: int, history: History) -> str:
        """A helper writes it and the others repeat it; a leader writes any letter; a liar's text carries no information."""
        if self.speaker == "lies":
            return "A"
        return history[0][1] if seat else self.alphabet[case]

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """The rewards at the end."""
        if len(history) < self.seats:
            return (0.0,) * self.seats
        hearers = [hit / (self.seats - 1) for hit in self._hits(case, history)]
        total = sum(hearers)
        return (1.0 - total if self.speaker == "lies" else total, *hearers)

    def success(self, case: int, history: History) -> float:
        """Return the share of hearers with the correct letter."""
        return sum(self._hits(case, history)) / (self.seats - 1)

    def _hits(self, case: int, history: History) -> list[bool]:
        """Return whether each hearer is correct."""
        wanted = history[0][1] if history and self.speaker == "leads" else self.alphabet[case]
        return [text == wanted and text in tuple(self.alphabet) for seat, text in history if seat]

    def renamed(self, seat: int, seed: int) -> Mapping[str, str]:
        """Return, with `other_play`, a letter of the game → its name for a seat in an episode."""
        letters = list(self.alphabet)
        if self.other_play and seat > 0:
            random.Random(derive_seed("other-play", seat, seed)).shuffle(letters)
        return dict(zip(self.alphabet, letters, strict=True))


class LongGame(Diagnostic):
    """Each seat writes a letter in each of several rounds, with another correct one each time, and receives its share of 1 for each."""

    name: Literal["long_game"] = "long_game"
    rounds: int = Field(default=4, ge=1)
    """Letters of each seat, one after another."""
    paid: Literal["at_once", "at_the_end"] = "at_once"
    """When the rewards are given."""

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """All, until the last round is over."""
        return tuple(range(self.seats)) if len(history) < self.rounds * self.seats else ()

    def sees(self, case: int, seat: int, history: History) -> str:
        """Its place, and the round."""
        return f"{seat + 1}/{self.seats} {len(history) // self.seats}"

    def right(self, case: int, seat: int, history: History) -> str:
        """Another letter in every round."""
        return self.alphabet[(seat + len(history) // self.seats) % self.letters]

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """A share for every correct letter."""
        found = [0] * self.seats
        if self.paid == "at_once" or not self.movers(case, history):
            for k, (seat, text) in enumerate(history):
                found[seat] += text == self.alphabet[(seat + k // self.seats) % self.letters]
        return tuple(each / (self.rounds * self.seats) for each in found)

    def expected(self, say: Say) -> tuple[float, ...]:
        """The same as for any game, without enumerating joint texts: each letter is rewarded independently."""
        found = [0.0] * self.seats
        for k in range(self.rounds):
            history = ((0, ""),) * (k * self.seats)
            for seat in range(self.seats):
                chance = say(seat, self.sees(0, seat, history)).get(self.right(0, seat, history), 0.0)
                found[seat] += chance / (self.rounds * self.seats)
        return tuple(found)


class Essay(_OneText):
    """Each seat writes a text of any length; it receives its share of 1 if the letter at one place is `A`."""

    name: Literal["essay"] = "essay"
    place: int = Field(default=0, ge=0)
    """Of the letter that decides, from 0."""
    longest: int = Field(default=4, ge=1, le=64)
    """Letters of the longest text that `landmarks` considers."""

    @model_validator(mode="after")
    def _has_the_place(self) -> Essay:
        if self.place >= self.longest:
            raise ValueError(
                f"`place: {self.place}` lies behind a text of `longest: {self.longest}` letters."
            )
        return self

    @property
    def texts(self) -> Sequence[str]:
        """A text for each letter that decides."""
        return [letter * (self.place + 1) for letter in self.alphabet]

    def sees(self, case: int, seat: int, history: History) -> str:
        """Its place."""
        return f"{seat + 1}/{self.seats}"

    def right(self, case: int, seat: int, history: History) -> str:
        """As many `A` as are needed."""
        return "A" * (self.place + 1)

    def reward(self, case: int, seat: int, text: str) -> float:
        """A share of 1 for the letter."""
        return float(text[self.place : self.place + 1] == "A") / self.seats


class Unequal(_OneText):
    """Tasks with more or fewer correct letters; each gives some reward for any text, and the rest for a correct one."""

    name: Literal["unequal"] = "unequal"
    right_letters: tuple[int, ...] = Field(default=(3, 1), min_length=1)
    """For each case, the number of correct letters, from `A` on."""
    anyway: tuple[FiniteFloat, ...] = ()
    """For each case, the reward for any text, from 0 to less than 1; empty: 0."""

    @model_validator(mode="after")
    def _fits(self) -> Unequal:
        if any(not 1 <= right <= self.letters for right in self.right_letters):
            raise ValueError(f"`right_letters` are from 1 to `letters: {self.letters}`.")
        if self.anyway and len(self.anyway) != len(self.right_letters):
            raise ValueError("`anyway` has one number for each of `right_letters`, or none.")
        if any(not 0.0 <= gift < 1.0 for gift in self.anyway):
            raise ValueError("`anyway` lies from 0 to less than 1.")
        return self

    @property
    def cases(self) -> int:
        """Tasks."""
        return len(self.right_letters)

    def sees(self, case: int, seat: int, history: History) -> str:
        """Its place, and the task's number."""
        return f"{seat + 1}/{self.seats} {case}"

    def right(self, case: int, seat: int, history: History) -> str:
        """The first letter always is correct."""
        return "A"

    def reward(self, case: int, seat: int, text: str) -> float:
        """The reward for any text, and the rest for a correct letter."""
        gift = self.anyway[case] if self.anyway else 0.0
        correct = len(text) == 1 and text in self.alphabet[: self.right_letters[case]]
        return (gift + (1.0 - gift) * correct) / self.seats
