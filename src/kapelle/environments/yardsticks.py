"""Small games whose optimum is known, each with the one difficulty that tells algorithms apart; for yardsticks, not for play.

A game has cases, one for each task; in turn or at once seats say texts, most often a letter, and earn from 0 to 1 each. What a seat reads
is all that it may know. `expected` is the exact worth of a team of which the chances of every text are known, `landmarks` what the
best, the best single agent, a team of which each replies to chance, and chance itself are worth.

| name | difficulty |
|---|---|
| `sum_game` | many earn together, and few of them are heard of in the sum; free riders, noise |
| `relay` | each must answer the one before, and the last one's word pays |
| `hidden_sign` | half of what is earned depends on what one seat alone can see |
| `speaker` | one speaks, the others hear and answer; the speaker knows which letter is right and helps or lies, or it leads |
| `long_game` | many letters, paid one by one or at the end |
| `essay` | texts of any length of which one letter decides |
| `unequal` | tasks of unequal difficulty, which pay unequally for nothing |
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from string import ascii_uppercase
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, model_validator

from kapelle.environment import Outcome, Scripted
from kapelle.environments.base import BaseEnvironment, BaseWorld, need_movers
from kapelle.errors import ConfigError
from kapelle.runtime.randomness import derive_seed
from kapelle.types import Message, Split, Task

Said = tuple[tuple[int, str], ...]
"""Who (a seat, from 0) has said what, in order."""
Say = Callable[[int, str], Mapping[str, float]]
"""A seat and what it reads → the chance of each text."""


class Yardstick(BaseEnvironment, Scripted):
    """A game of finitely many cases; a subclass says who moves, what is seen, what is right and what has been earned."""

    seats: int = Field(default=2, ge=1, le=64)
    """Agents of the team."""
    letters: int = Field(default=4, ge=2, le=26)
    """How many letters there are to say, from `A` on."""
    noise: float = Field(default=0.0, ge=0.0, le=1.0)
    """Chance, for every seat by itself, that it is paid 1 less what it has earned, also where it can earn nothing; `expected` is without
    it."""

    @property
    def cases(self) -> int:
        """How many tasks there are; the task at an index is the case of that number, modulo this one."""
        return 1

    @property
    def alphabet(self) -> str:
        """The letters."""
        return ascii_uppercase[: self.letters]

    @property
    def texts(self) -> Sequence[str]:
        """What a seat may sensibly say."""
        return self.alphabet

    @abstractmethod
    def movers(self, case: int, said: Said) -> tuple[int, ...]:
        """Return the seats that speak next, all at once; nobody when it is over."""

    @abstractmethod
    def sees(self, case: int, seat: int, said: Said) -> str:
        """Return all that a seat may know."""

    @abstractmethod
    def right(self, case: int, seat: int, said: Said) -> str:
        """Return what a seat of the best team says."""

    @abstractmethod
    def earned(self, case: int, said: Said) -> tuple[float, ...]:
        """Return what each seat has earned by now."""

    def renamed(self, seat: int, seed: int) -> Mapping[str, str]:
        """Return a letter of the game → what a seat calls it in an episode; empty where all call it the same."""
        return {}

    def success(self, case: int, said: Said) -> float:
        """Return the share of the best team's earnings that has been earned."""
        best: Said = ()
        while self.movers(case, best):
            best = self.rightly(case, best)
        return min(1.0, sum(self.earned(case, said)) / sum(self.earned(case, best)))

    # -------- What it is worth, exactly

    def expected(self, say: Say) -> tuple[float, ...]:
        """Return what each seat earns on average over the cases, without noise."""
        paid = [self._expected(case, (), say) for case in range(self.cases)]
        return tuple(sum(column) / len(paid) for column in zip(*paid, strict=True))

    def _expected(self, case: int, said: Said, say: Say) -> tuple[float, ...]:
        movers = self.movers(case, said)
        if not movers:
            return self.earned(case, said)
        total = [0.0] * self.seats
        chances = [say(seat, self.sees(case, seat, said)) for seat in movers]
        for joint in product(*(each.items() for each in chances)):
            chance = 1.0
            for _, share in joint:
                chance *= share
            if chance:
                now = (*said, *zip(movers, (text for text, _ in joint), strict=True))
                for seat, paid in enumerate(self._expected(case, now, say)):
                    total[seat] += chance * paid
        return tuple(total)

    def landmarks(self) -> dict[str, float]:
        """Return what the team earns in all: at its best, with the best single agent among chance, where each replies to chance, by chance."""
        by_chance = dict.fromkeys(self.texts, 1 / len(self.texts))
        best = self._best()

        def mixed(seats: Sequence[int], replies: Mapping[tuple[int, str], str]) -> float:
            return sum(
                self.expected(lambda seat, seen: {replies[seat, seen]: 1.0} if seat in seats else by_chance)
            )

        everybody = range(self.seats)
        return {
            "optimum": mixed(everybody, best),
            "best single agent": max(mixed([seat], best) for seat in everybody),
            "each replies to chance": mixed(everybody, self._replies_to_chance(by_chance, best)),
            "chance": mixed([], {}),
        }

    def _best(self) -> dict[tuple[int, str], str]:
        """Return what the best team says, by seat and view."""
        found: dict[tuple[int, str], str] = {}
        for case in range(self.cases):
            open_: list[Said] = [()]
            seen: set[Said] = set()
            while open_:
                said = open_.pop()
                movers = self.movers(case, said)
                for seat in movers:
                    found[seat, self.sees(case, seat, said)] = self.right(case, seat, said)
                following = self._followed(said, movers) if len(movers) == 1 else [self.rightly(case, said)]
                fresh = [each for each in following if movers and each not in seen]
                seen.update(fresh)
                open_ += fresh
        return found

    def rightly(self, case: int, said: Said) -> Said:
        """Return what has been said once the best team's movers have spoken too."""
        return (*said, *((seat, self.right(case, seat, said)) for seat in self.movers(case, said)))

    def _followed(self, said: Said, movers: Sequence[int]) -> Iterator[Said]:
        return ((*said, (movers[0], text)) for text in self.texts)

    def _replies_to_chance(
        self, by_chance: Mapping[str, float], views: Mapping[tuple[int, str], str]
    ) -> dict[tuple[int, str], str]:
        """Return, for every view, the text that earns most while everybody else, and the seat elsewhere, speaks by chance."""

        def worth(view: tuple[int, str], text: str) -> float:
            return sum(self.expected(lambda *asked: {text: 1.0} if asked == view else by_chance))

        return {view: max(self.texts, key=lambda text: worth(view, text)) for view in views}

    # -------- As an environment

    @property
    def sources(self) -> Mapping[Split, str]:
        """The game itself; it has no held-out problems."""
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

    def start(self, task: Task, agents: Sequence[str], seed: int) -> YardstickWorld:
        """Begin an episode of a case."""
        self.check(agents)
        return YardstickWorld(self, task, agents, seed)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return a text by chance: a demonstration of the form alone."""
        return random.Random(f"{seed}/{agent}").choice(self.texts)


class YardstickWorld(BaseWorld):
    """An episode of a case."""

    def __init__(self, game: Yardstick, task: Task, agents: Sequence[str], seed: int) -> None:
        super().__init__(task, agents)
        self._game, self._case = game, int(task.data["case"])
        self._said: Said = ()
        draw = random.Random(f"{seed}/noise")
        renamed = [game.renamed(seat, seed) for seat, _ in enumerate(agents)]
        self._called = [str.maketrans(dict(own)) for own in renamed]
        """By seat, a letter of the game → what it reads and says in its place."""
        self._meant = [str.maketrans({called: letter for letter, called in own.items()}) for own in renamed]
        self._turned = [draw.random() < game.noise for _ in agents] if game.noise else [False] * len(agents)
        self._paid = self._now()

    def observe(self, agent: str) -> str:
        """Return all that the agent may know."""
        seat = self.agents.index(agent)
        return self._game.sees(self._case, seat, self._said).translate(self._called[seat])

    def movers(self) -> tuple[str, ...]:
        """Return who speaks next."""
        return tuple(self.agents[seat] for seat in self._game.movers(self._case, self._said))

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Hear what is said; pay what it has earned. EpisodeError unless exactly those spoke whose turn it was."""
        movers = self.movers()
        need_movers(actions, movers)
        for name in movers:
            seat = self.agents.index(name)
            self._said += ((seat, actions[name].strip().translate(self._meant[seat])),)
        before, self._paid = self._paid, self._now()
        over = not self._game.movers(self._case, self._said)
        if over and any(self._turned):
            self._paid = [
                1.0 - paid if turned else paid for paid, turned in zip(self._paid, self._turned, strict=True)
            ]
        return {
            name: now - then
            for name, now, then in zip(self.agents, self._paid, before, strict=True)
            if now != then
        }

    def _now(self) -> list[float]:
        return list(self._game.earned(self._case, self._said))

    def outcome(self) -> Outcome:
        """Return how well it went; what was earned is paid already."""
        return Outcome(
            rewards=dict.fromkeys(self.agents, 0.0),
            success=self._game.success(self._case, self._said),
            truncated=bool(self.movers()),
        )


