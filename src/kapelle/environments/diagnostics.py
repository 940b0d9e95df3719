"""Diagnostic environments: small games whose optimum is known. Each game has one difficulty that distinguishes algorithms.

A game has a finite number of cases, and each task is one of them. Each agent is one player; the parameter `seat` of the methods is
the number of the player, counted from 0. The players write texts (usually one letter), in turn or simultaneously, and each player
receives a reward from 0 to 1. An observation contains everything that a player may know. The method `expected` computes the exact
return of a team from the probability with which each player writes each text. The method `landmarks` computes reference returns: of
the best team, of the best single agent among random players, of players that each give their best reply to random play, and of
random play.

| name | difficulty |
|---|---|
| `sum_game` | many agents share a reward to which each contributes little; there can be free riders and noise |
| `relay` | each agent must reply to the previous agent, and only the last agent receives a reward |
| `hidden_sign` | half of the reward depends on a sign that only one agent observes |
| `speaker` | one agent writes, and the others read and reply; the speaker knows the correct letter and helps or misleads, or it leads |
| `long_game` | many letters, each rewarded immediately or all rewarded at the end |
| `essay` | texts of any length, of which one letter determines the reward |
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
"""The texts that were written so far, in order, as pairs (player, text). Players are numbered from 0."""
Say = Callable[[int, str], Mapping[str, float]]
"""A policy as a function that takes a player and its observation and returns the probability of each text."""


class Diagnostic(BaseEnvironment, Scripted):
    """Base class of games with a finite number of cases.

    A subclass defines the order of play, the observations, the optimal texts and the rewards.
    """

    seats: int = Field(default=2, ge=1, le=64)
    """The number of agents in the team."""
    letters: int = Field(default=4, ge=2, le=26)
    """The number of letters in the alphabet, which starts with `A`."""
    noise: float = Field(default=0.0, ge=0.0, le=1.0)
    """The probability that the reward r of a player becomes 1 − r. The noise is independent for each player and also applies to
    players that otherwise never receive a reward. The method `expected` ignores the noise."""

    @property
    def cases(self) -> int:
        """The number of different tasks. The task at an index is the case `index % cases`."""
        return 1

    @property
    def alphabet(self) -> str:
        """The letters of the game as a string."""
        return ascii_uppercase[: self.letters]

    @property
    def texts(self) -> Sequence[str]:
        """The texts that `landmarks` considers for each player."""
        return self.alphabet

    @abstractmethod
    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return the players that write next (simultaneously), or an empty tuple at the end of the game."""

    @abstractmethod
    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the observation of a player."""

    @abstractmethod
    def right(self, case: int, seat: int, history: History) -> str:
        """Return the text that a player of the best team writes."""

    @abstractmethod
    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return the reward of each player so far."""

    def renamed(self, seat: int, seed: int) -> Mapping[str, str]:
        """Return a mapping from each letter of the game to its name for one player in one episode.

        The mapping is empty if the letters keep their names.
        """
        return {}

    def success(self, case: int, history: History) -> float:
        """Return the reward of the team divided by the reward of the best team."""
        best: History = ()
        while self.movers(case, best):
            best = self.rightly(case, best)
        return min(1.0, sum(self.earned(case, history)) / sum(self.earned(case, best)))

    # -------- Exact values

    def expected(self, say: Say) -> tuple[float, ...]:
        """Return the expected reward of each player without noise, averaged over all cases."""
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
        """Return the total rewards of four reference teams.

        The teams are the best team, the best single agent among random players, players that each give their best reply to random
        play, and random players.
        """
        chance = dict.fromkeys(self.texts, 1 / len(self.texts))
        best = self._best()

        def mixed(players: Sequence[int], replies: Mapping[tuple[int, str], str]) -> float:
            return sum(
                self.expected(
                    lambda player, seen: {replies[player, seen]: 1.0} if player in players else chance
                )
            )

        def value(view: tuple[int, str], text: str) -> float:
            """Return the team's reward if one player writes a given text for one observation and all other texts are random."""
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
        """Return a mapping from (player, observation) to the text that the best team writes."""
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
        """Return the history after the next move of the best team."""
        return (
            *history,
            *((player, self.right(case, player, history)) for player in self.movers(case, history)),
        )

    # -------- As an environment

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the cases of the game, which are the same in both splits."""
        return {
            "train": f"the {self.cases} cases of the game",
            "test": "the same cases (a game has no held-out tasks)",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if the number of agents differs from the number of players."""
        if len(agents) != self.seats:
            raise ConfigError(
                f"`environment.seats` is {self.seats}, but the team has {len(agents)} agents ({', '.join(agents)}). "
                f"Set `environment.seats: {len(agents)}`, or define {self.seats} agents in `team.agents`."
            )

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index, which is the case `index % cases`."""
        return Task(f"{split}-{index}", "", {"case": index % self.cases})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> DiagnosticState:
        """Start an episode of a case and return its state."""
        self.check(agents)
        return DiagnosticState(self, task, agents, seed)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return a random text, which demonstrates only the format of a text."""
        return random.Random(f"{seed}/{agent}").choice(self.texts)


