"""The expected update of an algorithm, by enumeration: what its steps amount to when sampling noise is averaged out.

A population is a step in which every outcome occurs as often as the sampling policies make it occur: their
probabilities are quarters, so that counts are exact. Policies are tables over completions of one or two tokens. What an
algorithm makes of the population (credit, collation, loss) is differentiated and compared with ∇J of the very same
tables, from the definition of J.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from tests.support.episodes import group, turn
from tests.support.tiny import team_of
from torch import Tensor

from kapelle.algorithm import Algorithm, Outputs, Targets, UpdateSamples
from kapelle.engines.train.protocol import Objective, TrainEngine
from kapelle.rows import Sample, Signals, TurnKey, turns_of
from kapelle.signals.proximal import ProximalLogProbs
from kapelle.signals.teacher import TEACHER
from kapelle.training.collate import policy_samples
from kapelle.training.updates import update_in_order
from kapelle.types import Episode, Group, Payment, Task, Turn

Words = tuple[int, ...]
Payoff = Callable[[Sequence[Words]], Mapping[str, float]]
"""What everybody said, in order → terminal reward by agent."""

LONG_AND_SHORT: tuple[Words, ...] = ((0,), (1, 0), (1, 1))
"""Completions of one token and of two."""
ARMS: tuple[Words, ...] = ((0,), (1,), (2,))
COUNTS = (2, 1, 1)
"""How often, of four times, the sampling policies say each."""
ROWS, TOKENS = 96, 3


@dataclass(frozen=True)
class Game:
    """Agents speak in the order given, each reading what was said before it; then they are paid."""

    order: tuple[str, ...]
    payoff: Payoff
    words: tuple[Words, ...] = LONG_AND_SHORT
    on_the_way: Payoff = lambda said: {}
    """What agents are paid right after what has been said so far."""

    @property
    def agents(self) -> tuple[str, ...]:
        """Names in seat order."""
        return tuple(dict.fromkeys(self.order))

    def chance(self, words: Sequence[int]) -> list[float]:
        """Return the sampling policies' chance of each next token after the first ones of a completion."""
        shares = [0.0] * TOKENS
        for whole, count in zip(self.words, COUNTS, strict=True):
            if whole[: len(words)] == tuple(words) and len(whole) > len(words):
                shares[whole[len(words)]] += count
        return [share / max(sum(shares), 1.0) for share in shares]

    def outcomes(self) -> list[tuple[tuple[int, ...], int]]:
        """Return all that can happen (everybody's place in `words`), with how often it does."""
        places = itertools.product(range(len(self.words)), repeat=len(self.order))
        return [(one, math.prod(COUNTS[k] for k in one)) for one in places]

    def episode(self, outcome: Sequence[int], task: Task) -> Episode:
        """Return one outcome as the sampling policies play it."""
        said = [self.words[k] for k in outcome]
        turns = [
            turn(
                name,
                place,
                prompt_ids=self.prompt(said[:place]),
                completion_ids=words,
                logprobs=tuple(math.log(self.chance(words[:k])[token]) for k, token in enumerate(words)),
            )
            for place, (name, words) in enumerate(zip(self.order, said, strict=True))
        ]
        payments = []
        for place in range(len(said)):
            for agent, reward in self.on_the_way(said[: place + 1]).items():
                # Booked as a scene does: on the agent's last turn by then, which may be one before the move.
                own = max(k for k in range(place + 1) if self.order[k] == agent)
                turns[own] = replace(turns[own], reward=turns[own].reward + reward)
                payments.append(Payment(agent, place + 1, reward))
        return Episode(task, 0, self.agents, tuple(turns), self.payoff(said), payments=tuple(payments))

    def earned(self, said: Sequence[Words]) -> float:
        """Return what all agents are paid in an episode."""
        paid = [self.on_the_way(said[: place + 1]) for place in range(len(said))]
        return sum(sum(each.values()) for each in (*paid, self.payoff(said)))

    def prompt(self, said: Sequence[Words]) -> Words:
        """Return what the next agent reads: a mark, then each completion with a mark behind it."""
        return (7, *(token for words in said for token in (*words, 7)))

    def population(self, group_size: int) -> list[Group]:
        """Return every group of so many episodes, as often as it occurs."""
        groups: list[Group] = []
        for chosen in itertools.product(self.outcomes(), repeat=group_size):
            for _ in range(math.prod(count for _, count in chosen)):
                task = Task(f"t{len(groups)}", "")
                groups.append(group(*(self.episode(outcome, task) for outcome, _ in chosen)))
        return groups