def _texts_of(said: Said, seat: int) -> list[str]:
    return [text for speaker, text in said if speaker == seat]


class _SpeaksOnce(Yardstick):
    """Everybody speaks once, at the same time."""

    def movers(self, case: int, said: Said) -> tuple[int, ...]:
        """All, and then nobody."""
        return () if said else tuple(range(self.seats))


class SumGame(_SpeaksOnce):
    """Every seat has a letter of its own, which it reads nowhere; each that says it earns its share of 1.

    With `pays: all` nobody earns anything unless all are right. In another case other letters are right.
    """

    name: Literal["sum_game"] = "sum_game"
    pays: Literal["sum", "all"] = "sum"
    """Whether each that is right earns, or all of them when all are."""
    riders: int = Field(default=0, ge=0)
    """How many seats, the last ones, earn nothing whatever they say."""
    number_of_cases: int = Field(default=1, ge=1)
    """Tasks; each seat reads the task's number."""
    roles: int | None = Field(default=None, ge=1)
    """How many seats differ in what is right for them, one after another and again from the first; null lets all differ."""
    weights: tuple[Annotated[FiniteFloat, Field(gt=0)], ...] | None = None
    """How the 1 is shared out among the seats that earn, up to a factor; null gives each as much."""

    @model_validator(mode="after")
    def _somebody_earns(self) -> SumGame:
        if self.riders >= self.seats:
            raise ValueError(f"`riders: {self.riders}` leaves nobody of {self.seats} `seats` who earns.")
        if self.weights is not None and len(self.weights) != self.seats - self.riders:
            raise ValueError(
                f"`weights` are {len(self.weights)}, and {self.seats - self.riders} seats earn. Give one for each of them."
            )
        if self.weights is not None and self.pays == "all":
            raise ValueError(
                "`weights` share out a sum; with `pays: all` everybody earns alike. Remove them."
            )
        return self

    @property
    def cases(self) -> int:
        """Tasks."""
        return self.number_of_cases

    def sees(self, case: int, seat: int, said: Said) -> str:
        """Its place, and the task's number."""
        return f"{seat + 1}/{self.seats} {case}"

    def right(self, case: int, seat: int, said: Said) -> str:
        """Another letter for every role and case."""
        return self.alphabet[(seat % (self.roles or self.seats) + case) % self.letters]

    def earned(self, case: int, said: Said) -> tuple[float, ...]:
        """A share of 1 for each that is right."""
        hits = [text == self.right(case, seat, ()) for seat, text in said] or [False] * self.seats
        if self.pays == "all":
            hits = [all(hits[: self.seats - self.riders])] * self.seats
        return tuple(hit * share for hit, share in zip(hits, self._shares, strict=True))

    @property
    def _shares(self) -> tuple[float, ...]:
        """What each seat's letter is worth."""
        weights = self.weights or (1.0,) * (self.seats - self.riders)
        return (*(weight / sum(weights) for weight in weights), *[0.0] * self.riders)

    def expected(self, say: Say) -> tuple[float, ...]:
        """As for any game; what a seat earns in a sum depends on itself alone."""
        if self.pays == "all":
            return super().expected(say)
        return tuple(
            sum(
                say(seat, self.sees(case, seat, ())).get(self.right(case, seat, ()), 0.0)
                for case in range(self.cases)
            )
            * share
            / self.cases
            for seat, share in enumerate(self._shares)
        )


