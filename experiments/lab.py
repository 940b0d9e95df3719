"""What an experiment does with one arm: let a team of tables learn, or take its update apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from experiments.tables import SteppedRollouts, SteppedTables, TableEngine, TableModel, TableRenderer, Words
from kapelle.algorithms.signals.teacher import TEACHER
from kapelle.environments.diagnostics import Diagnostic, Essay, Relay
from kapelle.environments.matrix import Matrix
from kapelle.environments.openspiel.environment import OpenSpiel
from kapelle.environments.openspiel.text import read_listed
from kapelle.features.ahead.asynchronous import AsynchronousRollouts
from kapelle.models.language_model import LanguageModel
from kapelle.rollout.evaluation.exploitability import TabularPolicies, language_table
from kapelle.rollout.setup import make_rollout_setup
from kapelle.rows import turns_of
from kapelle.setup.model_loading import build_train_engine
from kapelle.setup.model_loading import teacher as expert
from kapelle.setup.preparation import PreparedRun
from kapelle.setup.recipe import resolve
from kapelle.setup.team_builder import build_algorithm, build_team
from kapelle.training.feature import StartedRun, started
from kapelle.training.loop import Loop
from kapelle.training.rollouts import Rollouts, make_rollouts
from kapelle.training.trainer import Trainer
from kapelle.types import Group, Message

FAR = 1e6
"""Far above every gradient: with it as Adam's ε, and its rate as many times larger, a step is one of plain gradient ascent."""


@dataclass(frozen=True)
class Arm:
    """One contender: what its recipe has that the others' have not."""

    algorithm: Mapping[str, Any]
    over: Mapping[str, Any] = field(default_factory=dict)
    """Further sections of the recipe, each laid over the experiment's."""


def recipe_of(game: Mapping[str, Any], arm: Arm, rate: float, seed: int, **over: Any) -> dict[str, Any]:
    """Return the recipe of one run: gradient ascent by `rate`, an adapter (a table) for every agent, tasks by chance."""
    sections: dict[str, Any] = {
        "environment": dict(game),
        "workflow": {"name": "play"},
        "algorithm": dict(arm.algorithm),
        "team": {
            "agents": game.get("seats", 2),
            "sharing": "lora",
            "sampling": {"max_tokens": game.get("longest", 1)},
        },
        "training": {
            "steps": 1_000_000,
            "tasks_per_step": 1,
            "microbatch_tokens": 1 << 20,
            "max_failed_share": 0.0,
        },
        "optimizer": {"lr": rate * FAR, "eps": FAR, "betas": (0.0, 0.0), "max_grad_norm": None},
        "record": {"credit_episodes": 0},
        "seed": seed,
    }
    for given in (over, arm.over):
        for name, values in given.items():
            known = sections.get(name)
            sections[name] = {**known, **values} if isinstance(known, dict) else values
    return sections


