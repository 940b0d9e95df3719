"""The one loop: rollout → credit → collate → update → publish.

`Loop.step` is all of training; `trainer.py` records, saves and shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from kapelle.algorithm import MIXER_UNDONE, Algorithm, CreditFunction, CreditMemory, UpdateSamples
from kapelle.algorithms.shared.rewards import with_scores
from kapelle.engines.rollout.protocol import RolloutEngine
from kapelle.engines.train.protocol import Objective, TrainEngine
from kapelle.errors import NumericsError
from kapelle.evaluation.evaluate import greedy_play, verifier_metrics
from kapelle.metrics.definitions import demonstrated, own_returns, rollout_metrics
from kapelle.metrics.statistics import merge_rows
from kapelle.metrics.timeline import Timeline
from kapelle.rollout.outcomes import halt_on_failures
from kapelle.rollout.play import Play
from kapelle.rollout.shared import shared_rollout
from kapelle.rollout.under_way import GroupUnderWay, unfinished_turns
from kapelle.rows import Loads, Sample, Sampled, Signals, gathered, turns_of
from kapelle.runs.traces import Trace
from kapelle.runtime.family import doing
from kapelle.runtime.interrupts import unbroken
from kapelle.runtime.seeds import derive_seed
from kapelle.settings.schema import RunConfig
from kapelle.signals.verifier import scores
from kapelle.training.collate import critic_samples, demonstrated_samples, fresh_samples, policy_samples
from kapelle.training.idle_steps import why_idle
from kapelle.training.queue import RolloutQueue, UnderWay
from kapelle.training.step_metrics import credit_metrics, critic_metrics, time_metrics
from kapelle.training.step_play import PlayedStep, play_step, steps_ahead
from kapelle.training.step_start import StepStart
from kapelle.training.tracing import traces
from kapelle.training.updates import update_in_order
from kapelle.types import Group

COMPARED = 16
"""Turns of each policy that are compared with the trainer when a step is played before its turn."""

Source = Callable[[int], list[Group]]
"""Number of a step (from 1) → what it learns from; called once for each step, in order."""


class Sampler(Protocol):
    """Plays the steps of training somewhere else, while this process learns."""

    def begin(self, number: int, left: Sequence[GroupUnderWay]) -> UnderWay:
        """Begin to play step `number` with the weights that were published last; return what waits for its episodes.

        `left` is what the step before it has left.
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
    ) -> None:
        """Take what plays (`play`) and what learns (`engine`); for demonstrations a teacher plays.

        A `source` gives what each step learns from, and nothing is played. `player` is the rollout engine that gets new
        weights; None for none. A `sampler` plays the steps in `play`'s place, and gets new weights too.
        """
        self._sampler = sampler
        self._source = source
        self._config = config
        self._algorithm = algorithm
        self._play = play
        self._engine = engine
        self._player = player
        self._queue = RolloutQueue(steps_ahead(config.training), config.training.max_staleness)
        self.may_go_back = False
        """Whether there is a checkpoint to return to if a step is interrupted."""
        self._traces: tuple[Trace, ...] = ()
        self._pieces: dict[str, dict[int, str]] = {}
        """Texts of tokens, by policy and id."""
        self._updated = True
        """Whether this step had anything to learn from."""
        self._parity: dict[str, float] = {}
        """Gaps of the turns played in this step, if the step itself learns from turns of older weights."""
        self._memory = algorithm.memory(play.team, config.seed) if algorithm.memory else None
        for signal in algorithm.needs:
            if isinstance(signal, Loads):
                signal.load()
        critic, update = algorithm.critic, algorithm.update
        self._objective = Objective(
            algorithm.policy_loss,
            critic.loss if critic else None,
            critic.coefficient if critic else 1.0,
            update.entropy,
            update.epochs,
            update.minibatches,
            parity=algorithm.plays and not config.training.max_staleness,
        )

    def step(self, number: int) -> Step:
        """Take step `number` (from 1) and return what happened; its result depends on the weights alone."""
        clock = Timeline()
        self._parity, self._traces = {}, ()
        self._start = StepStart(self._queue.mark(), self._engine.versions)
        play = replace(self._play, timeline=clock)
        doing(f"step {number}, rollout")
        groups = self._groups(replace(play, tree=self._algorithm.data.tree), number)
        halt_on_failures(groups, self._config.training.max_failed_share)
        metrics = rollout_metrics(groups, self._algorithm.returns or own_returns)
        if not self._algorithm.plays:
            metrics = demonstrated(metrics)
        if self._config.training.max_staleness:
            metrics |= {"staleness": self._queue.staleness(groups), **self._parity}
        doing(f"step {number}, scores")
        clock.enter("score")
        sampled = Sampled(number, groups, play.team, lambda: self._greedily(play, groups, number))
        signals = gathered(self._algorithm.needs, sampled, self._engine)
        clock.leave()
        if signals.score:
            metrics |= verifier_metrics(groups, signals.score)
        doing(f"step {number}, update")
        clock.enter("update")
        self._play.engine.release_caches()
        metrics |= self._update(self._paid(groups, signals), signals, number)
        clock.leave()
        clock.enter("generate")
        self._settle()
        metrics |= self._parity
        clock.leave()
        doing(f"step {number}, publishing its weights")
        clock.enter("publish")
        self._after_update(number)
        clock.leave()
        tokens = sum(len(turn.completion_ids) for _, turn in turns_of(groups, trained_only=False))
        tokens += sum(sum(e.continued.values()) for group in groups for e in group.episodes)
        judged = self._config.reward_model is not None or self._algorithm.data.scores
        idle = why_idle(self._algorithm, metrics, updated=self._updated, judged=judged)
        return Step(number, tuple(groups), metrics | time_metrics(clock, tokens), self._traces, idle)

    def _paid(self, groups: Sequence[Group], signals: Signals) -> Sequence[Group]:
        """Return the groups with the reward model's term added."""
        model = self._config.reward_model
        return groups if model is None else with_scores(groups, signals.score, model.weight)

    def _groups(self, play: Play, number: int) -> list[Group]:
        """Return what step `number` learns from; ParityError if weights other than the allowed ones sampled it."""
        if self._source is not None:
            return self._source(number)
        if not self._algorithm.plays:
            return self._played(play, number).groups
        begin = None if self._sampler is None else self._sampler.begin
        versions = dict(self._engine.versions)

        def played(k: int, left: Sequence[GroupUnderWay]) -> PlayedStep:
            return self._compared(play, k, left, versions)

        return self._queue.take(number, versions, played, begin)

    def _compared(
        self, play: Play, number: int, left: Sequence[GroupUnderWay], versions: Mapping[str, int]
    ) -> PlayedStep:
        """Play a step; if the update comes too late to compare trainer and sampler, compare some turns now."""
        sampler = self._sampler
        played = self._played(play, number, left) if sampler is None else sampler.begin(number, left)()
        if self._config.training.max_staleness:
            self._compare(played, versions)
        return played

    def _settle(self) -> None:
        """Wait for the episodes that were played while this step learned; compare them with the weights that played."""
        settled = self._queue.settle()
        if settled is not None:
            assert self._sampler is not None, "only a sampler plays meanwhile"
            self._compare(*settled, self._sampler.weights)

    def _compare(
        self,
        played: PlayedStep,
        versions: Mapping[str, int],
        weights: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Compare some of the tokens that weights of these versions sampled with the trainer's log-probs of them."""
        partial = self._config.training.partial_rollouts
        turns = [turn for _, turn in turns_of(played.groups)] + unfinished_turns(played.left)
        fresh = fresh_samples(turns, self._play.team, COMPARED, versions if partial else None)
        self._parity = merge_rows([self._parity, self._engine.check_parity(fresh, weights)])

    def _played(self, play: Play, number: int, left: Sequence[GroupUnderWay] = ()) -> PlayedStep:
        return play_step(play, self._config, self._algorithm, number, left)

    def _update(self, groups: Sequence[Group], signals: Signals, number: int) -> dict[str, float]:
        algorithm = self._algorithm
        give = self._memory or algorithm.credit
        often = algorithm.update.order.sequential or self._objective.epochs * self._objective.minibatches > 1
        self._start.hold(self._engine if often else None, self._memory)
        if self._start.lost and not self.may_go_back:
            with unbroken():
                return self._learn(give, groups, signals, number)
        return self._learn(give, groups, signals, number)

    def take_back(self) -> bool:
        """Undo an unfinished step; False if weights have changed that cannot be restored."""
        return self._start.take_back(self._engine, self._memory)

    def _learn(
        self,
        give: CreditMemory | CreditFunction | None,
        groups: Sequence[Group],
        signals: Signals,
        number: int,
    ) -> dict[str, float]:
        team, algorithm = self._play.team, self._algorithm
        if give is None:
            samples = demonstrated_samples(groups, team, algorithm.data.observations)
            self._updated = bool(samples)
            return self._engine.update(samples, self._objective) if samples else {}
        credit = give(groups, signals)
        metrics = credit_metrics(groups, credit)
        if self._memory is not None:
            metrics |= self._memory.metrics()
            if MIXER_UNDONE in metrics and self._config.training.non_finite == "stop":
                raise NumericsError(
                    f"At step {number} the fit of utilities and mixer broke its weights. No checkpoint holds them; lower "
                    "`algorithm.fit.lr` in a new run, or leave such fits out: resume with `training.non_finite=skip`."
                )
        critics: list[Sample] = []
        if algorithm.critic:
            reader = self._engine.renderer
            critics = critic_samples(groups, team, credit, signals, algorithm.critic, reader)
            if algorithm.critic.view != "answer":
                metrics |= critic_metrics(critics)
        learned = policy_samples(groups, team, credit, signals)
        self._updated = bool(learned or critics)
        metrics |= update_in_order(
            self._engine,
            self._objective,
            algorithm.update.order,
            algorithm.update.order.choose(team.trained, number, self._config.seed),
            UpdateSamples(learned, critics, groups),
        )
        if most := self._config.record.credit_episodes:
            with unbroken():  # weights have changed: a stop waits for the step's end
                self._traces = traces(groups, credit, learned, self._engine, most, self._pieces)
        return metrics

    def _greedily(self, play: Play, groups: Sequence[Group], number: int) -> Sequence[Group]:
        """Play each task once more, all agents greedy."""
        seed = derive_seed(self._config.seed, "greedy", number)
        tasks = [group.task for group in groups]
        played = shared_rollout(greedy_play(play), tasks, 1, seed)
        if self._config.reward_model is None:
            return played
        # The returns that it is compared with have the model's term too.
        return self._paid(played, Signals(score=scores(played, self._engine)))

    def _after_update(self, number: int) -> None:
        """Run the algorithm's hooks after an update, and publish the new weights."""
        for hook in self._algorithm.after_update:
            hook(number, self._play.team, self._engine)
        self.publish()

    def state(self) -> dict[str, object]:
        """Return the memory of credit and the queue of played steps, for a checkpoint."""
        memory = self._memory.state() if self._memory is not None else {}
        return {"memory": memory, "ahead": self._queue.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._queue.load_state(state["ahead"])
        if self._memory is not None:
            self._memory.load_state(state["memory"])

    def publish(self) -> None:
        """Load weights that changed since the last call into the rollout engine."""
        if self._player is None:
            return
        for policy, published in self._engine.publish().items():
            self._player.load(policy, published.weights, published.version)
            if self._sampler is not None:
                self._sampler.load(policy, published.weights, published.version)
