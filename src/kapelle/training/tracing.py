"""What each token of a few episodes was credited with, for people who look at a run; nothing is trained on it.

Shapes: T completion tokens of one turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kapelle.algorithm import Credit
from kapelle.engines.train.protocol import Examines, TrainEngine
from kapelle.metrics.definitions import own_returns
from kapelle.rows import Column, Sample, TurnKey
from kapelle.runs.episode_json import Trace, TracedTurn
from kapelle.types import Group, Turn


def traces(
    groups: Sequence[Group],
    turns: Sequence[tuple[TurnKey, Turn]],
    credit: Mapping[TurnKey, Credit],
    samples: Mapping[TurnKey, Sample],
    engine: TrainEngine,
    most: int,
    known: dict[str, dict[int, str]],
) -> tuple[Trace, ...]:
    """Return the traces of up to `most` episodes of a step that has just been learned from; `turns` are its trained ones.

    `known` holds the text of tokens by policy and id, from step to step; what is missing is added.

    The engine evaluates their tokens with the new weights: that is all it costs.
    """
    kept = chosen(groups, most)
    traced = [(key, turn) for key, turn in turns if key in samples and key[:2] in kept]
    if not traced:
        return ()
    # For each policy, the sum of |weight × advantage| over the tokens of the step.
    pieces: dict[str, list[Tensor]] = {}
    for key, turn in turns:
        if key in credit:
            pieces.setdefault(turn.policy, []).append(credit[key].weight * credit[key].advantage_T)
    shares = {policy: float(torch.cat(own).abs().sum()) for policy, own in pieces.items()}
    asked = [samples[key] for key, _ in traced]
    if isinstance(engine, Examines):
        evaluated = engine.examine(asked)
    else:
        evaluated = [logp_T[:, None] for logp_T in engine.score(asked)]
    places = [(g, e) for g, group in enumerate(groups) for e in range(len(group.episodes))]
    lines = {place: line for line, place in enumerate(places)}
    found: dict[tuple[int, int], tuple[list[TracedTurn], dict[int, str]]] = {}
    for (key, turn), row_T2 in zip(traced, evaluated, strict=True):
        drawn, vocabulary = found.setdefault((key.group, key.episode), ([], {}))
        texts = known.setdefault(turn.policy, {})
        for token in {*turn.prompt_ids, *turn.completion_ids} - texts.keys():
            texts[token] = engine.renderer(turn.policy).decode((token,))
        vocabulary |= {token: texts[token] for token in turn.prompt_ids}
        given = credit[key]
        sample = samples[key]
        total = shares[turn.policy]
        advantage_T = torch.as_tensor(given.advantage_T).float().expand(len(turn.completion_ids))
        ratio_T = (row_T2[:, 0] - sample.columns[Column.BEHAVIOUR]).exp()
        drawn.append(
            TracedTurn(
                turn.index,
                [texts[token] for token in turn.completion_ids],
                advantage_T.tolist(),
                (given.weight * advantage_T / total if total else torch.zeros_like(advantage_T)).tolist(),
                ratio_T.tolist(),
                row_T2[:, 1].tolist() if row_T2.shape[1] > 1 else (),
            )
        )
    return tuple(Trace(lines[place], *found[place]) for place in sorted(found, key=lines.__getitem__))


def chosen(groups: Sequence[Group], most: int) -> set[tuple[int, int]]:
    """Return (group, episode) of those to keep: best and worst of each group, the group with the largest spread first."""
    ranked: list[tuple[float, int, list[int]]] = []  # minus the spread: the largest first
    for g, group in enumerate(groups):
        earned = {
            e: sum(own_returns(each).values()) for e, each in enumerate(group.episodes) if each.error is None
        }
        if earned:
            order = sorted(earned, key=lambda e: (-earned[e], e))
            ranked.append(
                (earned[order[-1]] - earned[order[0]], g, list(dict.fromkeys((order[0], order[-1]))))
            )
    places = [(g, e) for _, g, ends in sorted(ranked) for e in ends]
    return set(places[:most])
