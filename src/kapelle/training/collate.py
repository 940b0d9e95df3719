"""Convert episodes to samples, which define the tokens that each learner is trained on.

Shapes: T completion tokens of one turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kapelle.algorithm import Credit, CriticSpec
from kapelle.algorithms.signals.samples import Readers, critic_sample, policy_sample
from kapelle.rows import Column, Sample, Signals, TurnKey, turns_of
from kapelle.team import Team
from kapelle.types import Group, Turn


def fresh_samples(
    turns: Iterable[Turn], team: Team, most: int, versions: Mapping[str, int] | None = None
) -> list[Sample]:
    """Return up to `most` turns of each policy with their sampling log-probs.

    With `versions`, only tokens of these weights are used.
    """
    chosen: dict[str, list[Sample]] = {name: [] for name in team.trained}
    for turn in turns:
        start = 0
        for version, tokens in turn.runs:
            end = start + tokens
            known = versions is None or versions[turn.policy] == version
            if known and tokens and len(chosen[turn.policy]) < most:
                sample = policy_sample(turn, team, turn.policy, {})
                columns: dict[str, Tensor] = {Column.BEHAVIOUR: torch.tensor(turn.logprobs[start:end])}
                chosen[turn.policy].append(
                    replace(sample, targets=sample.targets[start:end], columns=columns)
                )
            start = end
    return [sample for own in chosen.values() for sample in own]


def policy_samples(
    turns: Sequence[tuple[TurnKey, Turn]], team: Team, credit: Mapping[TurnKey, Credit], signals: Signals
) -> dict[TurnKey, Sample]:
    """Return one sample for each trained turn whose credit has a positive weight."""
    samples: dict[TurnKey, Sample] = {}
    weighed = {turn.policy for key, turn in turns if credit[key].weight not in (0.0, 1.0)}
    for key, turn in turns:
        given = credit[key]
        if given.weight > 0:
            columns: dict[str, Tensor] = {
                Column.BEHAVIOUR: torch.tensor(turn.logprobs),
                Column.ADVANTAGE: given.advantage_T.float(),
                **({Column.REFERENCE: signals.reference[key]} if key in signals.reference else {}),
                **({Column.PROXIMAL: signals.proximal[key]} if key in signals.proximal else {}),
            }
            if turn.policy in weighed:
                columns[Column.WEIGHT] = torch.full((len(turn.completion_ids),), float(given.weight))
            samples[key] = replace(policy_sample(turn, team, turn.policy, columns), bundle=given.pair)
    return samples


def critic_samples(
    groups: Sequence[Group],
    team: Team,
    credit: Mapping[TurnKey, Credit],
    signals: Signals,
    need: CriticSpec,
    readers: Readers | None = None,
) -> list[Sample]:
    """Return one sample for each turn with a target for its critic. If there is a value after the turn, it is an additional target."""
    samples: list[Sample] = []
    for key, turn in turns_of(groups, trained_only=not need.everyone):
        given = credit[key]
        target_T = given.return_T
        if target_T is not None:
            value_T = signals.values[key]
            after = given.after is not None and key in signals.after
            if given.after is not None and after:
                target_T = torch.cat([target_T, given.after[None]])
                value_T = torch.cat([value_T, signals.after[key][None]])
            columns: dict[str, Tensor] = {
                Column.RETURN: target_T.float(),
                Column.VALUE: value_T,
                Column.WEIGHT: torch.full_like(target_T, given.weight, dtype=torch.float32),
            }
            episode = groups[key.group].episodes[key.episode]
            sample = critic_sample(episode, turn, team, need, columns, readers, after=after)
            samples.append(replace(sample, bundle=given.pair))
    return samples


def demonstrated_samples(groups: Sequence[Group], team: Team, observations: float) -> list[Sample]:
    """Return samples in which every trained turn is a target. If `observations` > 0, the agent's next observations are also targets.

    Each token of an observation (`observed_places`) has the weight `observations`.
    """
    turns = turns_of(groups)
    if not observations:
        return [policy_sample(turn, team, turn.policy, {}) for _, turn in turns]
    samples: list[Sample] = []
    observed = observed_places(turns)
    for key, turn in turns:
        columns: dict[str, Tensor] = {Column.WEIGHT: torch.ones(len(turn.completion_ids))}
        samples.append(policy_sample(turn, team, turn.policy, columns))
        if places := observed.get(key):
            weights: dict[str, Tensor] = {Column.WEIGHT: torch.full((len(places),), observations)}
            samples.append(_observed_sample(turn, places, weights))
    return samples


def observed_samples(
    turns: Sequence[tuple[TurnKey, Turn]], policies: Mapping[TurnKey, Sample]
) -> list[Sample]:
    """Return one sample for each observation (`observed_places`) of a policy that has samples of its own turns.

    The mask of these samples is 0, so that policy losses count only generated tokens. Their columns contain zeros.
    """
    columns = {sample.learner: tuple(sample.columns) for sample in policies.values()}
    by_key = dict(turns)
    samples = []
    for key, places in observed_places(turns).items():
        turn = by_key[key]
        if turn.policy in columns:
            zeros_T = torch.zeros(len(places))
            sample = _observed_sample(turn, places, dict.fromkeys(columns[turn.policy], zeros_T))
            samples.append(replace(sample, mask=zeros_T))
    return samples


def observed_places(turns: Sequence[tuple[TurnKey, Turn]]) -> dict[TurnKey, range]:
    """Return the positions of an observation in the prompt of each turn that continues a conversation of its agent.

    An observation consists of the tokens that the agent's next prompt adds after the last completion.
    """
    found: dict[TurnKey, range] = {}
    last: dict[tuple[int, int, str], Turn] = {}
    for key, turn in turns:
        before = last.get((key.group, key.episode, turn.agent))
        known = before.prompt_ids + before.completion_ids if before else ()
        if known and turn.prompt_ids[: len(known)] == known and len(turn.prompt_ids) > len(known):
            found[key] = range(len(known), len(turn.prompt_ids))
        last[key.group, key.episode, turn.agent] = turn
    return found


def _observed_sample(turn: Turn, places: range, columns: Mapping[str, Tensor]) -> Sample:
    return Sample(turn.policy, turn.prompt_ids, tuple(places), columns, observed=True, images=turn.images)
