"""The expected update of an algorithm, by enumeration: what its steps amount to when sampling noise is averaged out.

A population is a step in which every outcome occurs as often as the sampling policies make it occur: their
probabilities are quarters or thirds, so that counts are exact. It goes through the product's own path: the loop gathers the
signals, gives credit, collates, packs, and the train engine `torch` takes its optimiser steps on a model that is a table
(`tables.py`), by plain gradient descent. What the weights have moved by is compared with ∇J of the very same tables, from
the definition of J.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

import torch
from experiments.tables import Words
from tests.support.episodes import group, turn
from tests.support.tables import ROWS, TOKENS, table_model
from tests.support.tiny import LORA, sections
from torch import Tensor

from kapelle.algorithm import Algorithm
from kapelle.algorithms.signals.reference import ReferenceLogProbs
from kapelle.algorithms.signals.samples import central_prompt
from kapelle.algorithms.signals.teacher import TEACHER
from kapelle.engines.rollout.protocol import RolloutEngine
from kapelle.engines.train.protocol import TrainSetup, UpdateLimits
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.environment import Environment
from kapelle.models.language_model import LanguageModel
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.ranks import ALONE, Ranks
from kapelle.settings.schema import OptimizerConfig
from kapelle.setup.recipe import resolve
from kapelle.team import Agent, Critic, Policy, Team
from kapelle.training.feature import StepInProgress
from kapelle.training.loop import Loop
from kapelle.training.rollouts import Rollouts
from kapelle.training.selection import Draws, TrainingTasks
from kapelle.training.step_report import Step
from kapelle.types import Episode, Group, RewardEvent, Sampling, Task
from kapelle.workflow import Workflow

Payoff = Callable[[Sequence[Words]], Mapping[str, float]]
"""What everyone said, in order → terminal reward by agent."""
Speaker = Callable[[Sequence[Words]], str | None]
"""What everyone said, in order → who speaks next; None at the end."""

LONG_AND_SHORT: tuple[Words, ...] = ((0,), (1, 0), (1, 1))
"""Completions of one token and of two."""
ARMS: tuple[Words, ...] = ((0,), (1,), (2,))
COUNTS = (2, 1, 1)
"""How often, of four times, the sampling policies say each."""
MARK = 7
FAR = 1e6
"""Far above every gradient: with it as Adam's ε, and its rate as many times larger, a step is one of gradient descent."""