class TableRun:
    """A team of tables that learns by the library's own loop."""

    def __init__(
        self,
        recipe: Mapping[str, Any],
        start: Callable[[str], Mapping[str, float]] = lambda seen: {},
        *,
        additive: bool = False,
        teacher: Callable[[str], Mapping[str, float]] | None = None,
        stepped: bool = False,
    ) -> None:
        """Take a recipe, and how likely policies say each letter to a message at first, in logits; 0 where nothing is said.

        `additive` critics are sums over turns; a `teacher`'s policies stay as they start; a `stepped` sampler counts its steps, and
        `training.asynchronous` needs it.
        """
        config = resolve(recipe)
        self.environment = config.environment
        variable = isinstance(config.environment, Essay)
        self.renderer = TableRenderer(_alphabet(config.environment), ends=variable)
        self.model = TableModel(self._begin(start), self.renderer.tokens, additive=additive)
        self.model.renderer = self.renderer
        self.algorithm = algorithm = build_algorithm(config)
        self.team = build_team(config, algorithm)
        models = dict.fromkeys(self.team.bases, cast("LanguageModel", self.model))
        if teacher is not None:
            teaches = TableModel(self._begin(teacher), self.renderer.tokens)
            teaches.renderer = self.renderer
            models |= dict.fromkeys(
                (name for name in models if name.startswith(f"{TEACHER}:")), cast("LanguageModel", teaches)
            )
        self.engine = build_train_engine(config, algorithm, self.team, models)
        sampler = SteppedTables if stepped else TableEngine
        self.player = sampler(self.model, self.renderer, self.team)
        shown = algorithm.data.source == "demonstrations"
        setup = make_rollout_setup(
            config, self.team, expert(config, self.team, models) if shown else self.player
        )
        self.setup = setup
        run = StartedRun(
            config, algorithm, self.team, models, {}, self.engine, self.engine, setup, players=(self.player,)
        )
        loaded = PreparedRun(config, {}, algorithm, self.team, {})
        rollouts: Rollouts
        if config.training.asynchronous:
            sampler_of = SteppedRollouts(replace(setup, data=algorithm.data), config.training.tasks_per_step)
            rollouts = AsynchronousRollouts(run, setup, sampler_of)
        else:
            rollouts = make_rollouts(run, setup, loaded, ExitStack(), own_engine=True)
        self.loop = Loop(config, algorithm, setup, self.engine, rollouts, features=started(run))
        self.loop.publish()
        self.longest = max(agent.sampling.max_tokens for agent in self.team.agents)
        self.number = 0
        self.last: Mapping[str, float] = {}
        """Metrics of the last step."""

    def _begin(self, start: Callable[[str], Mapping[str, float]]) -> Callable[[Words], Sequence[float]]:
        def first(prefix: Words) -> Sequence[float]:
            seen = next(
                (self.renderer.said[token] for token in reversed(prefix) if token in self.renderer.said), ""
            )
            logits = start(seen)
            letters = [logits.get(letter, 0.0) for letter in self.renderer.alphabet]
            return [*letters, logits.get("", 0.0)][: self.renderer.tokens]

        return first

    def step(self) -> tuple[Sequence[Group], Mapping[str, float]]:
        """Take one step; return its episodes and metrics."""
        self.number += 1
        done = self.loop.step(self.number)
        self.last = done.metrics
        return done.groups, done.metrics

    @property
    def policies(self) -> TabularPolicies:
        """What the team plays in a game of OpenSpiel."""
        return language_table(self.setup, self.engine.score)

    def say(self, seat: int, seen: str) -> Mapping[str, float]:
        """Return the chance of everything that a seat may say."""
        policy = self.team.policy(self.team.names[seat]).name
        return self.player.texts(policy, seen, self.longest)

    def likes(self, seat: int, letter: str) -> float:
        """Return the chance with which a seat says a letter to what it reads at first in a matrix game."""
        game = cast("Matrix", self.environment)
        world = game.start(game.task("train", 0), self.team.names, 0)
        return self.say(seat, world.observe(self.team.names[seat])).get(letter, 0.0)

    def row(self, seen: str, begun: str = "") -> int:
        """Return the number of the row that says what follows a message and the beginning of the answer."""
        letters = [self.renderer.alphabet.index(letter) for letter in begun]
        return self.model.row((*self.renderer.start([Message("user", seen)]), *letters))

    @property
    def value(self) -> float:
        """What the team earns in all on average, exactly."""
        return sum(self.values)

    @property
    def rows(self) -> int:
        """How many rows of the tables have been met in play, or matter to the team's worth."""
        assert self.values
        return self.model.met

    def rows_of(self, policy: str) -> list[int]:
        """Return the rows of a policy that the team's worth depends on, and those of play since its last update."""
        return self.player.asked(policy) if self.values else []

    @property
    def values(self) -> tuple[float, ...]:
        """What each seat earns on average, exactly."""
        if isinstance(self.environment, Matrix):
            return _matrix_values(self.environment, self.say)
        return cast("Diagnostic", self.environment).expected(self.say)