class Relay(Yardstick):
    """Each reads the letter before its own and must say the one that follows it; the last one earns 1 if all have.

    The first reads nothing, and says `A`.
    """

    name: Literal["relay"] = "relay"

    def movers(self, case: int, said: Said) -> tuple[int, ...]:
        """One after another."""
        return (len(said),) if len(said) < self.seats else ()

    def sees(self, case: int, seat: int, said: Said) -> str:
        """Its place, and the last letter."""
        return f"{seat + 1}/{self.seats} {said[-1][1] if said else ''}".strip()

    def right(self, case: int, seat: int, said: Said) -> str:
        """The letter that follows the last one, `A` after the last of the alphabet."""
        if not said:
            return "A"
        return self.alphabet[(self.alphabet.find(said[-1][1]) + 1) % self.letters]

    def earned(self, case: int, said: Said) -> tuple[float, ...]:
        """1 for the last seat, if all were right."""
        whole = len(said) == self.seats and all(
            text == self.right(case, seat, said[:seat]) for seat, text in said
        )
        return (*[0.0] * (self.seats - 1), float(whole))


class HiddenSign(_SpeaksOnce):
    """Everybody has a letter to say, and half of what is earned is a gift, or is none: the first seat alone sees which."""

    name: Literal["hidden_sign"] = "hidden_sign"

    @property
    def cases(self) -> int:
        """With the gift and without."""
        return 2

    def sees(self, case: int, seat: int, said: Said) -> str:
        """Its place; the first seat sees the sign too."""
        return f"{seat + 1}/{self.seats}{' +-'[case + 1 if seat == 0 else 0]}".strip()

    def right(self, case: int, seat: int, said: Said) -> str:
        """A letter for every seat."""
        return self.alphabet[seat % self.letters]

    def earned(self, case: int, said: Said) -> tuple[float, ...]:
        """Half a share of 1 for the right letter, and half for the gift."""
        if not said:
            return (0.0,) * self.seats
        return tuple(
            ((text == self.right(case, seat, ())) + (case == 0)) / (2 * self.seats) for seat, text in said
        )


