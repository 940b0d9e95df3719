"""One update of a step: all policies at once, some of them, or one after another.

Critics learn at every step, whichever policies move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kapelle.algorithm import Order, TurnKey
from kapelle.engines.train.batch import Sample
from kapelle.engines.train.protocol import Objective, TrainEngine
from kapelle.functional.policy_losses import happo_factor
from kapelle.types import Group


def update_in_order(
    engine: TrainEngine,
    objective: Objective,
    order: Order,
    chosen: Sequence[str],
    policies: Mapping[TurnKey, Sample],
    critics: Sequence[Sample],
    groups: Sequence[Group],
) -> dict[str, float]:
    """Take the optimiser steps of the policies in `chosen` and of all critics; return metrics.

    `policies` holds each credited turn's sample, `critics` what critics learn from.
    """
    if not order.sequential:
        samples = [sample for sample in policies.values() if sample.learner in chosen]
        everything = [*samples, *critics]
        return engine.update(everything, objective) if everything else {}
    return _one_after_another(engine, objective, order, chosen, policies, critics, rounds_of(groups))


def rounds_of(groups: Sequence[Group]) -> dict[TurnKey, tuple[int, int, int]]:
    """Return each turn's (group, episode, round); the k-th turns of all agents are one round."""
    rounds: dict[TurnKey, tuple[int, int, int]] = {}
    for g, group in enumerate(groups):
        for e, episode in enumerate(group.episodes):
            taken: dict[str, int] = {}
            for turn in episode.turns:
                k = taken.get(turn.agent, 0)
                taken[turn.agent] = k + 1
                rounds[TurnKey(g, e, turn.index)] = (g, e, k)
    return rounds


def _one_after_another(
    engine: TrainEngine,
    objective: Objective,
    order: Order,
    chosen: Sequence[str],
    policies: Mapping[TurnKey, Sample],
    critics: Sequence[Sample],
    rounds: Mapping[TurnKey, tuple[int, int, int]],
) -> dict[str, float]:
    """HAPPO (2109.11251 §4.2): M multiplies the advantages of whoever moves later, in the same round."""
    number = {place: k for k, place in enumerate(dict.fromkeys(rounds.values()))}
    factor_S = torch.ones(len(number), dtype=torch.float64)
    rows: list[dict[str, float]] = []
    waiting = list(critics)
    for policy in chosen:
        own = {key: sample for key, sample in policies.items() if sample.learner == policy}
        weighted = [_times(sample, factor_S[number[rounds[key]]]) for key, sample in own.items()]
        if weighted or waiting:
            rows.append(engine.update([*weighted, *waiting], objective))
        waiting = []
        if policy != chosen[-1]:
            places = [number[rounds[key]] for key in own]
            factor_S = _after(engine, list(own.values()), places, factor_S, order.old)
    if waiting:
        rows.append(engine.update(waiting, objective))
    merged = merge_rows(rows)
    if len(chosen) > 1 and len(factor_S):
        merged["happo_factor"] = float(factor_S.mean())
        merged["happo_factor_spread"] = float(factor_S.std(correction=0))
    return merged


def _times(sample: Sample, factor: Tensor) -> Sample:
    advantage_T = sample.columns["advantage"] * factor.float()
    return replace(sample, columns={**sample.columns, "advantage": advantage_T})


def _after(
    engine: TrainEngine, own: Sequence[Sample], places: Sequence[int], factor_S: Tensor, old: str
) -> Tensor:
    """Return M after a policy's update: times its turns' ratios against the log-probs in column `old`."""
    log_ratio_S, acted_S = torch.zeros_like(factor_S), torch.zeros_like(factor_S)
    for place, sample, logp_T in zip(places, own, engine.score(own), strict=True):
        log_ratio_S[place] = (logp_T.double() - sample.columns[old].double()).sum()
        acted_S[place] = 1.0
    return happo_factor(factor_S, log_ratio_S, acted_S)


def merge_rows(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return one row of several updates' metrics: the worst parity, the mean of everything else."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        merged[name] = max(values) if name == "parity/max" else sum(values) / len(values)
    return merged
