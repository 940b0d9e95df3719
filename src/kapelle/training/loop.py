"""The one loop: rollout → credit → collate → update → publish.

`Loop.step` is all of training; `trainer.py` records, saves and shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from kapelle.algorithm import (
    MIXER_UNDONE,
    Algorithm,
    Loss,
    Mover,
    Order,
    Outputs,
    Targets,
    UpdateSamples,
)
from kapelle.algorithms.shared.rewards import with_scores
from kapelle.algorithms.signals.verifier import calibration_of, scores
from kapelle.engines.rollout.protocol import RolloutEngine
from kapelle.engines.train.protocol import CountsTokens, Objective, TrainEngine
from kapelle.environment import AsksModels, offers
from kapelle.errors import NumericsError
from kapelle.functional.distributions import Histogram
from kapelle.functional.statistics import merge_rows
from kapelle.rollout.episodes import PlaysGroups, shared_rollout
from kapelle.rollout.evaluation.evaluate import greedy_play, verifier_metrics
from kapelle.rollout.outcomes import halt_on_failures
from kapelle.rollout.partial import PartialGroup, unfinished_turns
from kapelle.rollout.play import Play
from kapelle.rows import Learners, Loads, Sample, Sampled, Signals, TurnKey, turns_of
from kapelle.runs.definitions import demonstrated, own_returns, rollout_metrics, without_unscored
from kapelle.runs.episode_json import Trace
from kapelle.runs.timeline import Timeline
from kapelle.runtime.process_tree import doing
from kapelle.runtime.randomness import derive_seed
from kapelle.settings.feature import sections_of
from kapelle.settings.schema import RunConfig
from kapelle.training.boundary import after_update, checked_loss, gather_signals, give_credit
from kapelle.training.collate import critic_samples, demonstrated_samples, fresh_samples, policy_samples
from kapelle.training.feature import Feature, StepInProgress
from kapelle.training.rollouts import Pending, PlayedStep, RolloutQueue, Sampler, play_step, steps_ahead
from kapelle.training.selection import tasks_of
from kapelle.training.step_report import (
    Step,
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

Phase = Literal["before_rollouts", "after_rollouts", "before_update", "after_update"]
Source = Callable[[int], list[Group]]
"""Number of a step (from 1) → what it learns from; called once for each step, in order."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What an update has done, beside the metrics that it adds."""

    updated: bool
    """Whether there was anything to learn from."""
    traces: tuple[Trace, ...] = ()
    distributions: Mapping[str, Histogram] = field(default_factory=dict)
    """Of advantages, and of what the traces hold."""