class Speaker(Yardstick):
    """The first seat sees which letter is right and says one; the others hear it, and each that says the right one earns its share of 1.

    A speaker that helps earns what they earn together, one that lies 1 less that. One that leads sees nothing: what it says is
    right, and it earns what the others do. All letters are alike, so that exchanging two of them in all that is seen and said
    changes nothing.
    """

    name: Literal["speaker"] = "speaker"
    speaker: Literal["helps", "lies", "leads"] = "helps"
    """Whether the first seat earns when the others are right, or when they are wrong, or decides itself which letter is right."""
    other_play: bool = False
    """Whether the letters are renamed for every seat but the first, in all that it reads and says, at random in each episode: with such a
    partner no letter can come to stand for another one (other-play, 2003.02979). `expected` is without it."""

    @model_validator(mode="after")
    def _somebody_hears(self) -> Speaker:
        if self.seats < 2:
            raise ValueError("A speaker needs somebody who hears: set `seats: 2` or more.")
        return self

    @property
    def cases(self) -> int:
        """One for each letter; a single one where the speaker leads."""
        return 1 if self.speaker == "leads" else self.letters

    def movers(self, case: int, said: Said) -> tuple[int, ...]:
        """The speaker, then all others at once."""
        if not said:
            return (0,)
        return tuple(range(1, self.seats)) if len(said) == 1 else ()

    def sees(self, case: int, seat: int, said: Said) -> str:
        """The right letter for a speaker who does not lead, what was said for the others."""
        heard = said[0][1] if said else ""
        shown = "" if self.speaker == "leads" else self.alphabet[case]
        return f"{seat + 1}/{self.seats} {heard if seat else shown}".strip()

    def right(self, case: int, seat: int, said: Said) -> str:
        """A helper says it, and is believed; a leader says any letter, and is followed; after a liar there is nothing to know."""
        if self.speaker == "lies":
            return "A"
        return said[0][1] if seat else self.alphabet[case]

    def earned(self, case: int, said: Said) -> tuple[float, ...]:
        """Nothing before the end."""
        if len(said) < self.seats:
            return (0.0,) * self.seats
        heard = [hit / (self.seats - 1) for hit in self._hits(case, said)]
        helped = sum(heard)
        return (1.0 - helped if self.speaker == "lies" else helped, *heard)

    def success(self, case: int, said: Said) -> float:
        """Return the share of hearers who are right."""
        return sum(self._hits(case, said)) / (self.seats - 1)

    def _hits(self, case: int, said: Said) -> list[bool]:
        """Return whether each hearer is right."""
        wanted = said[0][1] if said and self.speaker == "leads" else self.alphabet[case]
        return [text == wanted and text in tuple(self.alphabet) for seat, text in said if seat]

    def renamed(self, seat: int, seed: int) -> Mapping[str, str]:
        """Return, with `other_play`, a letter of the game → what every seat but the first calls it in an episode."""
        letters = list(self.alphabet)
        if self.other_play and seat > 0:
            random.Random(derive_seed("other-play", seat, seed)).shuffle(letters)
        return dict(zip(self.alphabet, letters, strict=True))


