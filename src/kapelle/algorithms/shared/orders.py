"""The order of updates defines which policies a step updates: together, or one after another with HAPPO's factor."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from kapelle.algorithm import Mover, Order, UpdateSamples
from kapelle.errors import ConfigError, did_you_mean
from kapelle.functional.policy_losses import happo_factor
from kapelle.functional.statistics import merge_rows
from kapelle.rows import Column, TurnKey
from kapelle.runtime.on_demand import torch
from kapelle.runtime.randomness import derive_seed
from kapelle.settings.base import Settings
from kapelle.team import Team
from kapelle.types import Group


class Joint(Settings):
    """All policies are updated together in every step."""

    name: Literal["joint"] = "joint"

    def build(self, old: Column = Column.BEHAVIOUR) -> Order:
        """Return the order that these settings describe."""
        return Order()


Interval = Annotated[int, Field(ge=1)]


class Alternate(Settings):
    """One policy is updated at a time, for `interval` steps each (MARFT's `train_cycle`). Critics are trained at every step."""

    name: Literal["alternate"]
    interval: Interval | dict[str, Interval] = 1
    """The number of steps for which one policy is updated before the next policy. A mapping from policies to numbers of steps
    gives each policy a separate interval: policy k of n is updated in the steps with ⌊(step − 1) / interval⌋ mod n = k."""

    def build(self, old: Column = Column.BEHAVIOUR) -> Order:
        """Return the order that these settings describe."""
        return Order(partial(_alternating, interval=self.interval))


class Probability(Settings):
    """Each policy is updated with a given probability. If no policy is selected in a step, one policy is drawn uniformly."""

    name: Literal["probability"]
    probability: float = Field(default=0.5, gt=0.0, le=1.0)
    """The probability that a policy is updated in a step."""

    def build(self, old: Column = Column.BEHAVIOUR) -> Order:
        """Return the order that these settings describe."""
        return Order(partial(_at_random, probability=self.probability))


class Sequential(Settings):
    """The policies are updated one after another, in a new random order per step, with HAPPO's factor (arXiv:2109.11251)."""

    name: Literal["sequential"]

    def build(self, old: Column = Column.BEHAVIOUR) -> Order:
        """Return the order that these settings describe.

        The argument `old` is the column of the log-probs in the denominator of the loss's ratio.
        """
        return Order(_shuffled, partial(one_after_another, old=old))


OrderConfig = Annotated[Joint | Alternate | Probability | Sequential, Field(discriminator="name")]


def _alternating(
    policies: Sequence[str], step: int, seed: int, *, interval: int | Mapping[str, int]
) -> tuple[str, ...]:
    """Return the policies that a step updates. Policy k of n is updated if ⌊(step − 1) / interval⌋ mod n = k (siiRL's `train_cycle`).

    A common interval always selects one policy. Unequal intervals can select several policies, or no policy; in the latter
    case, only critics are trained. A policy without an interval is updated at every step.
    """
    if isinstance(interval, int):
        return (policies[(step - 1) // interval % len(policies)],)
    return tuple(
        name
        for place, name in enumerate(policies)
        if name not in interval or (step - 1) // interval[name] % len(policies) == place
    )


def _at_random(policies: Sequence[str], step: int, seed: int, *, probability: float) -> tuple[str, ...]:
    draw = random.Random(derive_seed(seed, "order", step))
    chosen = tuple(name for name in policies if draw.random() < probability)
    return chosen or (draw.choice(list(policies)),)


def _shuffled(policies: Sequence[str], step: int, seed: int) -> tuple[str, ...]:
    order = list(policies)
    random.Random(derive_seed(seed, "order", step)).shuffle(order)
    return tuple(order)


def order_checks(order: OrderConfig, algorithm: str) -> tuple[Callable[[Team], None], ...]:
    """Return the checks that an order requires: functions that raise ConfigError if a team does not fit the order."""
    if isinstance(order, Alternate) and not isinstance(order.interval, int):
        return (partial(_check_intervals, intervals=order.interval),)
    return (partial(check_separate_weights, algorithm=algorithm),) if order.build().sequential else ()


def _check_intervals(team: Team, intervals: Mapping[str, int]) -> None:
    for name in intervals:
        if name not in team.trained:
            raise ConfigError(
                f"`algorithm.order.interval` names '{name}', which is not a trained policy of this team."
                f"{did_you_mean(name, team.trained)} Trained policies: {', '.join(team.trained)}."
            )
    if not intervals:
        raise ConfigError(
            "`algorithm.order.interval` is empty. Set a number of steps, or a mapping from policies to numbers of steps."
        )


def check_separate_weights(team: Team, algorithm: str) -> None:
    """Raise ConfigError unless each trained agent has its own policy."""
    for policy in team.trained:
        agents = team.agents_of(policy)
        if len(agents) > 1:
            raise ConfigError(
                f"`{algorithm}` updates policies one after another, so each agent needs its own; '{agents[0]}' and "
                f"'{agents[1]}' both use '{policy}'. Set `team.sharing: lora`, or `algorithm.name: mappo`."
            )


def one_after_another(
    mover: Mover, chosen: Sequence[str], samples: UpdateSamples, *, old: Column
) -> dict[str, float]:
    """Update policies one after another as in HAPPO (arXiv:2109.11251, section 4.2).

    A factor M multiplies the advantages of policies that are updated later. The factor M is computed per round. The argument
    `old` is the column of the log-probs in the denominator of the ratios in M.
    """
    rounds = rounds_of(samples.groups)
    number = {place: k for k, place in enumerate(dict.fromkeys(rounds.values()))}
    factor_S = torch.ones(len(number), dtype=torch.float64)
    rows: list[dict[str, float]] = []
    critics = list(samples.critics)
    for policy in chosen:
        own = {key: sample for key, sample in samples.policies.items() if sample.learner == policy}
        places = [number[rounds[key]] for key in own]
        weighted = []
        for place, sample in zip(places, own.values(), strict=True):
            advantage_T = sample.columns[Column.ADVANTAGE] * factor_S[place].float()
            weighted.append(replace(sample, columns={**sample.columns, Column.ADVANTAGE: advantage_T}))
        observed = [sample for sample in samples.observed if sample.learner == policy]
        if weighted or critics:
            rows.append(mover.update([*weighted, *observed, *critics]))
        critics = []  # they learn once, with the first policy
        if policy != chosen[-1]:
            # Multiply M by the ratio of the policy's turns under its new weights; by 1 in rounds without such a turn.
            samples_of = list(own.values())
            log_ratio_S, acted_S = torch.zeros_like(factor_S), torch.zeros_like(factor_S)
            for place, sample, logp_T in zip(places, samples_of, mover.score(samples_of), strict=True):
                log_ratio_S[place] = (logp_T.double() - sample.columns[old].double()).sum()
                acted_S[place] = 1.0
            factor_S = happo_factor(factor_S, log_ratio_S, acted_S)
    if critics:
        rows.append(mover.update(critics))
    merged = merge_rows(rows)
    if len(chosen) > 1 and len(factor_S):
        merged["happo_factor"] = float(factor_S.mean())
        merged["happo_factor_spread"] = float(factor_S.std(correction=0))
    return merged


def rounds_of(groups: Sequence[Group]) -> dict[TurnKey, tuple[int, int, int]]:
    """Return a mapping from each turn to a tuple (group number, episode number, round number)."""
    return {
        TurnKey(g, e, turn.index): (g, e, k)
        for g, group in enumerate(groups)
        for e, episode in enumerate(group.episodes)
        for k, movers in enumerate(episode.rounds())
        for turn in movers.values()
    }