class Tables:
    """A train engine whose policies are tables, one row of logits for each prompt and completion so far.

    An update notes the gradient of each learner's loss and takes no step.
    """

    def __init__(self, game: Game, seed: int | None) -> None:
        """With a seed the tables differ from the sampling policies; with None they are these."""
        self._game = game
        self._rows: dict[tuple[str, Words], int] = {}
        self._sampling = torch.zeros(ROWS, TOKENS, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed or 0)
        self.logits: dict[str, Tensor] = {}
        for name in game.agents:
            drawn = torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64)
            self.logits[name] = (drawn * (seed is not None)).requires_grad_()
        self.ascent: dict[str, Tensor] = {}

    def log_probs(self, name: str, tokens: Sequence[int], targets: Sequence[int]) -> Tensor:
        """Return the log-prob of each target token after those before it."""
        start = targets[0]
        for k in targets:
            at = (name, tuple(tokens[:k]))
            if at not in self._rows:
                chance = torch.tensor(self._game.chance(tokens[start:k]), dtype=torch.float64)
                self._sampling[len(self._rows)] = chance.clamp(min=1e-30).log()
                self._rows[at] = len(self._rows)
        rows = [self._rows[name, tuple(tokens[:k])] for k in targets]
        table = (self.logits[name] + self._sampling).log_softmax(-1)
        return table[rows, [tokens[k] for k in targets]]

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return what the tables say of samples."""
        return [self.log_probs(s.learner, s.tokens, s.targets).detach() for s in samples]

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Note which way each learner would go: against the gradient of its loss."""
        for name in sorted({sample.learner for sample in samples}):
            own = [sample for sample in samples if sample.learner == name]
            logp_K = torch.cat([self.log_probs(name, s.tokens, s.targets) for s in own])
            counts = torch.tensor([len(s.targets) for s in own])
            columns = {key: torch.cat([s.columns[key] for s in own]).double() for key in own[0].columns}
            segment_K = torch.arange(len(own)).repeat_interleave(counts)
            targets = Targets(segment_K, len(own), torch.ones_like(logp_K), columns)
            loss = objective.policy_loss(Outputs(logp_K), targets)
            self.ascent[name] = -torch.autograd.grad(loss.total / loss.weight, self.logits[name])[0]
        return {}

    def objective(self) -> Tensor:
        """J: the expected sum of the agents' rewards under the tables, exactly."""
        game, total = self._game, torch.zeros((), dtype=torch.float64)
        for outcome, _ in game.outcomes():
            said = [game.words[k] for k in outcome]
            logp = torch.zeros((), dtype=torch.float64)
            for place, (name, words) in enumerate(zip(game.order, said, strict=True)):
                prompt = game.prompt(said[:place])
                places = range(len(prompt), len(prompt) + len(words))
                logp = logp + self.log_probs(name, (*prompt, *words), places).sum()
            total = total + logp.exp() * game.earned(said)
        return total

    def gradient(self) -> dict[str, Tensor]:
        """∇J by name."""
        of = torch.autograd.grad(self.objective(), list(self.logits.values()))
        return dict(zip(self.logits, of, strict=True))


def expected_update(
    algorithm: Algorithm, game: Game, seed: int | None = None, teacher: Tables | None = None
) -> tuple[Tables, list[Group]]:
    """Return tables that have noted the update of a whole population, and the population.

    Critics say something else after every prompt and every token: with λ = 1 no baseline changes an expectation that
    depends on what was said before the step alone.
    """
    tables = Tables(game, seed)
    groups = game.population(algorithm.data.group_size)
    team = team_of(*game.agents)
    keyed = turns_of(groups)
    per_turn = algorithm.critic is not None and algorithm.critic.unit == "turn"
    values = {key: _values(t)[: 1 if per_turn else None] for key, t in keyed}
    taught: dict[TurnKey, Tensor] = {}
    if teacher is not None:
        for key, t in keyed:
            places = range(len(t.prompt_ids), len(t.prompt_ids) + len(t.completion_ids))
            taught[key] = teacher.log_probs(t.agent, t.prompt_ids + t.completion_ids, places).detach()
    proximal: dict[TurnKey, Tensor] = {}
    if algorithm.need(ProximalLogProbs):
        for key, t in keyed:
            places = range(len(t.prompt_ids), len(t.prompt_ids) + len(t.completion_ids))
            proximal[key] = tables.log_probs(t.agent, t.prompt_ids + t.completion_ids, places).detach()
    signals = Signals(
        values=values if algorithm.critic else {},
        proximal=proximal,
        greedy={g: game.episode((0,) * len(game.order), one.task) for g, one in enumerate(groups)},
        more={TEACHER: taught},
    )
    give = algorithm.credit or (algorithm.memory(team, 0) if algorithm.memory else None)
    assert give is not None
    samples = policy_samples(groups, team, give(groups, signals), signals)
    objective = Objective(algorithm.policy_loss)
    engine = cast("TrainEngine", tables)
    update_in_order(
        engine, objective, algorithm.update.order, game.agents, UpdateSamples(samples, [], groups)
    )
    return tables, groups


def _values(spoken: Turn) -> Tensor:
    """Return a critic's value before every token of a turn."""
    words = spoken.completion_ids
    before = [sum(spoken.prompt_ids) + 3 * sum(words[:k]) - k for k in range(len(words))]
    return torch.tensor(before, dtype=torch.float64) / 20


def multiples(tables: Tables) -> dict[str, float]:
    """Return, by agent, what number times ∇J the update is; NaN where it points another way."""
    found = {}
    for name, true in tables.gradient().items():
        moved = tables.ascent[name]
        factor = float((moved * true).sum() / true.square().sum())
        off = float((moved - factor * true).norm() / moved.norm())
        found[name] = factor if off < 1e-5 else math.nan
    return found
