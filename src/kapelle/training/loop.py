"""The one loop: rollout → credit → collate → update → publish.

`Loop.step` is all of training; `trainer.py` records, saves and shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kapelle.algorithm import (
    MIXER_UNDONE,
    Algorithm,
    CreditMemory,
    Loss,
    Mover,
    Order,
    Outputs,
    Targets,
    UpdateSamples,
)
from kapelle.algorithms.shared.rewards import with_scores
from kapelle.engines.rollout.protocol import RolloutEngine
from kapelle.engines.train.protocol import CountsTokens, Objective, TrainEngine
from kapelle.environment import CountsCosts, offers
from kapelle.errors import NumericsError
from kapelle.evaluation.evaluate import greedy_play, verifier_metrics
from kapelle.league.seating import Seating
from kapelle.metrics.definitions import demonstrated, own_returns, rollout_metrics, without_unscored
from kapelle.metrics.distributions import Histogram
from kapelle.metrics.statistics import merge_rows
from kapelle.metrics.timeline import Timeline
from kapelle.rollout.outcomes import halt_on_failures
from kapelle.rollout.partial import PartialGroup, unfinished_turns
from kapelle.rollout.play import Play, PlaysGroups, shared_rollout
from kapelle.rows import Learners, Loads, Sample, Sampled, Signals, turns_of
from kapelle.runs.episode_json import Trace
from kapelle.runtime.interrupts import unbroken
from kapelle.runtime.process_tree import doing
from kapelle.runtime.randomness import capture_random, derive_seed, restore_random
from kapelle.runtime.tensors import leaves
from kapelle.settings.schema import RunConfig
from kapelle.signals.samples import policy_sample
from kapelle.signals.verifier import VerifierScores, calibration_of, scores
from kapelle.training.boundary import after_update, checked_loss, gather_signals, give_credit
from kapelle.training.collate import critic_samples, demonstrated_samples, fresh_samples, policy_samples
from kapelle.training.league import League
from kapelle.training.refreshing import RefreshedVerifier
from kapelle.training.rollouts import Pending, PlayedStep, RolloutQueue, play_step, steps_ahead
from kapelle.training.selection import Replay, remembered, replayed, tasks_of
from kapelle.training.step_report import (
    advantages_of,
    credit_distributions,
    credit_metrics,
    critic_metrics,
    played_distributions,
    traced_distributions,
    traces,
    why_idle,
)
from kapelle.types import Group

# -------- The state before a step of training, so that an interrupted step leaves no trace
#
# Playing changes the random generators and the queue of played steps. An update of one optimiser step can be interrupted
# only before it; before an update of several, the learners are copied. Copies are kept in the machine's memory, not the
# GPU's.

MOST_HELD = 1 << 30
"""Most bytes of weights and moments that are copied; above it a step that is interrupted late costs the steps since
the last checkpoint."""


class StepStart:
    """The state before a step, as far as the step has changed it."""

    def __init__(
        self,
        engine: TrainEngine,
        memories: Sequence[CreditMemory | RefreshedVerifier | League],
        queue: RolloutQueue,
        *,
        may_go_back: bool,
    ) -> None:
        """Take what a step changes; `may_go_back` is whether there is a checkpoint to return to if it cannot be undone."""
        self.may_go_back = may_go_back
        self.lost = False
        """True if learners are changed without a copy."""
        self._engine, self._memories, self._queue = engine, memories, queue
        self._versions = dict(engine.versions)
        self._random = capture_random()
        self._played = queue.snapshot()
        self._learners: Mapping[str, Any] | None = None
        self._remembered: list[dict[str, object]] = []

    def hold(self, *, learners: bool) -> None:
        """Copy what an update changes: the memories, and the learners if there are several optimiser steps."""
        if learners:
            state = self._engine.state()
            if sum(tensor.nbytes for tensor in tensors(state)) <= MOST_HELD:
                self._learners = copied(state)
            else:
                self.lost = True
        self._remembered = [deepcopy(memory.state()) for memory in self._memories]

    def undo(self) -> bool:
        """Restore everything; False if learners changed that were not copied."""
        # An error may come between the steps of two learners, where a stop does not.
        moved = self._learners is None and dict(self._engine.versions) != self._versions
        if self.lost or moved:
            return False
        if self._learners is not None:
            self._engine.load_state(self._learners)
        if self._remembered:
            for memory, state in zip(self._memories, self._remembered, strict=True):
                memory.load_state(state)
        self._queue.restore(self._played)
        restore_random(self._random)
        return True


def tensors(tree: object) -> Iterator[Tensor]:
    """Yield the tensors of a tree of mappings, lists and tuples."""
    return (leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor))


def copied(tree: Any) -> Any:
    """Return a tree with every tensor copied to the CPU."""
    if isinstance(tree, Tensor):
        return torch.empty_like(tree, device="cpu").copy_(tree.detach())
    if isinstance(tree, Mapping):
        return {key: copied(inner) for key, inner in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(copied(inner) for inner in tree)
    return tree


# -------- One update of a step: all policies at once, some of them, or one after another, by the algorithm's order
#
# Critics learn at every step, whichever policies are updated.


def update_in_order(
    engine: TrainEngine, objective: Objective, order: Order, chosen: Sequence[str], samples: UpdateSamples
) -> dict[str, float]:
    """Take the optimiser steps of the policies in `chosen` and of all critics; return metrics."""
    mover = Mover(lambda some: engine.update(some, objective), engine.score)
    return order.move(mover, chosen, samples)


COMPARED = 16
"""Turns of each policy that are compared with the trainer when a step is played before its turn, and of each member of a league."""

Source = Callable[[int], list[Group]]
"""Number of a step (from 1) → what it learns from; called once for each step, in order."""


class Sampler(Protocol):
    """Plays the steps of training somewhere else, while this process learns."""

    def begin(self, number: int, left: Sequence[PartialGroup], seating: Seating | None = None) -> Pending:
        """Begin to play step `number` with the weights that were published last; return what waits for its episodes.

        `left` is what the step before it has left, `seating` says who of a league sits where.
        """
        ...

    def load(self, policy: str, weights: Mapping[str, Tensor], version: int) -> None:
        """Take new weights of a policy; nothing is being played."""
        ...

    @property
    def weights(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The weights that it plays with, by policy and name: those of the last `load`."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One step of training, finished."""

    number: int
    """From 1; equal to the number of steps behind the weights."""
    groups: tuple[Group, ...]
    metrics: Mapping[str, float]
    traces: tuple[Trace, ...] = ()
    """What the tokens of a few of its episodes were credited with (`record.credit_episodes`)."""
    idle: str = ""
    """Why it had nothing to learn from, in words; empty where it had."""
    distributions: Mapping[str, Histogram] = field(default_factory=dict)
    """How rewards, advantages, lengths and tokens are distributed, by kind and agent or policy."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What an update has done."""

    metrics: Mapping[str, float]
    updated: bool
    """Whether there was anything to learn from."""
    traces: tuple[Trace, ...] = ()
    distributions: Mapping[str, Histogram] = field(default_factory=dict)
    """Of advantages, and of what the traces hold."""


