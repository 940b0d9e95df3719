"""Episodes that a limit cuts short, in games that could continue: what a move is worth is what it is worth in the whole game.

Games are small enough for their values to be computed. Critics are tables that are fitted, until they stand still, to the
very samples that the algorithms make; then the mean of each turn's advantage over all episodes is compared with the move's
true worth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from tests.support.episodes import group, turn
from tests.support.tiny import sections, team_of
from torch import Tensor

from kapelle.algorithm import Algorithm, Credit, algorithm_class
from kapelle.rows import Column, Learners, Sample, Sampled, Signals, TurnKey, turns_of
from kapelle.training.boundary import gather_signals
from kapelle.training.collate import critic_samples
from kapelle.training.trainer import Trainer
from kapelle.types import Episode, Group, RewardEvent, Task, Turn

Word = tuple[int, ...]
WORDS: tuple[Word, ...] = ((0,), (1, 0), (1, 1))
"""Completions of one token and of two; those of a game are equally likely."""
Pays = Callable[[Word, Mapping[str, Word]], Mapping[str, float]]
"""What was said before the move, and the move → everyone's pay."""
GAMMA = 0.25
MARK = 9
NOTHING: Word = (2,)
"""What is read before anything was said."""


@dataclass(frozen=True)
class Endless:
    """Agents move in turn, or all at once; each reads what was said last, and is paid for what is said now."""

    agents: tuple[str, ...]
    pays: Pays
    at_once: bool = False
    ends: Callable[[Word], bool] = lambda said: False
    """Whether a word of the first mover ends the game."""
    prize: float = 0.0
    """What everyone gets when it ends."""
    words: tuple[Word, ...] = ((0,), (1, 1))
    """What may be said."""

    def movers(self, moment: int) -> tuple[str, ...]:
        """Return who moves at a moment."""
        return self.agents if self.at_once else (self.agents[moment % len(self.agents)],)

    def over(self, move: Mapping[str, Word]) -> bool:
        """Return whether a move ends the game."""
        return self.agents[0] in move and self.ends(move[self.agents[0]])

    def moves(self, moment: int) -> list[dict[str, Word]]:
        """Return all that can be said at a moment, as often as it is likely."""
        movers = self.movers(moment)
        said = itertools.product(self.words, repeat=len(movers))
        return [dict(zip(movers, words, strict=True)) for words in said]

    def last(self, move: Mapping[str, Word]) -> Word:
        """Return what everyone reads after a move: the words of its first mover."""
        return next(iter(move.values()))

    def episodes(self, moments: int) -> list[Episode]:
        """Return all ways in which so many moments can be played, as often as they are likely; then comes the limit."""
        open_: list[tuple[dict[str, Word], ...]] = [()]
        closed: list[tuple[dict[str, Word], ...]] = []
        for moment in range(moments):
            longer = [(*played, move) for played in open_ for move in self.moves(moment)]
            open_ = [played for played in longer if not self.over(played[-1])]
            # One that is over stands for all ways in which the others continue.
            for played in longer:
                if self.over(played[-1]):
                    closed += [played] * self.ways(moment + 1, moments)
        return [self.episode(played) for played in (*open_, *closed)]

    def ways(self, first: int, moments: int) -> int:
        total = 1
        for moment in range(first, moments):
            total *= len(self.moves(moment))
        return total

    def episode(self, played: Sequence[Mapping[str, Word]]) -> Episode:
        """Return an episode with these moves."""
        turns: list[Turn] = []
        reward_events: list[RewardEvent] = []
        before: Word = NOTHING
        for move in played:
            seen = len(turns)
            for agent, word in move.items():
                turns.append(
                    turn(
                        agent,
                        len(turns),
                        completed_before=seen,
                        prompt_ids=(MARK, 20 + self.agents.index(agent), *before, MARK),
                        completion_ids=word,
                        logprobs=(-1.0,) * len(word),
                    )
                )
            paid = self.pays(before, move)
            spoken = {one.agent: k for k, one in enumerate(turns)}
            for agent, amount in paid.items():
                if agent in spoken:
                    k = spoken[agent]
                    turns[k] = replace(turns[k], reward=turns[k].reward + amount)
                    reward_events.append(RewardEvent(agent, len(turns), amount))
            before = self.last(move)
        over = self.over(played[-1])
        prizes = dict.fromkeys(self.agents, self.prize) if over and self.prize else {}
        return Episode(
            TASK, 0, self.agents, tuple(turns), prizes, truncated=not over, reward_events=tuple(reward_events)
        )

    def worth(self, agent: str, gamma: float, chain: bool = False) -> dict[tuple[Word, Word], float]:
        """Return Q: by what an agent reads and says, all that it is paid from then on, γ for each of its next turns.

        In a chain all that everyone is paid, γ for each next turn.
        """
        cycle = 1 if self.at_once else len(self.agents)
        words = (*self.words, NOTHING)
        to_come = {(moment, before): 0.0 for moment in range(cycle) for before in words}
        for _ in range(200):
            to_come = {
                (moment, before): (gamma if chain or agent in self.movers(moment) else 1.0)
                * _mean(
                    [
                        self.then(agent if not chain else None, moment, before, move, to_come)
                        for move in self.moves(moment)
                    ]
                )
                for moment, before in to_come
            }
        moment = next(m for m in range(cycle) if agent in self.movers(m))
        return {
            (before, word): _mean(
                [
                    self.then(agent if not chain else None, moment, before, move, to_come)
                    for move in self.moves(moment)
                    if move[agent] == word
                ]
            )
            for before in words
            for word in self.words
        }

    def then(
        self,
        agent: str | None,
        moment: int,
        before: Word,
        move: Mapping[str, Word],
        to_come: Mapping[tuple[int, Word], float],
    ) -> float:
        pays = self.pays(before, move)
        paid = sum(pays.values()) if agent is None else pays.get(agent, 0.0)
        if self.over(move):
            return paid + self.prize * (len(self.agents) if agent is None else 1)
        return paid + to_come[(moment + 1) % (1 if self.at_once else len(self.agents)), self.last(move)]