class DiagnosticState(BaseState):
    """The state of one episode, in which one case of the game is played."""

    def __init__(self, game: Diagnostic, task: Task, agents: Sequence[str], seed: int) -> None:
        super().__init__(task, agents)
        self._game, self._case = game, int(task.data["case"])
        self._history: History = ()
        draw = random.Random(f"{seed}/noise")
        names = [game.renamed(player, seed) for player, _ in enumerate(agents)]
        self._to_player = [str.maketrans(dict(own)) for own in names]
        """Translation table of each player, from the letters of the game to the letters that the player sees."""
        self._to_game = [str.maketrans({name: letter for letter, name in own.items()}) for own in names]
        self._flipped = [draw.random() < game.noise for _ in agents] if game.noise else [False] * len(agents)
        self._earned = list(game.earned(self._case, ()))

    def observe(self, agent: str) -> str:
        """Return the observation of an agent."""
        player = self.agents.index(agent)
        return self._game.sees(self._case, player, self._history).translate(self._to_player[player])

    def movers(self) -> tuple[str, ...]:
        """Return the agents that write next."""
        return tuple(self.agents[player] for player in self._game.movers(self._case, self._history))

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Add the texts of the agents and return the rewards that they have gained.

        Raises EpisodeError if the agents that act are not exactly the agents that may move.
        """
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
        """Return the outcome with the success of the team and with rewards of 0, because `step` has already returned all rewards."""
        return Outcome(
            rewards=dict.fromkeys(self.agents, 0.0),
            success=self._game.success(self._case, self._history),
            truncated=bool(self.movers()),
        )


class _OneText(Diagnostic):
    """Base class of games in which all players write one text simultaneously and the reward of a player depends only on its own text."""

    @abstractmethod
    def reward(self, case: int, seat: int, text: str) -> float:
        """Return the reward of a player for its text."""

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return all players at the start of the game, and an empty tuple after they have written."""
        return () if history else tuple(range(self.seats))

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return the reward of each player for its own text."""
        if not history:
            return (0.0,) * self.seats
        return tuple(self.reward(case, player, text) for player, text in history)

    def expected(self, say: Say) -> tuple[float, ...]:
        """Return the same values as `Diagnostic.expected`, but without enumerating all combinations of texts."""
        found = [0.0] * self.seats
        for player in range(self.seats):
            for case in range(self.cases):
                policy = say(player, self.sees(case, player, ()))
                found[player] += sum(
                    share * self.reward(case, player, text) for text, share in policy.items()
                )
        return tuple(each / self.cases for each in found)


class SumGame(_OneText):
    """A game in which each player must write its own correct letter, which it cannot observe. A correct player receives a share of 1.

    If `pays` is `all`, players receive rewards only if all players are correct. The correct letters differ between cases.
    """

    name: Literal["sum_game"] = "sum_game"
    pays: Literal["sum", "all"] = "sum"
    """When rewards are given. `sum`: each correct player receives its share. `all`: players receive their shares only if all of them
    are correct."""
    riders: int = Field(default=0, ge=0)
    """The number of players, at the end of the team, that never receive a reward."""
    number_of_cases: int = Field(default=1, ge=1)
    """The number of different tasks. Each player observes the number of its task."""
    roles: int | None = Field(default=None, ge=1)
    """The number of players with different correct letters. The players after them have the same correct letters in the same order. If
    null, all players have different letters (as far as the alphabet allows)."""
    weights: tuple[Annotated[FiniteFloat, Field(gt=0)], ...] | None = None
    """The relative shares of the players that receive a reward. If null, all shares are equal."""

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
        """The number of different tasks."""
        return self.number_of_cases

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the position of the player and the number of the task."""
        return f"{seat + 1}/{self.seats} {case}"

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the correct letter of a player in a case."""
        return self.alphabet[(seat % (self.roles or self.seats) + case) % self.letters]

    def reward(self, case: int, seat: int, text: str) -> float:
        """Return the player's share if its letter is correct, and 0 otherwise."""
        return (text == self.right(case, seat, ())) * self._share(seat)

    def _share(self, player: int) -> float:
        earners = self.seats - self.riders
        if player >= earners:
            return 0.0
        return 1.0 / earners if self.weights is None else self.weights[player] / sum(self.weights)

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return the share of each correct player. If `pays` is `all`, either all players receive their shares or no player does."""
        own = super().earned(case, history)
        if self.pays == "sum":
            return own
        correct = bool(history) and all(own[: self.seats - self.riders])
        return tuple(correct * self._share(player) for player in range(self.seats))

    def expected(self, say: Say) -> tuple[float, ...]:
        """Return the expected reward of each player. If `pays` is `all`, all combinations of texts are enumerated."""
        return Diagnostic.expected(self, say) if self.pays == "all" else super().expected(say)


class Relay(Diagnostic):
    """A game in which each player reads the letter of the previous player and must write the next letter of the alphabet.

    The first player reads nothing and must write `A`. The last player receives 1 if all players wrote the correct letter.
    """

    name: Literal["relay"] = "relay"

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return the next player. The players move one after another."""
        return (len(history),) if len(history) < self.seats else ()

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the position of the player and the letter of the previous player."""
        return f"{seat + 1}/{self.seats} {history[-1][1] if history else ''}".strip()

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the letter that follows the letter of the previous player. After the last letter of the alphabet, `A` follows."""
        if not history:
            return "A"
        return self.alphabet[(self.alphabet.find(history[-1][1]) + 1) % self.letters]

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return 1 for the last player if all players wrote the correct letter, and 0 for all other players."""
        whole = len(history) == self.seats and all(
            text == self.right(case, player, history[:player]) for player, text in history
        )
        return (*[0.0] * (self.seats - 1), float(whole))


class HiddenSign(_OneText):
    """A game in which each player must write its own letter. Half of the reward is a gift, which does not depend on the letters.

    The gift is present or absent. Only the first player observes whether it is present.
    """

    name: Literal["hidden_sign"] = "hidden_sign"

    @property
    def cases(self) -> int:
        """The number of cases, which is 2: with the gift and without it."""
        return 2

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the position of the player. The first player also observes whether the gift is present."""
        return f"{seat + 1}/{self.seats}{' +-'[case + 1 if seat == 0 else 0]}".strip()

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the correct letter of a player."""
        return self.alphabet[seat % self.letters]

    def reward(self, case: int, seat: int, text: str) -> float:
        """Return the reward of a player: half of its share of 1 if its letter is correct, and the other half if the gift is present."""
        return ((text == self.right(case, seat, ())) + (case == 0)) / (2 * self.seats)


class Speaker(Diagnostic):
    """A game in which the first player, the speaker, writes a letter, and the other players read this letter and reply.

    Every player except the speaker receives its share of 1 if it replies with the correct letter. Let r be the total reward of
    these players. A speaker that helps knows the correct letter and receives r. A speaker that lies knows the correct letter and
    receives 1 − r. A speaker that leads receives r, and the letter that it writes is the correct letter. The game is symmetric:
    exchanging two letters everywhere does not change it.
    """

    name: Literal["speaker"] = "speaker"
    speaker: Literal["helps", "lies", "leads"] = "helps"
    """The role of the first player. `helps`: the speaker is rewarded if the other players are correct. `lies`: the speaker is rewarded
    if they are incorrect. `leads`: the speaker chooses the correct letter."""
    other_play: bool = False
    """Whether letters are renamed at random in each episode for every player except the first. If letters are renamed, the players
    cannot agree on a letter as a code for another letter (other-play, arXiv:2003.02979). The method `expected` ignores this
    setting."""

    @model_validator(mode="after")
    def _check_readers(self) -> Speaker:
        if self.seats < 2:
            raise ValueError("The speaker needs a listener. Set `seats` to 2 or more.")
        return self

    @property
    def cases(self) -> int:
        """The number of cases: one for each letter, or a single case if the speaker leads."""
        return 1 if self.speaker == "leads" else self.letters

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return the speaker at the start of the game, and then all other players simultaneously."""
        if not history:
            return (0,)
        return tuple(range(1, self.seats)) if len(history) == 1 else ()

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the player's position, followed by the correct letter for the speaker or by the speaker's text for the other players.

        A speaker that leads does not observe a letter.
        """
        message = history[0][1] if history else ""
        secret = "" if self.speaker == "leads" else self.alphabet[case]
        return f"{seat + 1}/{self.seats} {message if seat else secret}".strip()

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the text of a player in the best team.

        A speaker that helps writes the correct letter, a speaker that leads writes any letter, and the other players repeat the
        speaker's letter. If the speaker lies, every player writes `A`.
        """
        if self.speaker == "lies":
            return "A"
        return history[0][1] if seat else self.alphabet[case]

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return the reward of each player. All rewards are 0 before the last move."""
        if len(history) < self.seats:
            return (0.0,) * self.seats
        shares = [hit / (self.seats - 1) for hit in self._hits(case, history)]
        total = sum(shares)
        return (1.0 - total if self.speaker == "lies" else total, *shares)

    def success(self, case: int, history: History) -> float:
        """Return the fraction of the other players that reply with the correct letter."""
        return sum(self._hits(case, history)) / (self.seats - 1)

    def _hits(self, case: int, history: History) -> list[bool]:
        """Return, for each player other than the speaker, whether its reply is correct."""
        wanted = history[0][1] if history and self.speaker == "leads" else self.alphabet[case]
        return [text == wanted and text in tuple(self.alphabet) for player, text in history if player]

    def renamed(self, seat: int, seed: int) -> Mapping[str, str]:
        """Return a mapping from each letter of the game to its name for one player in one episode.

        Letters are renamed only if `other_play` is true, and never for the speaker.
        """
        letters = list(self.alphabet)
        if self.other_play and seat > 0:
            random.Random(derive_seed("other-play", seat, seed)).shuffle(letters)
        return dict(zip(self.alphabet, letters, strict=True))


class LongGame(Diagnostic):
    """A game in which each player writes one letter per round and receives its share of 1 for each correct letter.

    The correct letter is different in each round.
    """

    name: Literal["long_game"] = "long_game"
    rounds: int = Field(default=4, ge=1)
    """The number of rounds. Each player writes one letter per round."""
    rewarded: Literal["at_once", "at_the_end"] = "at_once"
    """When the rewards are given: after each round (`at_once`) or after the last round (`at_the_end`)."""

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return all players, or an empty tuple after the last round."""
        return tuple(range(self.seats)) if len(history) < self.rounds * self.seats else ()

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the position of the player and the number of the round."""
        return f"{seat + 1}/{self.seats} {len(history) // self.seats}"

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the correct letter of a player in the current round."""
        return self.alphabet[(seat + len(history) // self.seats) % self.letters]

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return the sum of each player's rewards for correct letters."""
        found = [0] * self.seats
        if self.rewarded == "at_once" or not self.movers(case, history):
            for k, (player, text) in enumerate(history):
                found[player] += text == self.alphabet[(player + k // self.seats) % self.letters]
        return tuple(each / (self.rounds * self.seats) for each in found)

    def expected(self, say: Say) -> tuple[float, ...]:
        """Return the same values as `Diagnostic.expected`, but without enumerating all combinations of texts.

        The enumeration is unnecessary because each letter is rewarded independently of the other letters.
        """
        found = [0.0] * self.seats
        for k in range(self.rounds):
            history = ((0, ""),) * (k * self.seats)
            for player in range(self.seats):
                chance = say(player, self.sees(0, player, history)).get(self.right(0, player, history), 0.0)
                found[player] += chance / (self.rounds * self.seats)
        return tuple(found)


class Essay(_OneText):
    """A game in which each player writes a text of any length. The player receives its share of 1 if the letter at one position is `A`."""

    name: Literal["essay"] = "essay"
    place: int = Field(default=0, ge=0)
    """The position of the letter that determines the reward, counted from 0."""
    longest: int = Field(default=4, ge=1, le=64)
    """The assumed maximum length of a text in letters, which must be greater than `place`."""

    @model_validator(mode="after")
    def _has_the_place(self) -> Essay:
        if self.place >= self.longest:
            raise ValueError(
                f"`place: {self.place}` must be less than `longest: {self.longest}`, the length of a text."
            )
        return self

    @property
    def texts(self) -> Sequence[str]:
        """Texts for `landmarks`: one text for each letter at the position that determines the reward."""
        return [letter * (self.place + 1) for letter in self.alphabet]

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the position of the player in the team."""
        return f"{seat + 1}/{self.seats}"

    def right(self, case: int, seat: int, history: History) -> str:
        """Return a text of `A`s that ends at the position that determines the reward."""
        return "A" * (self.place + 1)

    def reward(self, case: int, seat: int, text: str) -> float:
        """Return the player's share of 1 if the letter at the position is `A`, and 0 otherwise."""
        return float(text[self.place : self.place + 1] == "A") / self.seats


class Unequal(_OneText):
    """A game whose tasks have different numbers of correct letters and give different rewards for an incorrect text.

    Each task gives a part of the reward for any text, and the rest for a correct letter.
    """

    name: Literal["unequal"] = "unequal"
    right_letters: tuple[int, ...] = Field(default=(3, 1), min_length=1)
    """The number of correct letters in each case. The correct letters are the first letters of the alphabet."""
    anyway: tuple[FiniteFloat, ...] = ()
    """The reward for any text in each case, at least 0 and less than 1. If empty, the reward is 0 in all cases."""

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
        """The number of different tasks."""
        return len(self.right_letters)

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the position of the player and the number of the task."""
        return f"{seat + 1}/{self.seats} {case}"

    def right(self, case: int, seat: int, history: History) -> str:
        """Return `A`, which is a correct letter in every case."""
        return "A"

    def reward(self, case: int, seat: int, text: str) -> float:
        """Return the reward of a player: the reward for any text, plus the rest if the text is a correct letter."""
        gift = self.anyway[case] if self.anyway else 0.0
        correct = len(text) == 1 and text in self.alphabet[: self.right_letters[case]]
        return (gift + (1.0 - gift) * correct) / self.seats