def _alphabet(environment: object) -> Sequence[str]:
    if isinstance(environment, OpenSpiel):
        return sorted({move for decision in environment.decisions() for move in decision.moves})
    if isinstance(environment, Matrix):
        return "".join(sorted(set("".join(environment.table.moves))))
    return cast("Diagnostic", environment).alphabet


def _matrix_values(game: Matrix, say: Callable[[int, str], Mapping[str, float]]) -> tuple[float, ...]:
    """Return what each seat of a matrix game of one round earns on average."""
    players = game.table.players
    told = game.start(game.task("train", 0), [f"agent_{k}" for k in range(players)], 0)
    chances = [say(seat, told.observe(f"agent_{seat}")) for seat in range(players)]
    total = [0.0] * players
    for joint, paid in game.table.payoffs.items():
        chance = math.prod(chances[seat].get(letter, 0.0) for seat, letter in enumerate(joint))
        total = [sum_ + chance * own for sum_, own in zip(total, paid, strict=True)]
    return tuple(total)


def legal_start(seen: str) -> Mapping[str, float]:
    """Return how a player of OpenSpiel's games starts that draws evenly from the moves which it reads are legal."""
    return dict.fromkeys(read_listed(seen), 40.0)


def tokens_of(groups: Sequence[Group]) -> int:
    """Return what a step has sampled, continuations included, and shared turns once."""
    turns = sum(
        len(turn.completion_ids) for _, turn in turns_of(groups, trained_only=False) if not turn.copied
    )
    return turns + sum(sum(each.continued.values()) for one in groups for each in one.episodes)


@dataclass(frozen=True)
class Curve:
    """What one run came to."""

    tokens: Sequence[int]
    values: Sequence[float]
    """The team's exact worth after so many sampled tokens."""

    def area(self, most: int) -> float:
        """Return the mean of the worth over the tokens from 0 to `most`, each held until the next."""
        total = 0.0
        for k, (begin, value) in enumerate(zip(self.tokens, self.values, strict=True)):
            end = self.tokens[k + 1] if k + 1 < len(self.tokens) else most
            total += max(0, min(end, most) - min(begin, most)) * value
        return total / most

    @property
    def end(self) -> float:
        """The last worth."""
        return self.values[-1]


def learn(
    run: TableRun, tokens: int, every: int = 1, worth: Callable[[TableRun], float] = lambda run: run.value
) -> Curve:
    """Let a team learn until it has sampled so many tokens; look at its worth at every `every`-th step."""
    spent, places, values = 0, [0], [worth(run)]
    while spent < tokens:
        groups, _ = run.step()
        spent += tokens_of(groups)
        if run.number % every == 0 or spent >= tokens:
            places.append(spent)
            values.append(worth(run))
    return Curve(places, values)


def language_curve(recipe: Mapping[str, Any], tokens: int, window: int = 4) -> Curve:
    """Let a team of language models learn until it has sampled so many tokens; its worth is what episodes earn, over `window` steps."""
    spent, places = 0, [0]
    earned: list[float] = []
    with Trainer(resolve(recipe)) as trainer:
        for step in trainer.steps():
            paid = [
                sum(sum(turn.reward for turn in episode.turns) for episode in one.episodes)
                / len(one.episodes)
                for one in step.groups
            ]
            earned.append(sum(paid) / len(paid))
            spent += tokens_of(step.groups)
            places.append(spent)
            if spent >= tokens:
                break
    # What a step's episodes earn is the worth of the weights before it.
    values = [sum(earned[k : k + window]) / len(earned[k : k + window]) for k in range(len(earned))]
    return Curve(places, [*values, values[-1]])


