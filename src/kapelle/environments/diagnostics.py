"""Diagnostic environments: small games with a known optimum, each with one difficulty that distinguishes algorithms.

A game has one case for each task. Each agent is one player; the parameter `seat` of the methods is its number, from 0. The players
write texts, most often a letter, in turn or at once, and each receives a reward from 0 to 1. An observation contains everything that a
player may know. `expected` computes the exact return of a team from its probability of every text. `landmarks` are the returns
of the best team, the best single agent, a team in which each agent gives its best reply to random play, and random play itself.

| name | difficulty |
|---|---|
| `sum_game` | many agents share a sum, in which the part of each is small; free riders, noise |
| `relay` | each agent must answer the one before, and only the last one receives a reward |
| `hidden_sign` | half of the reward depends on what one agent alone can see |
| `speaker` | one agent writes, the others read and answer; the speaker sees the correct letter and helps or misleads, or it leads |
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
"""The texts so far, in order: (player from 0, text)."""
Say = Callable[[int, str], Mapping[str, float]]
"""A policy: a player and its observation → the probability of each text."""


class Diagnostic(BaseEnvironment, Scripted):
    """A game of finitely many cases; a subclass defines who moves, the observations, the best texts and the rewards."""

    seats: int = Field(default=2, ge=1, le=64)
    """Agents of the team."""
    letters: int = Field(default=4, ge=2, le=26)
    """Number of letters, from `A` on."""
    noise: float = Field(default=0.0, ge=0.0, le=1.0)
    """Probability, for each player independently, that its reward r becomes 1 − r, even if it can never receive a reward.
    `expected` ignores it."""

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
        """The texts that `landmarks` considers for a player."""
        return self.alphabet

    @abstractmethod
    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return the players that write next, all at once; empty at the end."""

    @abstractmethod
    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the observation of a player."""

    @abstractmethod
    def right(self, case: int, seat: int, history: History) -> str:
        """Return the text that a player of the best team writes."""

    @abstractmethod
    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return each player's reward so far."""

    def renamed(self, seat: int, seed: int) -> Mapping[str, str]:
        """Return a letter of the game → its name for a player in an episode; empty if all names are equal."""
        return {}

    def success(self, case: int, history: History) -> float:
        """Return the team's reward as a share of the best team's."""
        best: History = ()
        while self.movers(case, best):
            best = self.rightly(case, best)
        return min(1.0, sum(self.earned(case, history)) / sum(self.earned(case, best)))

    # -------- Exact values

    def expected(self, say: Say) -> tuple[float, ...]:
        """Return each player's expected reward over the cases, without noise."""
        by_case = [self._expected(case, (), say) for case in range(self.cases)]
        return tuple(sum(column) / len(by_case) for column in zip(*by_case, strict=True))

    def _expected(self, case: int, history: History, policy: Say) -> tuple[float, ...]:
        movers = self.movers(case, history)
        if not movers:
            return self.earned(case, history)
        total = [0.0] * self.seats
        policies = [policy(player, self.sees(case, player, history)) for player in movers]
        for joint in product(*(each.items() for each in policies)):
            probability = 1.0
            for _, share in joint:
                probability *= share
            if probability:
                now = (*history, *zip(movers, (text for text, _ in joint), strict=True))
                for player, reward in enumerate(self._expected(case, now, policy)):
                    total[player] += probability * reward
        return tuple(total)

    def landmarks(self) -> dict[str, float]:
        """Return the team's total reward: best team, best agent among random players, replies to random play, random play."""
        chance = dict.fromkeys(self.texts, 1 / len(self.texts))
        best = self._best()

        def mixed(players: Sequence[int], replies: Mapping[tuple[int, str], str]) -> float:
            return sum(
                self.expected(
                    lambda player, seen: {replies[player, seen]: 1.0} if player in players else chance
                )
            )

        def value(view: tuple[int, str], text: str) -> float:
            """Return the team's reward if one player writes a text at one observation, and everything else is random."""
            return sum(self.expected(lambda *other: {text: 1.0} if other == view else chance))

        all_players = range(self.seats)
        replies = {view: max(self.texts, key=lambda text: value(view, text)) for view in best}
        return {
            "optimum": mixed(all_players, best),
            "best single agent": max(mixed([player], best) for player in all_players),
            "each replies to chance": mixed(all_players, replies),
            "chance": mixed([], {}),
        }

    def _best(self) -> dict[tuple[int, str], str]:
        """Return the texts of the best team, by player and observation."""
        found: dict[tuple[int, str], str] = {}
        for case in range(self.cases):
            waiting: list[History] = [()]
            seen: set[History] = set()
            while waiting:
                history = waiting.pop()
                movers = self.movers(case, history)
                for player in movers:
                    found[player, self.sees(case, player, history)] = self.right(case, player, history)
                following = [self.rightly(case, history)]
                if len(movers) == 1:  # the others must also answer texts that are not the best
                    following = [(*history, (movers[0], text)) for text in self.texts]
                new = [each for each in following if movers and each not in seen]
                seen.update(new)
                waiting += new
        return found

    def rightly(self, case: int, history: History) -> History:
        """Return the texts after the best team's next move."""
        return (
            *history,
            *((player, self.right(case, player, history)) for player in self.movers(case, history)),
        )

    # -------- As an environment

    @property
    def sources(self) -> Mapping[Split, str]:
        """The same game, in both splits."""
        return {
            "train": f"the {self.cases} cases of the game",
            "test": "the same cases: a game has nothing to hold out",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError unless there is one agent for each player."""
        if len(agents) != self.seats:
            raise ConfigError(
                f"`environment.seats` is {self.seats}, but the team has {len(agents)} agents ({', '.join(agents)}). "
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
        """Return a random text, which demonstrates only the form."""
        return random.Random(f"{seed}/{agent}").choice(self.texts)


class DiagnosticState(BaseState):
    """An episode of a case."""

    def __init__(self, game: Diagnostic, task: Task, agents: Sequence[str], seed: int) -> None:
        super().__init__(task, agents)
        self._game, self._case = game, int(task.data["case"])
        self._history: History = ()
        draw = random.Random(f"{seed}/noise")
        names = [game.renamed(player, seed) for player, _ in enumerate(agents)]
        self._to_player = [str.maketrans(dict(own)) for own in names]
        """By player: a letter of the game → its name for the player."""
        self._to_game = [str.maketrans({name: letter for letter, name in own.items()}) for own in names]
        self._flipped = [draw.random() < game.noise for _ in agents] if game.noise else [False] * len(agents)
        self._earned = list(game.earned(self._case, ()))

    def observe(self, agent: str) -> str:
        """Return the agent's observation."""
        player = self.agents.index(agent)
        return self._game.sees(self._case, player, self._history).translate(self._to_player[player])

    def movers(self) -> tuple[str, ...]:
        """Return the agents that write next."""
        return tuple(self.agents[player] for player in self._game.movers(self._case, self._history))

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Take the texts and return the new rewards; EpisodeError unless exactly the movers acted."""
        movers = self.movers()
        need_movers(actions, movers)
        for name in movers:
            player = self.agents.index(name)
            self._history += ((player, actions[name].strip().translate(self._to_game[player])),)
        before, self._earned = self._earned, list(self._game.earned(self._case, self._history))
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
            success=self._game.success(self._case, self._history),
            truncated=bool(self.movers()),
        )


class _OneText(Diagnostic):
    """Every player writes one text, all at once, and its reward depends on its own text alone."""

    @abstractmethod
    def reward(self, case: int, seat: int, text: str) -> float:
        """Return the reward of a player's text."""

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return all players at the start, and none after their texts."""
        return () if history else tuple(range(self.seats))

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return each player's own reward."""
        if not history:
            return (0.0,) * self.seats
        return tuple(self.reward(case, player, text) for player, text in history)

    def expected(self, say: Say) -> tuple[float, ...]:
        """Return the same as `Diagnostic.expected`, without enumerating joint texts."""
        found = [0.0] * self.seats
        for player in range(self.seats):
            for case in range(self.cases):
                policy = say(player, self.sees(case, player, ()))
                found[player] += sum(
                    share * self.reward(case, player, text) for text, share in policy.items()
                )
        return tuple(each / self.cases for each in found)


class SumGame(_OneText):
    """Each player has its own correct letter, which it cannot observe; it receives its share of 1 for this letter.

    With `pays: all` all players must be correct for any reward. The correct letters differ between cases.
    """

    name: Literal["sum_game"] = "sum_game"
    pays: Literal["sum", "all"] = "sum"
    """Whether each correct player receives a reward, or all of them if all are correct."""
    riders: int = Field(default=0, ge=0)
    """Number of players, the last ones, that never receive a reward."""
    number_of_cases: int = Field(default=1, ge=1)
    """Tasks; each player reads the task's number."""
    roles: int | None = Field(default=None, ge=1)
    """Number of players with different correct letters; the next players repeat them in order. null: all differ."""
    weights: tuple[Annotated[FiniteFloat, Field(gt=0)], ...] | None = None
    """Shares of the 1 for the players that receive a reward, up to a factor; null: equal shares."""

    @model_validator(mode="after")
    def _check_earners(self) -> SumGame:
        earners = self.seats - self.riders
        if earners < 1:
            raise ValueError(f"`riders: {self.riders}` must be less than `seats: {self.seats}`.")
        if self.weights is not None and len(self.weights) != earners:
            raise ValueError(
                f"`weights` has {len(self.weights)} entries for {earners} seats with a reward. Give one for each."
            )
        if self.weights is not None and self.pays == "all":
            raise ValueError(
                "`weights` has no effect with `pays: all`, where all rewards are equal. Remove it."
            )
        return self

    @property
    def cases(self) -> int:
        """Tasks."""
        return self.number_of_cases

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the player's place and the task's number."""
        return f"{seat + 1}/{self.seats} {case}"

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the correct letter, which differs by role and case."""
        return self.alphabet[(seat % (self.roles or self.seats) + case) % self.letters]

    def reward(self, case: int, seat: int, text: str) -> float:
        """Return the player's share for the correct letter."""
        return (text == self.right(case, seat, ())) * self._share(seat)

    def _share(self, player: int) -> float:
        earners = self.seats - self.riders
        if player >= earners:
            return 0.0
        return 1.0 / earners if self.weights is None else self.weights[player] / sum(self.weights)

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return a share of 1 for each correct player; with `pays: all`, shares for all players or none."""
        own = super().earned(case, history)
        if self.pays == "sum":
            return own
        correct = bool(history) and all(own[: self.seats - self.riders])
        return tuple(correct * self._share(player) for player in range(self.seats))

    def expected(self, say: Say) -> tuple[float, ...]:
        """Return the expected rewards, by enumeration if players depend on each other."""
        return Diagnostic.expected(self, say) if self.pays == "all" else super().expected(say)


class Relay(Diagnostic):
    """Each player reads the letter before its own and must write the one that follows it; the last one receives 1 if all did.

    The first player reads nothing, and writes `A`.
    """

    name: Literal["relay"] = "relay"

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return the players one after another."""
        return (len(history),) if len(history) < self.seats else ()

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the player's place and the last letter."""
        return f"{seat + 1}/{self.seats} {history[-1][1] if history else ''}".strip()

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the letter that follows the last one, `A` after the last of the alphabet."""
        if not history:
            return "A"
        return self.alphabet[(self.alphabet.find(history[-1][1]) + 1) % self.letters]

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return 1 for the last player if all players were correct."""
        whole = len(history) == self.seats and all(
            text == self.right(case, player, history[:player]) for player, text in history
        )
        return (*[0.0] * (self.seats - 1), float(whole))


class HiddenSign(_OneText):
    """Each player has a letter to write, and half of the reward is a gift or missing: the first player alone sees which."""

    name: Literal["hidden_sign"] = "hidden_sign"

    @property
    def cases(self) -> int:
        """Two: with the gift and without."""
        return 2

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the player's place; the first player also sees the sign."""
        return f"{seat + 1}/{self.seats}{' +-'[case + 1 if seat == 0 else 0]}".strip()

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the player's letter."""
        return self.alphabet[seat % self.letters]

    def reward(self, case: int, seat: int, text: str) -> float:
        """Return half a share of 1 for the correct letter, and half for the gift."""
        return ((text == self.right(case, seat, ())) + (case == 0)) / (2 * self.seats)


class Speaker(Diagnostic):
    """The first player sees the correct letter and writes one; the others read it and answer.

    Each of the others receives its share of 1 for the correct letter. A speaker that helps receives their total r, one that lies 1 − r. A speaker that leads sees nothing: its own letter is
    correct, and it receives r. All letters are interchangeable: exchanging two of them everywhere changes nothing.
    """

    name: Literal["speaker"] = "speaker"
    speaker: Literal["helps", "lies", "leads"] = "helps"
    """Whether the first player is rewarded if the others are correct, or if they are incorrect, or chooses the correct letter."""
    other_play: bool = False
    """Whether each player but the first reads and writes the letters under other names, drawn in each episode. With such a partner
    no letter can become a code for another one (other-play, 2003.02979). `expected` ignores it."""

    @model_validator(mode="after")
    def _check_readers(self) -> Speaker:
        if self.seats < 2:
            raise ValueError("The speaker needs a listener. Set `seats` to 2 or more.")
        return self

    @property
    def cases(self) -> int:
        """One for each letter; a single one if the speaker leads."""
        return 1 if self.speaker == "leads" else self.letters

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return the speaker, then all others at once."""
        if not history:
            return (0,)
        return tuple(range(1, self.seats)) if len(history) == 1 else ()

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the correct letter for a speaker that helps or lies; the speaker's text for the others."""
        message = history[0][1] if history else ""
        secret = "" if self.speaker == "leads" else self.alphabet[case]
        return f"{seat + 1}/{self.seats} {message if seat else secret}".strip()

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the correct letter for a helper and its readers, any letter for a leader, a constant text with a liar."""
        if self.speaker == "lies":
            return "A"
        return history[0][1] if seat else self.alphabet[case]

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return the rewards at the end, and 0 before."""
        if len(history) < self.seats:
            return (0.0,) * self.seats
        shares = [hit / (self.seats - 1) for hit in self._hits(case, history)]
        total = sum(shares)
        return (1.0 - total if self.speaker == "lies" else total, *shares)

    def success(self, case: int, history: History) -> float:
        """Return the share of readers with the correct letter."""
        return sum(self._hits(case, history)) / (self.seats - 1)

    def _hits(self, case: int, history: History) -> list[bool]:
        """Return whether each reader is correct."""
        wanted = history[0][1] if history and self.speaker == "leads" else self.alphabet[case]
        return [text == wanted and text in tuple(self.alphabet) for player, text in history if player]

    def renamed(self, seat: int, seed: int) -> Mapping[str, str]:
        """Return, with `other_play`, a letter of the game → its name for a player in an episode."""
        letters = list(self.alphabet)
        if self.other_play and seat > 0:
            random.Random(derive_seed("other-play", seat, seed)).shuffle(letters)
        return dict(zip(self.alphabet, letters, strict=True))


class LongGame(Diagnostic):
    """Each player writes a letter in each of several rounds and receives its share of 1 for each correct one.

    The correct letter changes from round to round.
    """

    name: Literal["long_game"] = "long_game"
    rounds: int = Field(default=4, ge=1)
    """Letters of each player, one after another."""
    rewarded: Literal["at_once", "at_the_end"] = "at_once"
    """When the rewards are given."""

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return all players until the last round ends."""
        return tuple(range(self.seats)) if len(history) < self.rounds * self.seats else ()

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the player's place and the round."""
        return f"{seat + 1}/{self.seats} {len(history) // self.seats}"

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the correct letter of the round."""
        return self.alphabet[(seat + len(history) // self.seats) % self.letters]

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return a share for every correct letter."""
        found = [0] * self.seats
        if self.rewarded == "at_once" or not self.movers(case, history):
            for k, (player, text) in enumerate(history):
                found[player] += text == self.alphabet[(player + k // self.seats) % self.letters]
        return tuple(each / (self.rounds * self.seats) for each in found)

    def expected(self, say: Say) -> tuple[float, ...]:
        """Return the same as `Diagnostic.expected` without enumerating joint texts: each letter is rewarded independently."""
        found = [0.0] * self.seats
        for k in range(self.rounds):
            history = ((0, ""),) * (k * self.seats)
            for player in range(self.seats):
                chance = say(player, self.sees(0, player, history)).get(self.right(0, player, history), 0.0)
                found[player] += chance / (self.rounds * self.seats)
        return tuple(found)


class Essay(_OneText):
    """Each player writes a text of any length; it receives its share of 1 if the letter at one place is `A`."""

    name: Literal["essay"] = "essay"
    place: int = Field(default=0, ge=0)
    """Place of the letter that decides, from 0."""
    longest: int = Field(default=4, ge=1, le=64)
    """Letters of the longest text that `landmarks` considers."""

    @model_validator(mode="after")
    def _has_the_place(self) -> Essay:
        if self.place >= self.longest:
            raise ValueError(
                f"`place: {self.place}` must be less than `longest: {self.longest}`, the length of a text."
            )
        return self

    @property
    def texts(self) -> Sequence[str]:
        """A text for each letter that decides."""
        return [letter * (self.place + 1) for letter in self.alphabet]

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the player's place."""
        return f"{seat + 1}/{self.seats}"

    def right(self, case: int, seat: int, history: History) -> str:
        """Return as many `A` as needed."""
        return "A" * (self.place + 1)

    def reward(self, case: int, seat: int, text: str) -> float:
        """Return a share of 1 for the letter `A` at the place."""
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
            raise ValueError(f"Each of `right_letters` must be from 1 to `letters: {self.letters}`.")
        if self.anyway and len(self.anyway) != len(self.right_letters):
            raise ValueError("`anyway` needs one number for each of `right_letters`, or must be empty.")
        if any(not 0.0 <= gift < 1.0 for gift in self.anyway):
            raise ValueError("Each number of `anyway` must be at least 0 and less than 1.")
        return self

    @property
    def cases(self) -> int:
        """Tasks."""
        return len(self.right_letters)

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the player's place and the task's number."""
        return f"{seat + 1}/{self.seats} {case}"

    def right(self, case: int, seat: int, history: History) -> str:
        """Return `A`, which is correct in every case."""
        return "A"

    def reward(self, case: int, seat: int, text: str) -> float:
        """Return the reward for any text, plus the rest for a correct letter."""
        gift = self.anyway[case] if self.anyway else 0.0
        correct = len(text) == 1 and text in self.alphabet[: self.right_letters[case]]
        return (gift + (1.0 - gift) * correct) / self.seats