class LongGame(Yardstick):
    """Everybody says a letter in each of several rounds, another right one each time, and earns its share of 1 for every right one."""

    name: Literal["long_game"] = "long_game"
    rounds: int = Field(default=4, ge=1)
    """Letters that each seat says, one after another."""
    paid: Literal["at_once", "at_the_end"] = "at_once"
    """When what a letter earns is paid."""

    def movers(self, case: int, said: Said) -> tuple[int, ...]:
        """Everybody, until the last round is over."""
        return tuple(range(self.seats)) if len(said) < self.rounds * self.seats else ()

    def sees(self, case: int, seat: int, said: Said) -> str:
        """Its place, and the round."""
        return f"{seat + 1}/{self.seats} {len(said) // self.seats}"

    def right(self, case: int, seat: int, said: Said) -> str:
        """Another letter in every round."""
        return self.alphabet[(seat + len(said) // self.seats) % self.letters]

    def earned(self, case: int, said: Said) -> tuple[float, ...]:
        """A share for every right letter."""
        if self.paid == "at_the_end" and self.movers(case, said):
            return (0.0,) * self.seats
        total = self.rounds * self.seats
        found = []
        for seat in range(self.seats):
            own = _texts_of(said, seat)
            found.append(
                sum(text == self.alphabet[(seat + k) % self.letters] for k, text in enumerate(own)) / total
            )
        return tuple(found)

    def expected(self, say: Say) -> tuple[float, ...]:
        """As for any game; every letter earns by itself."""
        found = [0.0] * self.seats
        for k in range(self.rounds):
            said = ((0, ""),) * (k * self.seats)
            for seat in range(self.seats):
                chance = say(seat, self.sees(0, seat, said)).get(self.right(0, seat, said), 0.0)
                found[seat] += chance / (self.rounds * self.seats)
        return tuple(found)


class Essay(_SpeaksOnce):
    """Everybody writes a text of any length; the letter at one place decides, and each that has `A` there earns its share of 1."""

    name: Literal["essay"] = "essay"
    place: int = Field(default=0, ge=0)
    """Of the letter that decides, from 0."""
    longest: int = Field(default=4, ge=1, le=64)
    """Letters of the longest text that `landmarks` counts with."""

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

    def sees(self, case: int, seat: int, said: Said) -> str:
        """Its place."""
        return f"{seat + 1}/{self.seats}"

    def right(self, case: int, seat: int, said: Said) -> str:
        """As many `A` as are needed."""
        return "A" * (self.place + 1)

    def earned(self, case: int, said: Said) -> tuple[float, ...]:
        """A share of 1 for each that has it."""
        if not said:
            return (0.0,) * self.seats
        return tuple(float(text[self.place : self.place + 1] == "A") / self.seats for _, text in said)

    def expected(self, say: Say) -> tuple[float, ...]:
        """As for any game; everybody earns by itself."""
        return tuple(
            sum(
                chance
                for text, chance in say(seat, self.sees(0, seat, ())).items()
                if text[self.place : self.place + 1] == "A"
            )
            / self.seats
            for seat in range(self.seats)
        )


class Unequal(_SpeaksOnce):
    """Tasks in which more or fewer letters are right; each pays something anyway, and the rest, by shares, to those who are right."""

    name: Literal["unequal"] = "unequal"
    right_letters: tuple[int, ...] = Field(default=(3, 1), min_length=1)
    """For each case, how many letters are right, from `A` on."""
    anyway: tuple[FiniteFloat, ...] = ()
    """For each case, what is paid for nothing, from 0 to 1; nothing where it is empty."""

    @model_validator(mode="after")
    def _fits(self) -> Unequal:
        if any(not 1 <= right <= self.letters for right in self.right_letters):
            raise ValueError(f"`right_letters` are from 1 to `letters: {self.letters}`.")
        if self.anyway and len(self.anyway) != len(self.right_letters):
            raise ValueError("`anyway` has one number for each of `right_letters`, or none.")
        if any(not 0.0 <= paid < 1.0 for paid in self.anyway):
            raise ValueError("`anyway` lies from 0 to less than 1.")
        return self

    @property
    def cases(self) -> int:
        """Tasks."""
        return len(self.right_letters)

    def sees(self, case: int, seat: int, said: Said) -> str:
        """Its place, and the task's number."""
        return f"{seat + 1}/{self.seats} {case}"

    def right(self, case: int, seat: int, said: Said) -> str:
        """The first letter always is."""
        return "A"

    def earned(self, case: int, said: Said) -> tuple[float, ...]:
        """What is paid anyway, and the rest for who is right."""
        if not said:
            return (0.0,) * self.seats
        gift = self.anyway[case] if self.anyway else 0.0
        good = self.alphabet[: self.right_letters[case]]
        return tuple(
            (gift + (1.0 - gift) * (len(text) == 1 and text in good)) / self.seats for _, text in said
        )