def moves(run: TableRun, repeats: int) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Take the same first step again and again, with other episodes; yield by how much it moves every policy, and its tokens.

    Of algorithms that remember, what they remember continues.
    """
    before = {
        name: {key: t.clone() for key, t in run.engine.weights(name).items()} for name in run.team.trained
    }
    for _ in range(repeats):
        groups, _ = run.step()
        after = {name: run.engine.weights(name)["table"].detach().double() for name in run.team.trained}
        yield (
            {name: after[name] - before[name]["table"].detach().double() for name in after},
            tokens_of(groups),
        )
        for name, weights in before.items():
            run.engine.load_weights(name, weights)
        run.loop.publish()


def exact_gradient(run: TableRun) -> dict[str, Tensor]:
    """Return the gradient of the team's worth by every policy's table, by small differences of each number that it depends on."""
    found = {}
    small = 1e-3
    for name in run.team.trained:
        table, version = run.engine.weights(name)["table"].detach().clone(), run.engine.versions[name]
        gradient = torch.zeros_like(table, dtype=torch.float64)
        for row in run.rows_of(name):
            for token in range(run.model.tokens):
                worth = []
                for sign in (1, -1):
                    moved = table.clone()
                    moved[row, token] += sign * small
                    run.player.load(name, {"table": moved}, version)
                    worth.append(run.value)
                gradient[row, token] = (worth[0] - worth[1]) / (2 * small)
        run.player.load(name, {"table": table}, version)
        found[name] = gradient
    return found


@dataclass(frozen=True)
class Anatomy:
    """A first step that was taken again and again, against the exact gradient."""

    gradient: Mapping[str, Tensor]
    steps: Mapping[str, Tensor]
    """Policy → by how much every one moved its table."""
    tokens: float
    """Sampled in a step."""

    @property
    def noise(self) -> float:
        """How many tokens of steps must be averaged until their error is as large as the gradient.

        Each policy's step counts as the multiple of its gradient that is nearest to it on average, so that rates and scales are omitted.
        Infinite where no step of a policy moved it along its gradient: such steps say nothing of it.
        """
        error = 0.0
        for name, towards in self.gradient.items():
            steps = self.steps[name]
            multiple = _multiple(steps.mean(0), towards)
            if multiple == 0.0:
                return math.inf
            error += float((steps / multiple - towards).square().sum((1, 2)).mean())
        return error / sum(float(towards.square().sum()) for towards in self.gradient.values()) * self.tokens

    @property
    def cosine(self) -> float:
        """The cosine of the angle between the expected step and the gradient, over all policies; 1 if it is a multiple of it."""
        along = size = expected = 0.0
        for name, towards in self.gradient.items():
            steps = self.steps[name]
            along += float((steps.mean(0) * towards).sum())
            size += float(towards.square().sum())
            # Over pairs of different steps, since a mean of noisy steps is longer than the expected one.
            alone = float(steps.square().sum())
            expected += (float(steps.sum(0).square().sum()) - alone) / (len(steps) * (len(steps) - 1))
        return along / math.sqrt(size * max(expected, 1e-12))

    def multiples(self, policy: str, rows: Sequence[int]) -> list[float]:
        """Return for rows of a policy how many times the gradient the expected step is."""
        mean = self.steps[policy].mean(0)
        return [_multiple(mean[row], self.gradient[policy][row]) for row in rows]


def _multiple(step: Tensor, towards: Tensor) -> float:
    return float((step * towards).sum() / towards.square().sum())


def anatomy(run: TableRun, repeats: int) -> Anatomy:
    """Take the first step so often, and the exact gradient."""
    gradient = exact_gradient(run)
    found, tokens = zip(*moves(run, repeats), strict=True)
    steps = {name: torch.stack([each[name] for each in found]) for name in gradient}
    return Anatomy(gradient, steps, sum(tokens) / repeats)


def noise(run: TableRun, repeats: int) -> float:
    """Return the noise of the first step, in tokens; see `Anatomy.noise`."""
    return anatomy(run, repeats).noise


def relay_start(right: Sequence[float], letters: int = 4) -> Callable[[str], Mapping[str, float]]:
    """Return how a chain starts that plays `relay`: with what chance each seat says the right letter to whatever it reads."""

    def logits(seen: str) -> Mapping[str, float]:
        seat, _, new_messages = seen.partition(" ")
        chance = right[int(seat.split("/")[0]) - 1]
        letter = Relay(letters=letters).right(0, 0, ((0, new_messages),) if new_messages else ())
        return {letter: math.log(chance * (letters - 1) / (1 - chance))}

    return logits