TASK = Task("t0", "")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class TableCritics:
    """Critics that are tables over what an agent reads and has said of its turn: these games have no other memory."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, Word], float] = {}

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the values at the samples' targets; 0 where nothing has been learned."""
        return [torch.tensor([self.known.get(_place(s, t), 0.0) for t in s.targets]) for s in samples]

    def renderer(self, learner: str) -> None:
        """Texts are not read here."""

    def fit(self, samples: Sequence[Sample]) -> float:
        """Take the mean target of every place; return the largest change."""
        found: dict[tuple[str, Word], list[float]] = {}
        for sample in samples:
            for t, target in zip(sample.targets, sample.columns[Column.RETURN].tolist(), strict=True):
                found.setdefault(_place(sample, t), []).append(target)
        known = {at: _mean(targets) for at, targets in found.items()}
        change = max(abs(value - self.known.get(at, 0.0)) for at, value in known.items())
        self.known = known
        return change


def _place(sample: Sample, target: int) -> tuple[str, Word]:
    """Return whose value is asked of what: what was read and begun in this turn, and of a whole turn what was said."""
    tokens = sample.tokens[:target]
    first, last = [k for k, token in enumerate(tokens) if token == MARK][-2:]
    agent, said = tokens[first + 1], tokens[last + 1 :]
    return sample.learner, (agent, *said) if said in WORDS else tokens[first:]


def fitted(
    algorithm: Algorithm, groups: Sequence[Group], agents: Sequence[str], shared: bool = False
) -> tuple[Mapping[TurnKey, Credit], Signals]:
    """Return credit and signals once critics that are fitted to the algorithm's samples stand still."""
    give, need = algorithm.credit, algorithm.critic
    assert give is not None
    assert need is not None
    team = team_of(*agents, critics={name: "critic" if shared else f"critic:{name}" for name in agents})
    critics = TableCritics()
    step = Sampled(1, groups, team, lambda: ())

    def judge() -> tuple[Mapping[TurnKey, Credit], Signals]:
        signals = gather_signals(algorithm, step, cast("Learners", critics))
        return give(groups, signals), signals

    while critics.fit(critic_samples(groups, team, *judge(), need)) > 1e-5:
        pass
    return judge()


def judged(
    groups: Sequence[Group], credit: Mapping[TurnKey, Credit], signals: Signals
) -> dict[tuple[int, str, Word, Word], float]:
    """Return the mean of advantage plus value at each turn's last value: by its number, agent, words read and said."""
    found: dict[tuple[int, str, Word, Word], list[float]] = {}
    for key, one in turns_of(groups):
        place = (key.turn, one.agent, one.prompt_ids[2:-1], one.completion_ids)
        advantage = float(credit[key].advantage_T[-1] + signals.values[key][-1])
        found.setdefault(place, []).append(advantage)
    return {place: _mean(values) for place, values in found.items()}