class Loop:
    """Collects episodes, credits, updates and publishes, one step at a time."""

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
        features: Mapping[str, Feature] | None = None,
    ) -> None:
        """Take what collects episodes (`play`) and what is trained (`engine`); for demonstrations a teacher plays.

        A `source` gives what each step learns from, and nothing is collected. `player` is the rollout engine that gets new
        weights; None for none. A `sampler` collects in `play`'s place, and gets new weights too. `learners` answers signals and
        hooks; None for the engine. `features` are by the path of their section.
        """
        self.features: Mapping[str, Feature] = features or {}
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
        for signal in algorithm.needs:
            if isinstance(signal, Loads):
                signal.load()
        self._on_policy = not config.training.max_staleness and not any(
            section.off_policy for section in sections_of(config).values()
        )
        critic, update = algorithm.critic, algorithm.update
        self._objective = Objective(
            checked_loss(algorithm.name, "policy_loss", algorithm.policy_loss),
            checked_loss(algorithm.name, "critic_loss", critic.loss) if critic else None,
            critic.coefficient if critic else 1.0,
            update.entropy,
            update.epochs,
            update.minibatches,
            parity=algorithm.plays and self._on_policy,
        )

    def step(self, number: int) -> Step:
        """Take step `number` (from 1) and return what happened; the result follows from the loop's state and the seed."""
        clock = Timeline()
        step = StepInProgress(number, replace(self._play, timeline=clock))

        doing(f"step {number}, rollout")
        self._each("before_rollouts", step)
        parity = self._collect(step)
        self._each("after_rollouts", step)

        doing(f"step {number}, scores")
        with clock.phase("score"):
            sampled, signals = self._score(step)
            self._each("before_update", step)

        doing(f"step {number}, update")
        with clock.phase("update"):
            learned = self._learn(step, sampled, signals)
            self._each("after_update", step)
        with clock.phase("generate"):
            self._settle(step, parity)

        doing(f"step {number}, publishing its weights")
        with clock.phase("publish"):
            after_update(self._algorithm, sampled, self._learners)
            self.publish()
        return self._finished(step, learned, clock)

    def _each(self, phase: Phase, step: StepInProgress) -> None:
        for feature in self.features.values():
            getattr(feature, phase)(step)

    def _collect(self, step: StepInProgress) -> dict[str, float]:
        """Collect the step's episodes, or take those that were collected ahead; return how far trainer and sampler differ."""
        config, algorithm = self._config, self._algorithm
        self.tasks.measure(step.play)
        self.tasks.assign = step.assign
        step.groups, parity = self._episodes(step.play.as_asked(algorithm.data), step.number)
        halt_on_failures(step.groups, config.training.max_failed_share)
        step.metrics = rollout_metrics(step.groups, algorithm.returns or own_returns)
        if not algorithm.plays:
            step.metrics = demonstrated(step.metrics)
        if config.training.max_staleness:
            step.metrics |= {"staleness": self._queue.staleness(step.groups)}
        step.metrics |= {**parity, **self.tasks.metrics()}
        return parity

    def _score(self, step: StepInProgress) -> tuple[Sampled, Signals]:
        """Return what is learned from, and what credit and loss need to know of its turns: values, reference log-probs, scores."""
        algorithm, number = self._algorithm, step.number
        learning = [*step.groups, *step.earlier]
        if algorithm.returns is not None and not self._judged:
            learning = [without_unscored(group) for group in learning]
        sampled = Sampled(
            number, learning, step.play.team, lambda: self._greedily(step.play, learning, number)
        )
        signals = gather_signals(algorithm, sampled, self._learners)
        if signals.score:
            step.metrics |= verifier_metrics(learning, signals.score)
        return sampled, signals

    @property
    def _judged(self) -> bool:
        """Whether turns have a worth that is not the environment's reward."""
        return self._config.reward_model is not None or self._algorithm.data.scores

    def _settle(self, step: StepInProgress, parity: Mapping[str, float]) -> None:
        """Wait for the episodes that were collected during the update; compare them with the weights that sampled them."""
        settled = self._queue.settle()
        if settled is not None:
            assert self._sampler is not None, "only a sampler plays meanwhile"
            parity = self._compare(*settled, parity, self._sampler.weights)
        step.metrics |= parity
        if step.restarted:
            self._queue.forget()
            for feature in self.features.values():
                feature.forget()

    def _finished(self, step: StepInProgress, learned: Learned, clock: Timeline) -> Step:
        """Return the step's record."""
        play, groups, metrics = step.play, step.groups, step.metrics
        # Environment costs of other sampling processes are not collected.
        if offers(play.environment, AsksModels) and not (
            self._sampler or isinstance(play.engine, PlaysGroups)
        ):
            metrics |= play.environment.costs()
        seconds = clock.seconds()
        total = sum(seconds.values())
        sampled = (turn for _, turn in turns_of(groups, trained_only=False) if not turn.copied)
        tokens = sum(len(turn.completion_ids) for turn in sampled)
        tokens += sum(sum(e.continued.values()) for group in groups for e in group.episodes)
        idle = why_idle(self._algorithm, metrics, updated=learned.updated, judged=self._judged)
        metrics |= {f"time/{name}": spent for name, spent in seconds.items()}
        metrics |= {"time/step": total, "time/tokens_per_second": tokens / max(total, 1e-9)}
        spread = {**played_distributions(groups), **learned.distributions}
        if isinstance(self._engine, CountsTokens):
            spread |= self._engine.distributions()
        return Step(step.number, tuple(groups), metrics, learned.traces, idle, spread)

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
                else sampler.begin(k, left, self.tasks.roles(k))()
            )
            # Where the update also learns from older samples, it does not compare trainer and sampler.
            if not self._on_policy:
                parity = self._compare(step, versions, parity)
                play.engine.release_caches()  # as a sampling process does: what is kept would be read by the next play
            return step

        def begin(k: int, left: Sequence[PartialGroup]) -> Pending:
            assert sampler is not None, "only a sampler plays meanwhile"
            return sampler.begin(k, left, self.tasks.roles(k))

        groups = self._queue.take(number, versions, played, None if sampler is None else begin)
        return groups, parity

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

    def _learn(self, step: StepInProgress, sampled: Sampled, signals: Signals) -> Learned:
        """Give credit to a step's turns, update policies and critics, and add metrics."""
        config, algorithm, engine, team = self._config, self._algorithm, self._engine, self._play.team
        fresh = len(step.groups)
        self._play.engine.release_caches()
        groups, number = sampled.groups, sampled.number
        if config.reward_model is not None:
            groups = with_scores(groups, signals.score, config.reward_model.weight)
        give = self._memory or algorithm.credit
        if give is None:
            shown = demonstrated_samples(groups, team, algorithm.data.observations)
            step.metrics |= engine.update(shown, self._objective) if shown else {}
            return Learned(updated=bool(shown))

        # Credit: the advantage of every token, and the return that critics learn.
        stop = config.training.non_finite == "stop"
        credit = give_credit(algorithm, give, sampled, groups, signals, stop)
        advantages = advantages_of(sampled.trained, credit)
        metrics = step.metrics
        metrics |= credit_metrics(sampled.trained, credit, advantages)
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
        learned: Mapping[TurnKey, Sample] = policy_samples(sampled.trained, team, credit, signals)
        objective = self._objective_at(number)
        for feature in self.features.values():
            learned = feature.samples(step, sampled, learned)
            objective = feature.objective(objective)

        # Update. In the first steps critics may learn alone.
        warming = number <= config.training.critic_warmup
        chosen = () if warming else algorithm.update.order.choose(team.trained, number, config.seed)
        metrics |= update_in_order(
            engine,
            objective,
            algorithm.update.order,
            chosen,
            UpdateSamples(learned, critics, groups),
        )
        found: tuple[Trace, ...] = ()
        if most := config.record.credit_episodes:
            found = traces(groups[:fresh], sampled.trained, credit, learned, engine, most, self._token_texts)
        spread = credit_distributions(advantages) | traced_distributions(groups[:fresh], found)
        return Learned(updated=bool(learned or critics), traces=found, distributions=spread)

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
        """Return the memory of credit, the queue of collected steps and the features' states, for a checkpoint."""
        return {
            "memory": self._memory.state() if self._memory is not None else {},
            "ahead": self._queue.state(),
            "tasks": self.tasks.state(),
            "features": {path: feature.state() for path, feature in self.features.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._queue.load_state(state["ahead"])
        self.tasks.load_state(state["tasks"])
        if self._memory is not None:
            self._memory.load_state(state["memory"])
        for path, feature in self.features.items():
            feature.load_state(state["features"][path])

    def publish(self) -> None:
        """Load weights that changed since the last call into the rollout engine."""
        if self._player is None:
            return
        for policy, published in self._engine.publish().items():
            self._player.load(policy, published.weights, published.version)
            if self._sampler is not None:
                self._sampler.load(policy, published.weights, published.version)