class Loop:
    """Plays, credits, updates and publishes, one step at a time."""

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        play: Play,
        engine: TrainEngine,
        source: Source | None = None,
        player: RolloutEngine | None = None,
        sampler: Sampler | None = None,
        learners: Learners | None = None,
        league: League | None = None,
    ) -> None:
        """Take what plays (`play`) and what learns (`engine`); for demonstrations a teacher plays.

        A `source` gives what each step learns from, and nothing is played. `player` is the rollout engine that gets new
        weights; None for none. A `sampler` plays the steps in `play`'s place, and gets new weights too. `learners` is asked by
        signals and hooks; None for the engine. A `league` seats others in the places of the team's agents.
        """
        self.league = league
        self._learners = learners or engine
        self._sampler = sampler
        self._source = source
        self._config = config
        self._algorithm = algorithm
        self._play = play
        self._engine = engine
        self._player = player
        self.tasks = tasks_of(play, config)
        """The tasks of every step."""
        self._queue = RolloutQueue(steps_ahead(config.training), config.training.max_staleness)
        self._token_texts: dict[str, dict[int, str]] = {}
        """Texts of tokens, by policy and id."""
        self._memory = algorithm.memory(play.team, config.seed) if algorithm.memory else None
        payer = algorithm.need(VerifierScores)
        refresh = None if payer is None else payer.refresh
        self._refreshed = None if refresh is None else RefreshedVerifier(refresh, config.seed, engine)
        for signal in algorithm.needs:
            if isinstance(signal, Loads):
                signal.load()
        critic, update = algorithm.critic, algorithm.update
        self._objective = Objective(
            checked_loss(algorithm.name, "policy_loss", algorithm.policy_loss),
            checked_loss(algorithm.name, "critic_loss", critic.loss) if critic else None,
            critic.coefficient if critic else 1.0,
            update.entropy,
            update.epochs,
            update.minibatches,
            parity=algorithm.plays and not config.training.max_staleness and config.tasks.replay is None,
        )

    def start_step(self, *, may_go_back: bool = False) -> StepStart:
        """Return the state before the next step; `may_go_back` as for `StepStart`."""
        memories = [each for each in (self._memory, self._refreshed, self.league) if each is not None]
        return StepStart(self._engine, memories, self._queue, may_go_back=may_go_back)

    def step(self, number: int, start: StepStart | None = None) -> Step:
        """Take step `number` (from 1) and return what happened; the result follows from the loop's state and the seed.

        If it is interrupted or fails, `start` (of `start_step`) can undo it.
        """
        start = start or self.start_step()
        config, algorithm = self._config, self._algorithm
        clock = Timeline()
        play = replace(self._play, timeline=clock)

        # Rollout: play the step's tasks, or take what a step before it has played ahead.
        doing(f"step {number}, rollout")
        self.tasks.measure(play)
        if self.league is not None:
            self.tasks.seating = self.league.seat(number)
        groups, parity = self._episodes(play.as_asked(algorithm.data), number)
        halt_on_failures(groups, config.training.max_failed_share)
        metrics = rollout_metrics(groups, algorithm.returns or own_returns)
        if not algorithm.plays:
            metrics = demonstrated(metrics)
        if config.training.max_staleness:
            metrics |= {"staleness": self._queue.staleness(groups)}
        metrics |= {**parity, **self.tasks.metrics()}
        if self.league is not None:
            others = self._engine.check_parity(self.league.parity_samples(groups, COMPARED))
            metrics |= {"league/parity": others["parity/max"]} if others else {}
        again: Replay = ()
        if (replay := config.tasks.replay) is not None:
            again = replayed(self._queue.replay, replay, number, config.seed, groups)
            self._queue.replay = remembered(self._queue.replay, replay, number, groups)

        # Signals: what credit and loss need to know of the turns (values, reference log-probs, a verifier's scores).
        doing(f"step {number}, scores")
        clock.enter("score")
        learning = [*groups, *(group for _, group in again)]
        judged = config.reward_model is not None or algorithm.data.scores
        if algorithm.returns is not None and not judged:
            learning = [without_unscored(group) for group in learning]
        sampled = Sampled(number, learning, play.team, lambda: self._greedily(play, learning, number))
        signals = gather_signals(algorithm, sampled, self._learners)
        clock.leave()
        if signals.score:
            metrics |= verifier_metrics(learning, signals.score)
        if config.tasks.replay is not None:
            metrics |= self._age(again, number)

        # Credit and update.
        doing(f"step {number}, update")
        clock.enter("update")
        self._play.engine.release_caches()
        several = (
            algorithm.update.order.sequential
            or self._refreshed is not None
            or self._objective.epochs * self._objective.minibatches > 1
        )
        start.hold(learners=several)
        # Where nothing could restore the weights, a stop waits for the update's end.
        with unbroken() if start.lost and not start.may_go_back else nullcontext():
            learned = self._learn(sampled, signals, len(groups))
            metrics |= learned.metrics
            if self._refreshed is not None:
                metrics |= self._refreshed.learn(number, groups)
        if self.league is not None:
            with unbroken():  # weights have changed: a stop waits for the step's end
                metrics |= self.league.learn(number, groups)
        clock.leave()

        # Wait for the episodes that were played while this step learned; compare them with the weights that played.
        clock.enter("generate")
        settled = self._queue.settle()
        if settled is not None:
            assert self._sampler is not None, "only a sampler plays meanwhile"
            parity = self._compare(*settled, parity, self._sampler.weights)
        metrics |= parity
        if self.league is not None and self.league.began_anew:
            self._queue.forget()
        clock.leave()

        # Publish the new weights.
        doing(f"step {number}, publishing its weights")
        clock.enter("publish")
        after_update(algorithm, sampled, self._learners)
        self.publish()
        clock.leave()

        # What another process plays, it counts itself, and nobody reads it there.
        if offers(play.environment, CountsCosts) and not (
            self._sampler or isinstance(play.engine, PlaysGroups)
        ):
            metrics |= play.environment.costs()
        seconds = clock.seconds()
        total = sum(seconds.values())
        told = (turn for _, turn in turns_of(groups, trained_only=False) if not turn.copied)
        tokens = sum(len(turn.completion_ids) for turn in told)
        tokens += sum(sum(e.continued.values()) for group in groups for e in group.episodes)
        idle = why_idle(algorithm, metrics, updated=learned.updated, judged=judged)
        metrics |= {f"time/{name}": spent for name, spent in seconds.items()}
        metrics |= {"time/step": total, "time/tokens_per_second": tokens / max(total, 1e-9)}
        spread = {**played_distributions(groups), **learned.distributions}
        if isinstance(self._engine, CountsTokens):
            spread |= self._engine.distributions()
        return Step(number, tuple(groups), metrics, learned.traces, idle, spread)

    def _episodes(self, play: Play, number: int) -> tuple[list[Group], dict[str, float]]:
        """Return what step `number` learns from, and how far trainer and sampler differ where they are compared now.

        Raises ParityError if weights other than the allowed ones sampled it.
        """
        config, algorithm, sampler = self._config, self._algorithm, self._sampler
        if self._source is not None:
            return self._source(number), {}
        if not algorithm.plays:
            return play_step(play, config, algorithm, self.tasks, number).groups, {}
        versions = dict(self._engine.versions)
        parity: dict[str, float] = {}

        def played(k: int, left: Sequence[PartialGroup]) -> PlayedStep:
            nonlocal parity
            step = (
                play_step(play, config, algorithm, self.tasks, k, left)
                if sampler is None
                else sampler.begin(k, left, self.tasks.seating)()
            )
            # Where steps are played ahead, the update comes too late to compare trainer and sampler.
            if config.training.max_staleness or config.tasks.replay:
                parity = self._compare(step, versions, parity)
                play.engine.release_caches()  # as a sampling process does: what is kept would be read by the next play
            return step

        def begin(k: int, left: Sequence[PartialGroup]) -> Pending:
            assert sampler is not None, "only a sampler plays meanwhile"
            return sampler.begin(k, left, self.tasks.seating)

        groups = self._queue.take(number, versions, played, None if sampler is None else begin)
        return groups, parity

    def _age(self, again: Replay, number: int) -> dict[str, float]:
        """Return how many groups are learned from again, how old they are, and how far the weights have moved since."""
        row = {"replay_groups": float(len(again))}
        if again:
            turns = turns_of([group for _, group in again])
            scored = self._engine.score([policy_sample(t, self._play.team, t.policy, {}) for _, t in turns])
            gaps = [now_T - torch.tensor(t.logprobs) for now_T, (_, t) in zip(scored, turns, strict=True)]
            row["replay_age"] = sum(number - when for when, _ in again) / len(again)
            if gaps:
                row["replay_log_ratio"] = float(torch.cat(gaps).abs().mean())
        return row

    def _compare(
        self,
        played: PlayedStep,
        versions: Mapping[str, int],
        before: Mapping[str, float],
        weights: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> dict[str, float]:
        """Compare some of the tokens that weights of these versions sampled with the trainer's log-probs of them.

        Returns the gaps, merged with those found `before`.
        """
        turns = [turn for _, turn in turns_of(played.groups)] + unfinished_turns(played.left)
        partial = self._config.training.partial_rollouts
        fresh = fresh_samples(turns, self._play.team, COMPARED, versions if partial else None)
        return merge_rows([before, self._engine.check_parity(fresh, weights)])

    def _learn(self, sampled: Sampled, signals: Signals, fresh: int) -> Learned:
        """Give credit to a step's turns, and update policies and critics; the first `fresh` groups are the step's own."""
        config, algorithm, engine, team = self._config, self._algorithm, self._engine, self._play.team
        groups, number = sampled.groups, sampled.number
        if config.reward_model is not None:
            groups = with_scores(groups, signals.score, config.reward_model.weight)
        give = self._memory or algorithm.credit
        if give is None:
            shown = demonstrated_samples(groups, team, algorithm.data.observations)
            return Learned(engine.update(shown, self._objective) if shown else {}, updated=bool(shown))

        # Credit: the advantage of every token, and the return that critics learn.
        stop = config.training.non_finite == "stop"
        credit = give_credit(algorithm, give, sampled, groups, signals, stop)
        advantages = advantages_of(sampled.trained, credit)
        metrics = credit_metrics(sampled.trained, credit, advantages)
        if self._memory is not None:
            metrics |= self._memory.metrics()
            if MIXER_UNDONE in metrics and stop:
                raise NumericsError(
                    f"At step {number} the fit of utilities and mixer broke its weights. No checkpoint holds them; lower "
                    "`algorithm.fit.lr` in a new run, or leave such fits out: resume with `training.non_finite=skip`."
                )

        # Collate: the tokens that each policy and critic is trained on.
        critics: list[Sample] = []
        if algorithm.critic:
            critics = critic_samples(groups, team, credit, signals, algorithm.critic, engine.renderer)
            if algorithm.critic.view != "answer":
                metrics |= critic_metrics(critics)
        learned = policy_samples(sampled.trained, team, credit, signals)

        # Update. In the first steps critics may learn alone.
        warming = number <= config.training.critic_warmup
        chosen = () if warming else algorithm.update.order.choose(team.trained, number, config.seed)
        metrics |= update_in_order(
            engine,
            self._objective_at(number),
            algorithm.update.order,
            chosen,
            UpdateSamples(learned, critics, groups),
        )
        found: tuple[Trace, ...] = ()
        if most := config.record.credit_episodes:
            with unbroken():  # weights have changed: a stop waits for the step's end
                found = traces(
                    groups[:fresh], sampled.trained, credit, learned, engine, most, self._token_texts
                )
        spread = credit_distributions(advantages) | traced_distributions(groups[:fresh], found)
        return Learned(metrics, updated=bool(learned or critics), traces=found, distributions=spread)

    def _objective_at(self, number: int) -> Objective:
        """Return what the update of a step minimises."""
        algorithm, annealed = self._algorithm, self._algorithm.annealed
        if annealed is None:
            return self._objective
        done = (number - 1) / self._config.training.steps

        def loss(outputs: Outputs, targets: Targets) -> Loss:
            return annealed(done)(outputs, targets)

        return replace(self._objective, policy_loss=checked_loss(algorithm.name, "annealed", loss))

    def _greedily(self, play: Play, groups: Sequence[Group], number: int) -> Sequence[Group]:
        """Play each task once more, all agents greedy."""
        seed = derive_seed(self._config.seed, "greedy", number)
        played = shared_rollout(greedy_play(play), [group.task for group in groups], 1, seed)
        model = self._config.reward_model
        # The returns that it is compared with have the reward model's term too.
        if model is None:
            return played
        judged = scores(played, self._learners, calibration_of(model.path))
        return with_scores(played, judged, model.weight)

    def state(self) -> dict[str, object]:
        """Return the memories of credit and of graded answers, and the queue of played steps, for a checkpoint."""
        memory = self._memory.state() if self._memory is not None else {}
        refreshed = {} if self._refreshed is None else {"refreshed": self._refreshed.state()}
        league = {} if self.league is None else {"league": self.league.state()}
        return {
            "memory": memory,
            "ahead": self._queue.state(),
            "tasks": self.tasks.state(),
            **refreshed,
            **league,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._queue.load_state(state["ahead"])
        self.tasks.load_state(state.get("tasks", "null"))
        if self._memory is not None:
            self._memory.load_state(state["memory"])
        if self._refreshed is not None:
            self._refreshed.load_state(state["refreshed"])
        if self.league is not None:
            self.league.load_state(state["league"])

    def publish(self) -> None:
        """Load weights that changed since the last call into the rollout engine."""
        if self._player is None:
            return
        for policy, published in self._engine.publish().items():
            self._player.load(policy, published.weights, published.version)
            if self._sampler is not None:
                self._sampler.load(policy, published.weights, published.version)