@dataclass(frozen=True)
class Game:
    """Agents speak in the order given, each reading what was said before it; then they are paid."""

    order: tuple[str, ...] | Speaker
    payoff: Payoff
    words: tuple[Words, ...] = LONG_AND_SHORT
    on_the_way: Payoff = lambda said: {}
    """What agents are paid right after what has been said so far."""
    counts: tuple[int, ...] = COUNTS
    """How often the sampling policies say each of `words`."""
    seats: tuple[str, ...] = ()
    """Names in team order, where who speaks depends on what was said."""
    shared: bool = False
    """Whether one policy plays all agents."""
    failing: int = 0
    """How many attempts fail, whatever is said, for as many that do not as `counts` add up to."""

    @property
    def agents(self) -> tuple[str, ...]:
        """Names in team order."""
        return self.seats or tuple(dict.fromkeys(cast("tuple[str, ...]", self.order)))

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies."""
        return ("team",) if self.shared else self.agents

    def speaker(self, said: Sequence[Words]) -> str | None:
        """Return who speaks next; None at the end."""
        if not isinstance(self.order, tuple):
            return self.order(said)
        return self.order[len(said)] if len(said) < len(self.order) else None

    def chance(self, words: Sequence[int]) -> list[float]:
        """Return the sampling policies' chance of each next token after the first ones of a completion."""
        shares = [0.0] * TOKENS
        for whole, count in zip(self.words, self.counts, strict=True):
            if whole[: len(words)] == tuple(words) and len(whole) > len(words):
                shares[whole[len(words)]] += count
        return [share / max(sum(shares), 1.0) for share in shares]

    def outcomes(self) -> list[tuple[tuple[int, ...], int]]:
        """Return all that can happen (everyone's place in `words`), with how often it does."""
        over: list[tuple[tuple[int, ...], int]] = []
        open_: list[tuple[tuple[int, ...], int]] = [((), 1)]
        while open_:
            places, count = open_.pop(0)
            if self.speaker([self.words[k] for k in places]) is None:
                over.append((places, count))
            else:
                open_ += [((*places, k), count * own) for k, own in enumerate(self.counts)]
        longest = max(len(places) for places, _ in over)
        return [(places, count * sum(self.counts) ** (longest - len(places))) for places, count in over]

    def episode(self, outcome: Sequence[int], task: Task) -> Episode:
        """Return one outcome as the sampling policies play it."""
        said = [self.words[k] for k in outcome]
        speakers = [self.speaker(said[:place]) or "" for place in range(len(said))]
        turns = [
            turn(
                name,
                place,
                policy="team" if self.shared else name,
                prompt_ids=self.prompt(said[:place]),
                completion_ids=words,
                logprobs=tuple(math.log(self.chance(words[:k])[token]) for k, token in enumerate(words)),
            )
            for place, (name, words) in enumerate(zip(speakers, said, strict=True))
        ]
        reward_events = []
        for place in range(len(said)):
            for agent, reward in self.on_the_way(said[: place + 1]).items():
                # Booked as a scene does: on the agent's last turn by then, which may be one before the move.
                own = max(k for k in range(place + 1) if speakers[k] == agent)
                turns[own] = replace(turns[own], reward=turns[own].reward + reward)
                reward_events.append(RewardEvent(agent, place + 1, reward))
        return Episode(
            task, 0, self.agents, tuple(turns), self.payoff(said), reward_events=tuple(reward_events)
        )

    def earned(self, said: Sequence[Words]) -> float:
        """Return what all agents are paid in an episode."""
        paid = [self.on_the_way(said[: place + 1]) for place in range(len(said))]
        return sum(sum(each.values()) for each in (*paid, self.payoff(said)))

    def prompt(self, said: Sequence[Words]) -> Words:
        """Return what the next agent reads: a mark, then each completion with a mark behind it."""
        return (MARK, *(token for words in said for token in (*words, MARK)))

    def view(self, said: Sequence[Words]) -> Words:
        """Return what a central critic reads of the next turn: prompts and completions in time."""
        before = [token for place, words in enumerate(said) for token in (*self.prompt(said[:place]), *words)]
        return (*before, *self.prompt(said))

    def start(self, prefix: Words) -> list[float]:
        """Return the sampling policies' chance of each token after all that was read and said."""
        spoken = prefix[::-1].index(MARK) if MARK in prefix else 0
        return self.chance(prefix[len(prefix) - spoken :])

    def population(self, group_size: int) -> list[Group]:
        """Return every group of so many episodes, as often as it occurs."""
        attempts: list[tuple[tuple[int, ...] | None, int]] = list(self.outcomes())
        if self.failing:
            whole = sum(count for _, count in self.outcomes())
            attempts.append((None, whole * self.failing // sum(self.counts)))
        groups: list[Group] = []
        for chosen in itertools.product(attempts, repeat=group_size):
            for _ in range(math.prod(count for _, count in chosen)):
                task = Task(f"t{len(groups)}", "")
                groups.append(group(*(self.attempt(outcome, task) for outcome, _ in chosen)))
        return groups

    def attempt(self, outcome: Sequence[int] | None, task: Task) -> Episode:
        if outcome is None:
            return Episode(task, 0, self.agents, error="EpisodeError: the world went away")
        return self.episode(outcome, task)

    def team(self, algorithm: Algorithm, teachers: bool = False) -> Team:
        """Return the agents with the policies and critics that an algorithm needs."""
        critic_of: dict[str, str] = {}
        if algorithm.critic is not None:
            own = algorithm.critic.sharing == "own"
            critic_of = {name: f"critic_{name}" if own else "critic" for name in self.agents}
        return Team(
            tuple(Agent(name, sampling=Sampling(max_tokens=8)) for name in self.agents),
            {name: Policy(name, lora=LORA) for name in self.policies},
            {name: "team" if self.shared else name for name in self.agents},
            critics={name: Critic(name) for name in critic_of.values()},
            critic_of=critic_of,
            beside={
                f"{TEACHER}:{name}": Policy(f"{TEACHER}:{name}", lora=LORA, trained=False)
                for name in (self.policies if teachers else ())
            },
        )


class Tables:
    """Policies that are tables, one row of logits for each prompt and completion so far."""

    def __init__(self, game: Game, seed: int | None) -> None:
        """With a seed the tables differ from the sampling policies; with None they are these."""
        self.game, self.stale = game, seed is not None
        self.model = table_model(game.start)
        for read in (game.prompt, game.view):  # one order of rows for all tables, whatever is computed first
            for outcome, _ in game.outcomes():
                said = [game.words[k] for k in outcome]
                for place, words in enumerate(said):
                    for k in range(len(words)):
                        self.model.row((*read(said[:place]), *words[:k]))
        generator = torch.Generator().manual_seed(seed or 0)
        self.logits: dict[str, Tensor] = {}
        for name in game.policies:
            drawn = torch.randn(ROWS, TOKENS, generator=generator)
            self.logits[name] = (drawn * self.stale).double().requires_grad_()
        self.ascent: dict[str, Tensor] = {}
        """What the last step moved each policy by, over the rate."""

    def log_probs(self, name: str, tokens: Sequence[int], targets: Sequence[int]) -> Tensor:
        """Return the log-prob of each target token after those before it."""
        rows = [self.model.row(tuple(tokens[:k])) for k in targets]
        table = (self.logits[name][rows] + self.model.starts(rows)).log_softmax(-1)
        return table.gather(1, torch.tensor([tokens[k] for k in targets])[:, None])[:, 0]

    def turns(self, episode: Episode) -> list[Tensor]:
        """Return the log-probs of every turn's tokens."""
        return [
            self.log_probs(
                one.policy,
                one.prompt_ids + one.completion_ids,
                range(len(one.prompt_ids), len(one.prompt_ids) + len(one.completion_ids)),
            )
            for one in episode.turns
        ]

    def objective(self) -> Tensor:
        """J: the expected sum of the agents' rewards under the tables, exactly."""
        game, total = self.game, torch.zeros((), dtype=torch.float64)
        for outcome, _ in game.outcomes():
            logp = sum((logp_T.sum() for logp_T in self.turns(game.episode(outcome, Task("t", "")))), 0.0)
            total = total + torch.as_tensor(logp).exp() * game.earned([game.words[k] for k in outcome])
        return total

    def gradient(self) -> dict[str, Tensor]:
        """∇J by name."""
        of = torch.autograd.grad(self.objective(), list(self.logits.values()))
        return dict(zip(self.logits, of, strict=True))


class Run:
    """A run on tables, step by step: the product's loop and train engine, and episodes that are given."""

    def __init__(
        self,
        algorithm: Algorithm,
        tables: Tables,
        *,
        rate: float = 1.0,
        teacher: Tables | None = None,
        greedy: Callable[[Task], Episode] | None = None,
        ranks: Ranks = ALONE,
        microbatch_tokens: int = 1 << 20,
        max_grad_norm: float | None = None,
    ) -> None:
        """Take tables that learn by steps of `rate`; `greedy` plays ReMax's episodes, by default with the first words."""
        game = tables.game
        self.tables, self.rate = tables, rate
        self.game, self.greedy = game, greedy
        team = game.team(algorithm, teacher is not None)
        self.engine = TorchTrainEngine(
            TrainSetup(
                {"base": cast("LanguageModel", tables.model)},
                tuple(team.every.values()),
                tuple(team.critics.values()),
                OptimizerConfig(lr=rate * FAR, eps=FAR, betas=(0.0, 0.0), max_grad_norm=max_grad_norm),
                UpdateLimits(microbatch_tokens=microbatch_tokens),
                0,
                references=algorithm.need(ReferenceLogProbs) is not None,
                ranks=ranks,
            )
        )
        for name, logits in tables.logits.items():
            self.engine.load_weights(name, {"table": logits.detach().float()})
        for name in team.beside:
            assert teacher is not None
            taught = teacher.logits[name.removeprefix(f"{TEACHER}:")]
            self.engine.load_weights(name, {"table": taught.detach().float()})
        for k, name in enumerate(team.critics):
            # Critics say something else after every prefix.
            drawn = torch.randn(ROWS, TOKENS, generator=torch.Generator().manual_seed(100 + k)) / 4
            self.engine.load_weights(
                name,
                {
                    "table": drawn,
                    "value_head.weight": torch.ones(1, TOKENS),
                    "value_head.bias": torch.zeros(1),
                },
            )
        config = resolve(
            sections(
                record={"credit_episodes": 0},
                training={"steps": 9, "tasks_per_step": 1, "max_failed_share": 1.0},
            )
        )
        self.seed = config.seed
        nothing = SimpleNamespace(release_caches=lambda: None, renderer=lambda _policy: None)
        setup = RolloutSetup(
            team,
            cast("Environment", None),
            cast("Workflow", None),
            cast("RolloutEngine", nothing),
        )
        self.groups: list[Group] = []
        rollouts = _Given(TrainingTasks(cast("Draws", None), 1), lambda: self.groups)
        self.loop = _Enumerated(config, algorithm, setup, self.engine, rollouts)
        self.loop.greedy = self.greedily
        if tables.stale:  # other weights sampled, on purpose
            self.loop.sampled_by_others()
        self.number = 0

    def greedily(self, groups: Sequence[Group]) -> list[Group]:
        play = self.greedy or self.first_words
        return [group(play(one.task)) for one in groups]

    def first_words(self, task: Task) -> Episode:
        said: list[int] = []
        while self.game.speaker([self.game.words[k] for k in said]) is not None:
            said.append(0)
        return self.game.episode(said, task)

    def step(self, groups: Sequence[Group]) -> Step:
        """Learn from groups; `tables` are then the weights, and know what moved them."""
        self.number += 1
        self.groups = list(groups)
        done = self.loop.step(self.number)
        for name, before in self.tables.logits.items():
            now = self.weights(name)
            self.tables.ascent[name] = (now - before.detach()) / self.rate
            self.tables.logits[name] = now.requires_grad_()
        return done

    def weights(self, name: str) -> Tensor:
        """Return a table, float64."""
        return self.engine.weights(name)["table"].detach().double().clone()

    def go_back(self, logits: Mapping[str, Tensor]) -> None:
        """Set the policies' tables; what the algorithm remembers stays."""
        for name, table in logits.items():
            self.engine.load_weights(name, {"table": table.detach().float()})
            self.tables.logits[name] = table


@dataclass
class _Given(Rollouts):
    tasks: TrainingTasks
    groups: Callable[[], list[Group]]

    def collect(self, step: StepInProgress) -> list[Group]:
        return self.groups()


class _Enumerated(Loop):
    greedy: Callable[[Sequence[Group]], list[Group]]

    def sampled_by_others(self) -> None:
        self._objective = replace(self._objective, parity=False)

    def greedily(self, step: StepInProgress, groups: Sequence[Group]) -> Sequence[Group]:
        return self.greedy(groups)


def expected_update(
    algorithm: Algorithm, game: Game, seed: int | None = None, teacher: Tables | None = None
) -> tuple[Tables, list[Group]]:
    """Return tables that a whole population has moved once, as they were before, and the population."""
    tables = Tables(game, seed)
    before = dict(tables.logits)
    groups = game.population(algorithm.data.group_size)
    Run(algorithm, tables, teacher=teacher).step(groups)
    tables.logits = before
    return tables, groups


def right_values(game: Game, tables: Tables) -> dict[str, Tensor]:
    """Return the weights of a critic that says after each turn what all agents are paid on average."""
    paid: dict[Words, list[tuple[float, int]]] = {}
    for outcome, count in game.outcomes():
        episode = game.episode(outcome, Task("t", ""))
        for each in episode.turns:
            read = (*central_prompt(episode, each, answered=True), *each.completion_ids)
            paid.setdefault(read, []).append((game.earned([game.words[k] for k in outcome]), count))
    value = torch.zeros(ROWS, TOKENS)
    for read, found in paid.items():
        mean = sum(earned * count for earned, count in found) / sum(count for _, count in found)
        value[tables.model.row(read)] = mean / TOKENS
    head = {"value_head.weight": torch.ones(1, TOKENS), "value_head.bias": torch.zeros(1)}
    return {"table": value, **head}


def multiples(tables: Tables) -> dict[str, float]:
    """Return, by agent, what number times ∇J the update is; NaN where it points another way."""
    found = {}
    for name, true in tables.gradient().items():
        moved = tables.ascent[name]
        factor = float((moved * true).sum() / true.square().sum())
        off = float((moved - factor * true).norm() / moved.norm())
        found[name] = factor if off < 1e-5 else math.nan
    return found
