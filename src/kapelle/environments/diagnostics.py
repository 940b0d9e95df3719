"""Diagnostic environments: small games with a known optimum. Each game has one difficulty that distinguishes algorithms.

A game has one case for each task. Each agent is one player; the parameter `seat` of the methods is the player's number, from 0. The
players write texts (usually one letter), in turn or simultaneously, and each receives a reward from 0 to 1. An observation contains
everything that a player may know. `expected` computes the exact return of a team from its probability of every text. `landmarks` gives
the returns of the best team, the best single agent, a team whose agents each give their best reply to random play, and random play.

| name | difficulty |
|---|---|
| `sum_game` | many agents share a sum to which each contributes little; free riders, noise |
| `relay` | each agent must reply to the previous agent, and only the last agent receives a reward |
| `hidden_sign` | half of the reward depends on what one agent alone can see |
| `speaker` | one agent writes, and the others read and reply; the speaker sees the correct letter and helps or misleads, or it leads |
| `long_game` | many letters, each rewarded at once or all at the end |
| `essay` | texts of any length, of which one letter decides the reward |
| `unequal` | tasks of unequal difficulty, with unequal rewards for an arbitrary text |
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
"""A policy: maps a player and its observation to the probability of each text."""


class Diagnostic(BaseEnvironment, Scripted):
    """A game with a finite number of cases; a subclass defines the order of play, the observations, the optimal texts and the rewards."""

    seats: int = Field(default=2, ge=1, le=64)
    """Number of agents in the team."""
    letters: int = Field(default=4, ge=2, le=26)
    """Number of letters, starting with `A`."""
    noise: float = Field(default=0.0, ge=0.0, le=1.0)
    """Probability that a player's reward r becomes 1 − r, drawn independently for each player, including players that otherwise
    never receive a reward. `expected` ignores the noise."""

    @property
    def cases(self) -> int:
        """Number of different tasks; the task at an index is the case `index % cases`."""
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
        """Return the players that write next, simultaneously; empty at the end."""

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
        """Return a mapping from each letter of the game to its name for a player in an episode; empty if letters keep their names."""
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
        """Return the total reward of the best team, the best agent among random players, replies to random play, and random play."""
        chance = dict.fromkeys(self.texts, 1 / len(self.texts))
        best = self._best()

        def mixed(players: Sequence[int], replies: Mapping[tuple[int, str], str]) -> float:
            return sum(
                self.expected(
                    lambda player, seen: {replies[player, seen]: 1.0} if player in players else chance
                )
            )

        def value(view: tuple[int, str], text: str) -> float:
            """Return the team's reward if one player writes a given text at one observation and everything else is random."""
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
                if len(movers) == 1:  # the other players must also reply to suboptimal texts
                    following = [(*history, (movers[0], text)) for text in self.texts]
                new = [each for each in following if movers and each not in seen]
                seen.update(new)
                waiting += new
        return found

    def rightly(self, case: int, history: History) -> History:
        """Return the history after the best team's next move."""
        return (
            *history,
            *((player, self.right(case, player, history)) for player in self.movers(case, history)),
        )

    # -------- As an environment

    @property
    def sources(self) -> Mapping[Split, str]:
        """Describe the game, which is the same in both splits."""
        return {
            "train": f"the {self.cases} cases of the game",
            "test": "the same cases (a game has no held-out tasks)",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError unless there is one agent for each player."""
        if len(agents) != self.seats:
            raise ConfigError(
                f"`environment.seats` is {self.seats}, but the team has {len(agents)} agents ({', '.join(agents)}). "
                f"Set `environment.seats: {len(agents)}`, or define {self.seats} agents in `team.agents`."
            )

    def task(self, split: Split, index: int) -> Task:
        """Return a case by its number."""
        return Task(f"{split}-{index}", "", {"case": index % self.cases})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> DiagnosticState:
        """Start an episode of a case."""
        self.check(agents)
        return DiagnosticState(self, task, agents, seed)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return a random text, which demonstrates only the format."""
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
        """For each player: a letter of the game → its name for the player."""
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
        """Take the texts and return the new rewards; raise EpisodeError unless exactly the movers acted."""
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
        """Return the success alone, because `step` has already returned all rewards."""
        return Outcome(
            rewards=dict.fromkeys(self.agents, 0.0),
            success=self._game.success(self._case, self._history),
            truncated=bool(self.movers()),
        )


class _OneText(Diagnostic):
    """All players write one text simultaneously, and the reward of each depends only on its own text."""

    @abstractmethod
    def reward(self, case: int, seat: int, text: str) -> float:
        """Return the reward of a player's text."""

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return all players at the start, and no players after they have written."""
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
    """Each player has its own correct letter, which it cannot observe; for this letter it receives its share of 1.

    With `pays: all`, no player receives a reward unless all are correct. The correct letters differ between cases.
    """

    name: Literal["sum_game"] = "sum_game"
    pays: Literal["sum", "all"] = "sum"
    """`sum`: each correct player receives its reward. `all`: players receive rewards only if all of them are correct."""
    riders: int = Field(default=0, ge=0)
    """Number of players that never receive a reward; they are the last ones."""
    number_of_cases: int = Field(default=1, ge=1)
    """Number of tasks; each player reads the task's number."""
    roles: int | None = Field(default=None, ge=1)
    """Number of players with different correct letters; the players after them repeat these letters in order. null: all letters differ."""
    weights: tuple[Annotated[FiniteFloat, Field(gt=0)], ...] | None = None
    """Relative shares of the players that receive a reward; null: equal shares."""

    @model_validator(mode="after")
    def _check_earners(self) -> SumGame:
        earners = self.seats - self.riders
        if earners < 1:
            raise ValueError(f"`riders: {self.riders}` must be less than `seats: {self.seats}`.")
        if self.weights is not None and len(self.weights) != earners:
            raise ValueError(
                f"`weights` has {len(self.weights)} entries, but {earners} players receive a reward. Give one weight for each."
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
        """Return the player's position and the task's number."""
        return f"{seat + 1}/{self.seats} {case}"

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the correct letter, which depends on the role and the case."""
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
        """Return the share of each correct player; with `pays: all`, all players receive their shares, or none does."""
        own = super().earned(case, history)
        if self.pays == "sum":
            return own
        correct = bool(history) and all(own[: self.seats - self.riders])
        return tuple(correct * self._share(player) for player in range(self.seats))

    def expected(self, say: Say) -> tuple[float, ...]:
        """Return the expected rewards, by enumeration if players depend on each other."""
        return Diagnostic.expected(self, say) if self.pays == "all" else super().expected(say)


class Relay(Diagnostic):
    """Each player reads the previous player's letter and must write the next letter; the last player receives 1 if all did so.

    The first player reads nothing, and writes `A`.
    """

    name: Literal["relay"] = "relay"

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return the players one after another."""
        return (len(history),) if len(history) < self.seats else ()

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the player's position and the last letter."""
        return f"{seat + 1}/{self.seats} {history[-1][1] if history else ''}".strip()

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the letter after the last one that was written; `A` follows the last letter of the alphabet."""
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
    """Each player has a letter to write. Half of the reward is a gift that is present or absent; only the first player sees which."""

    name: Literal["hidden_sign"] = "hidden_sign"

    @property
    def cases(self) -> int:
        """Two: with the gift and without."""
        return 2

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the player's position; the first player also sees the sign."""
        return f"{seat + 1}/{self.seats}{' +-'[case + 1 if seat == 0 else 0]}".strip()

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the player's letter."""
        return self.alphabet[seat % self.letters]

    def reward(self, case: int, seat: int, text: str) -> float:
        """Return half a share of 1 for the correct letter, and half for the gift."""
        return ((text == self.right(case, seat, ())) + (case == 0)) / (2 * self.seats)


class Speaker(Diagnostic):
    """The first player, the speaker, sees the correct letter and writes a letter; the other players read it and reply.

    Each of the other players receives its share of 1 for the correct letter, and r is their total reward. A speaker that helps
    receives r, and a speaker that lies receives 1 − r. A speaker that leads sees no letter: the letter that it writes is correct, and
    it receives r. All letters are interchangeable: swapping two letters everywhere changes nothing.
    """

    name: Literal["speaker"] = "speaker"
    speaker: Literal["helps", "lies", "leads"] = "helps"
    """Whether the first player is rewarded if the others are correct or if they are incorrect, or itself chooses the correct letter."""
    other_play: bool = False
    """Whether letters are renamed at random in each episode for every player but the first. With such partners, no letter can become
    a code for another letter (other-play, 2003.02979). `expected` ignores this setting."""

    @model_validator(mode="after")
    def _check_readers(self) -> Speaker:
        if self.seats < 2:
            raise ValueError("The speaker needs a listener. Set `seats` to 2 or more.")
        return self

    @property
    def cases(self) -> int:
        """One case for each letter; a single case if the speaker leads."""
        return 1 if self.speaker == "leads" else self.letters

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return the speaker, then all other players simultaneously."""
        if not history:
            return (0,)
        return tuple(range(1, self.seats)) if len(history) == 1 else ()

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the correct letter to a speaker that helps or lies, and the speaker's text to the other players."""
        message = history[0][1] if history else ""
        secret = "" if self.speaker == "leads" else self.alphabet[case]
        return f"{seat + 1}/{self.seats} {message if seat else secret}".strip()

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the correct letter for a speaker that helps and its readers, any letter for one that leads, a constant text if it lies."""
        if self.speaker == "lies":
            return "A"
        return history[0][1] if seat else self.alphabet[case]

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return the rewards after the last move, and 0 for each player before it."""
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
        """Return, with `other_play`, a mapping from each letter of the game to its name for a player in an episode."""
        letters = list(self.alphabet)
        if self.other_play and seat > 0:
            random.Random(derive_seed("other-play", seat, seed)).shuffle(letters)
        return dict(zip(self.alphabet, letters, strict=True))


class LongGame(Diagnostic):
    """Each player writes a letter in each of several rounds and receives its share of 1 for each correct letter.

    The correct letter changes from round to round.
    """

    name: Literal["long_game"] = "long_game"
    rounds: int = Field(default=4, ge=1)
    """Number of letters that each player writes, one per round."""
    rewarded: Literal["at_once", "at_the_end"] = "at_once"
    """When the rewards are given."""

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return all players until the last round ends."""
        return tuple(range(self.seats)) if len(history) < self.rounds * self.seats else ()

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the player's position and the round."""
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
        """Return the same as `Diagnostic.expected` without enumerating joint texts, since each letter is rewarded independently."""
        found = [0.0] * self.seats
        for k in range(self.rounds):
            history = ((0, ""),) * (k * self.seats)
            for player in range(self.seats):
                chance = say(player, self.sees(0, player, history)).get(self.right(0, player, history), 0.0)
                found[player] += chance / (self.rounds * self.seats)
        return tuple(found)


class Essay(_OneText):
    """Each player writes a text of any length and receives its share of 1 if the letter at one position is `A`."""

    name: Literal["essay"] = "essay"
    place: int = Field(default=0, ge=0)
    """Position of the letter that decides, from 0."""
    longest: int = Field(default=4, ge=1, le=64)
    """Length of the longest text that `landmarks` considers, in letters."""

    @model_validator(mode="after")
    def _has_the_place(self) -> Essay:
        if self.place >= self.longest:
            raise ValueError(
                f"`place: {self.place}` must be less than `longest: {self.longest}`, the length of a text."
            )
        return self

    @property
    def texts(self) -> Sequence[str]:
        """One text for each possible value of the letter that decides."""
        return [letter * (self.place + 1) for letter in self.alphabet]

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the player's position."""
        return f"{seat + 1}/{self.seats}"

    def right(self, case: int, seat: int, history: History) -> str:
        """Return as many `A`s as needed to reach the position."""
        return "A" * (self.place + 1)

    def reward(self, case: int, seat: int, text: str) -> float:
        """Return a share of 1 for the letter `A` at the position."""
        return float(text[self.place : self.place + 1] == "A") / self.seats


class Unequal(_OneText):
    """Tasks with different numbers of correct letters; each gives some reward for any text, and the rest for a correct letter."""

    name: Literal["unequal"] = "unequal"
    right_letters: tuple[int, ...] = Field(default=(3, 1), min_length=1)
    """For each case, the number of correct letters, starting with `A`."""
    anyway: tuple[FiniteFloat, ...] = ()
    """For each case, the reward for any text, at least 0 and less than 1; empty: 0 for all cases."""

    @model_validator(mode="after")
    def _fits(self) -> Unequal:
        if any(not 1 <= right <= self.letters for right in self.right_letters):
            raise ValueError(
                f"Each number in `right_letters` must be from 1 to {self.letters}, the value of `letters`."
            )
        if self.anyway and len(self.anyway) != len(self.right_letters):
            raise ValueError("`anyway` needs one number for each entry of `right_letters`, or must be empty.")
        if any(not 0.0 <= gift < 1.0 for gift in self.anyway):
            raise ValueError("Each number in `anyway` must be at least 0 and less than 1.")
        return self

    @property
    def cases(self) -> int:
        """Tasks."""
        return len(self.right_letters)

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the player's position and the task's number."""
        return f"{seat + 1}/{self.seats} {case}"

    def right(self, case: int, seat: int, history: History) -> str:
        """Return `A`, which is correct in every case."""
        return "A"

    def reward(self, case: int, seat: int, text: str) -> float:
        """Return the reward for any text, plus the rest for a correct letter."""
        gift = self.anyway[case] if self.anyway else 0.0
        correct = len(text) == 1 and text in self.alphabet[: self.right_letters[case]]
        return (gift + (1.0 - gift) * correct) / self.seats