def settings(name: str, level: str | None = None, **gae: Any) -> Algorithm:
    values = {
        "name": name,
        **({"team_reward": "individual"} if level is None else {"team_reward": "sum", "level": level}),
        "gae": {"normalise": "none", "gamma_turn": GAMMA, **gae},
    }
    kind: Any = algorithm_class(name)
    built: Algorithm = kind.model_validate(values).build()
    return built


SIGN = {(0,): 1.0, (1, 0): -1.0, (1, 1): 0.5}


def own_sign(before: Word, move: Mapping[str, Word]) -> dict[str, float]:
    """Each turn pays for its own word."""
    return {agent: SIGN[word] for agent, word in move.items()}


def answered(before: Word, move: Mapping[str, Word]) -> dict[str, float]:
    """Whoever moves pays the others, more if it answers a 0 with a 0; itself by its own word."""
    paid = own_sign(before, move)
    for agent, word in move.items():
        for other in "abc":
            paid[other] = paid.get(other, 0.0) + (other != agent) * (
                len(word) + 2.0 * (before == word == (0,))
            )
    return paid


GAMES = {
    "each turn pays its own": Endless(("a",), own_sign, words=WORDS),
    "in turn, paid for own moves": Endless(("a", "b"), own_sign),
    "in turn, paid for the other's moves": Endless(("a", "b"), answered),
    "three in turn": Endless(("a", "b", "c"), answered),
    "at once": Endless(("a", "b"), answered, at_once=True, words=WORDS),
    "alone, ended by a word": Endless(("a",), answered, ends=lambda said: said == (1, 1), prize=3.0),
    "in turn, ended by a word": Endless(("a", "b"), answered, ends=lambda said: said == (1, 1), prize=3.0),
    "in turn, own pay, ended by a word": Endless(
        ("a", "b"), own_sign, ends=lambda said: said == (1, 1), prize=3.0
    ),
    "at once, ended by a word": Endless(("a", "b"), answered, True, lambda said: said == (1, 1), 3.0),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("name", "gae"),
    [
        ("ippo", {"unit": "token", "lam": 0.6}),
        ("ippo", {"unit": "turn", "lam": 1.0}),
        ("mappo", {"unit": "token", "lam": 1.0}),
    ],
)
@pytest.mark.parametrize("game", GAMES)
def test_advantages_are_those_of_the_whole_game(game: str, name: str, gae: Mapping[str, Any]) -> None:
    played = GAMES[game]
    # Cut in the middle of a round where agents move in turn: one of them moved last, the others before it.
    groups = [group(*played.episodes(2 if played.at_once else 2 * len(played.agents) + 1))]
    credit, signals = fitted(settings(name, **gae), groups, played.agents, shared=name == "mappo")
    worth = {agent: played.worth(agent, GAMMA) for agent in played.agents}
    for (number, agent, read, said), value in judged(groups, credit, signals).items():
        assert value == pytest.approx(worth[agent][read, said], abs=1e-4), (number, agent, read, said)


@pytest.mark.parametrize("level", ["action", "token"])
@pytest.mark.parametrize("game", ["in turn, paid for own moves", "in turn, own pay, ended by a word"])
def test_so_it_is_in_a_chain(game: str, level: str) -> None:
    played = GAMES[game]
    groups = [group(*played.episodes(moments)) for moments in (3, 4)]
    algorithm = settings("marft", level=level, lam=0.6)
    credit, signals = fitted(algorithm, groups, played.agents, shared=True)
    worth = {agent: played.worth(agent, GAMMA, chain=True) for agent in played.agents}
    for (number, agent, read, said), value in judged(groups, credit, signals).items():
        assert value == pytest.approx(worth[agent][read, said], abs=1e-4), (number, agent, read, said)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["ippo", "mappo", "marft", "vdn_token"])
def test_a_run_whose_episodes_are_cut_short_trains(name: str) -> None:
    sticks = {"path": "tests.environments.adapters.zoo_games", "arguments": {"sticks": 9}, "max_rounds": 4}
    made = sections(
        environment={"name": "pettingzoo", "rules": "none", "rewards": [-1, 1], **sticks},
        workflow={"name": "play"},
        algorithm={"name": name},
        training={"steps": 1, "tasks_per_step": 2},
    )
    with Trainer(**made) as run:
        (step,) = run.steps(1)
    assert step.metrics["truncated"] == 1.0
    assert all(math.isfinite(value) for value in step.metrics.values())
