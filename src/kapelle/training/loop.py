"""The training loop. Each step collects episodes, computes credit, collates samples, updates the weights and publishes them.

`Loop.step` contains a complete training step. The module `trainer.py` records, saves and displays the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
from kapelle.engines.train.protocol import CountsTokens, Objective, TrainEngine
from kapelle.environment import UsesModels, offers
from kapelle.errors import NumericsError
from kapelle.functional.distributions import Histogram
from kapelle.rollout.episodes import CollectsGroups, shared_rollout
from kapelle.rollout.evaluation.evaluate import greedy_setup, verifier_metrics
from kapelle.rollout.outcomes import halt_on_failures
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import Learners, Loads, Sample, Sampled, Signals, TurnKey, turns_of
from kapelle.runs.definitions import demonstrated, own_returns, rollout_metrics, without_unscored
from kapelle.runs.episode_json import Trace
from kapelle.runs.timeline import Timeline
from kapelle.runtime.process_tree import doing
from kapelle.runtime.randomness import derive_seed
from kapelle.settings.feature import sections_of
from kapelle.settings.schema import RunConfig
from kapelle.training.boundary import after_update, checked_loss, gather_signals, give_credit
from kapelle.training.collate import (
    critic_samples,
    demonstrated_samples,
    observed_samples,
    policy_samples,
)
from kapelle.training.feature import Feature, StepInProgress
from kapelle.training.rollouts import Rollouts
from kapelle.training.step_report import (
    Step,
    advantages_of,
    credit_distributions,
    credit_metrics,
    critic_metrics,
    episode_distributions,
    traced_distributions,
    traces,
    why_idle,
)
from kapelle.types import Group

Phase = Literal["before_rollouts", "after_rollouts", "before_update", "after_update"]


@dataclass(frozen=True, slots=True)
class Learned:
    """The result of an update other than its metrics."""

    updated: bool
    """Whether any sample was trained on in the step."""
    traces: tuple[Trace, ...] = ()
    distributions: Mapping[str, Histogram] = field(default_factory=dict)
    """The distributions of advantages and of the values of traced tokens."""


class Loop:
    """The training loop, which takes one step at a time: collect episodes, compute credit, and update and publish weights."""

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        setup: RolloutSetup,
        engine: TrainEngine,
        rollouts: Rollouts,
        learners: Learners | None = None,
        features: Mapping[str, Feature] | None = None,
    ) -> None:
        """Create the loop from the rollout setup, the train engine, and the object that collects episodes.

        The object `learners` computes scores for signals and hooks; the default is the train engine. `features` maps the path
        of a settings section to the feature.
        """
        self.features: Mapping[str, Feature] = features or {}
        self.rollouts = rollouts
        self._learners = learners or engine
        self._config = config
        self.algorithm = algorithm
        self.setup = setup
        self.engine = engine
        self._token_texts: dict[str, dict[int, str]] = {}
        """The text of each token, by policy and token id."""
        self.memory = algorithm.memory(setup.team, config.seed) if algorithm.memory else None
        for signal in algorithm.needs:
            if isinstance(signal, Loads):
                signal.load()
        self._judged = algorithm.data.scores or any(
            section.rewards_turns for section in sections_of(config).values()
        )
        """Whether turns have rewards in addition to those of the environment."""
        critic, update = algorithm.critic, algorithm.update
        self._objective = Objective(
            checked_loss(algorithm.name, "policy_loss", algorithm.policy_loss),
            checked_loss(algorithm.name, "critic_loss", critic.loss) if critic else None,
            critic.coefficient if critic else 1.0,
            update.entropy,
            update.epochs,
            update.minibatches,
            parity=algorithm.collects_episodes and rollouts.on_policy,
        )

    def step(self, number: int) -> Step:
        """Take the step with the given number (starting from 1) and return its report.

        The step depends only on the state of the loop and the seed.
        """
        clock = Timeline()
        step = StepInProgress(number, replace(self.setup, timeline=clock), self.rollouts.tasks)

        doing(f"step {number}, rollout")
        self._each("before_rollouts", step)
        self._collect(step)
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
            self._settle(step)

        doing(f"step {number}, publishing its weights")
        with clock.phase("publish"):
            after_update(self.algorithm, sampled, self._learners)
            self.publish()
        return self._finished(step, learned, clock)

    def _each(self, phase: Phase, step: StepInProgress) -> None:
        for feature in self.features.values():
            getattr(feature, phase)(step)

    def _collect(self, step: StepInProgress) -> None:
        """Collect the episodes of the step, and add their metrics."""
        algorithm = self.algorithm
        step.groups = self.rollouts.collect(step)
        halt_on_failures(step.groups, self._config.training.max_failed_share)
        metrics = rollout_metrics(step.groups, algorithm.returns or own_returns)
        step.metrics = (metrics if algorithm.collects_episodes else demonstrated(metrics)) | step.metrics

    def _score(self, step: StepInProgress) -> tuple[Sampled, Signals]:
        """Return the batch and the signals of its turns, such as values, reference log-probs and scores."""
        algorithm = self.algorithm
        groups = [*step.groups, *step.earlier]
        if algorithm.returns is not None and not self._judged:
            groups = [without_unscored(group) for group in groups]
        sampled = Sampled(step.number, groups, step.setup.team, lambda: self.greedily(step, groups))
        signals = gather_signals(algorithm, sampled, self._learners)
        if signals.score:
            step.metrics |= verifier_metrics(groups, signals.score)
        return sampled, signals

    def greedily(self, step: StepInProgress, groups: Sequence[Group]) -> Sequence[Group]:
        """Collect one episode per task with greedy decoding. These episodes are rewarded like the other episodes of the step."""
        seed = derive_seed(self._config.seed, "greedy", step.number)
        greedy: Sequence[Group] = shared_rollout(
            greedy_setup(step.setup), [group.task for group in groups], 1, seed
        )
        for feature in self.features.values():
            greedy = feature.rewarded(greedy, None)
        return greedy

    def _learn(self, step: StepInProgress, sampled: Sampled, signals: Signals) -> Learned:
        """Compute the credit of the turns of a step, update policies and critics, and add metrics."""
        config, algorithm, engine, team = self._config, self.algorithm, self.engine, self.setup.team
        order, metrics, number = algorithm.update.order, step.metrics, step.number
        self.setup.engine.release_caches()
        groups: Sequence[Group] = sampled.groups
        for feature in self.features.values():
            groups = feature.rewarded(groups, signals)
        give = self.memory or algorithm.credit
        if give is None:
            shown = demonstrated_samples(groups, team, algorithm.data.observations)
            metrics |= engine.update(shown, self._objective) if shown else {}
            return Learned(updated=bool(shown))

        # Credit: the advantage of every token, and the return that critics are trained to predict.
        stop = config.training.non_finite == "stop"
        credit = give_credit(algorithm, give, sampled, groups, signals, stop)
        advantages = advantages_of(sampled.trained, credit)
        metrics |= credit_metrics(sampled.trained, credit, advantages)
        if self.memory is not None:
            metrics |= self.memory.metrics()
            if MIXER_UNDONE in metrics and stop:
                raise NumericsError(
                    f"The fit of utilities and mixer in step {number} gave values that are not finite. Lower `algorithm.fit.lr` in a new run, or resume "
                    "with `training.non_finite=skip`, which skips such fits."
                )

        # Collate: the tokens that each policy and critic is trained on.
        critics: list[Sample] = []
        if algorithm.critic:
            critics = critic_samples(groups, team, credit, signals, algorithm.critic, engine.renderer)
            if algorithm.critic.view != "answer":
                metrics |= critic_metrics(critics)
        policies: Mapping[TurnKey, Sample] = policy_samples(sampled.trained, team, credit, signals)
        objective = self._objective_at(number)
        for feature in self.features.values():
            policies = feature.samples(step, sampled, policies)
            objective = feature.objective(objective)
        observed = observed_samples(sampled.trained, policies) if algorithm.data.observations else []

        # Update all critics, and the policies that the order chooses; in the first steps, only critics may be updated.
        warming = number <= config.training.critic_warmup
        chosen = () if warming else order.choose(team.trained, number, config.seed)
        batch = UpdateSamples(policies, critics, groups, observed)
        metrics |= update_in_order(engine, objective, order, chosen, batch)

        collected, found = groups[: len(step.groups)], tuple[Trace, ...]()
        if most := config.record.credit_episodes:
            found = traces(collected, sampled.trained, credit, policies, engine, most, self._token_texts)
        spread = credit_distributions(advantages) | traced_distributions(collected, found)
        return Learned(updated=bool(policies or critics), traces=found, distributions=spread)

    def _objective_at(self, number: int) -> Objective:
        """Return the objective that the update of step `number` minimises."""
        algorithm, annealed = self.algorithm, self.algorithm.annealed
        if annealed is None:
            return self._objective
        done = (number - 1) / self._config.training.steps

        def loss(outputs: Outputs, targets: Targets) -> Loss:
            return annealed(done)(outputs, targets)

        return replace(self._objective, policy_loss=checked_loss(algorithm.name, "annealed", loss))

    def _settle(self, step: StepInProgress) -> None:
        """Wait for episodes that are collected during the update. If a policy restarted, drop the samples collected so far."""
        self.rollouts.settle(step)
        if step.restarted:
            self.rollouts.forget()
            for feature in self.features.values():
                feature.forget()

    def publish(self) -> None:
        """Load all weights that have changed since the last call into all samplers."""
        if not self.rollouts.players:
            return
        for policy, published in self.engine.publish().items():
            for player in self.rollouts.players:
                player.load(policy, published.weights, published.version)

    def _finished(self, step: StepInProgress, learned: Learned, clock: Timeline) -> Step:
        """Return the report of a finished step."""
        setup, groups, metrics = step.setup, step.groups, step.metrics
        # Environment costs of other sampling processes are not collected.
        here = len(self.rollouts.players) <= 1 and not isinstance(setup.engine, CollectsGroups)
        if here and offers(setup.environment, UsesModels):
            metrics |= setup.environment.costs()
        seconds = clock.seconds()
        total = sum(seconds.values())
        turns = [turn for _, turn in turns_of(groups, trained_only=False) if not turn.copied]
        tokens = sum(len(turn.completion_ids) for turn in turns)
        tokens += sum(sum(episode.continued.values()) for group in groups for episode in group.episodes)
        idle = why_idle(self.algorithm, metrics, updated=learned.updated, judged=self._judged)
        metrics |= {f"time/{name}": spent for name, spent in seconds.items()}
        metrics |= {"time/step": total, "time/tokens_per_second": tokens / max(total, 1e-9)}
        spread = {**episode_distributions(groups), **learned.distributions}
        if isinstance(self.engine, CountsTokens):
            spread |= self.engine.distributions()
        return Step(step.number, tuple(groups), metrics, learned.traces, idle, spread)

    def state(self) -> dict[str, object]:
        """Return the state of the credit memory, the collected episodes and the states of the features, for a checkpoint."""
        return {
            "memory": self.memory.state() if self.memory is not None else {},
            "ahead": self.rollouts.state(),
            "features": {path: feature.state() for path, feature in self.features.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that a call of `state` returned."""
        self.rollouts.load_state(state["ahead"])
        if self.memory is not None:
            self.memory.load_state(state["memory"])
        for path, feature in self.features.items():
            feature.load_state(state["features"][path])


def update_in_order(
    engine: TrainEngine, objective: Objective, order: Order, chosen: Sequence[str], samples: UpdateSamples
) -> dict[str, float]:
    """Update all critics and the `chosen` policies in the given order, and return the metrics."""
    mover = Mover(lambda some: engine.update(some, objective), engine.score)
    return order.move(mover, chosen, samples)
