"""Who is off where trainer and sampler disagree, and whether rounding explains it: judged in float64.

The largest gap of a step is no judge by itself. Weights that have grown can make one token in a thousand hang on sums
whose terms nearly cancel; two right float32 passes then differ there by more than any bound that is of use elsewhere,
and both are off from float64 by as much. A fault (other weights, another token, another temperature) leaves the trainer
where float64 is and the sampler far from it, or moves more than a few tokens.

So a step with gaps above the bound passes only when all of this holds: few tokens are above it (`SHARE`), none of them
by more than `CEILING` bounds, and each by no more than `ROUNDINGS` times what rounding errors of the compute type do to that
very token. It costs nothing while there is no such gap.

Shapes: T targets of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kapelle.models.exact import exact_logprobs, rounding_of
from kapelle.models.language_model import LanguageModel
from kapelle.rows import Column, Sample

SHARE = 0.01
"""Greatest share of a step's tokens above the bound; one token always may be."""

CEILING = 100.0
"""Greatest gap, in bounds: beyond, the compute type no longer carries these weights."""

ROUNDINGS = 16.0
"""Greatest gap, in root mean squares of what rounding does to the token; in right passes it stays below 7 (measured)."""

MOST_ROWS = 64
"""Most sequences that are looked at in float64."""


Homes = Mapping[str, tuple[LanguageModel, str | None]]
"""The model that a learner stands on, and its adapter."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What float64 says of a step whose largest gap is above the bound."""

    tokens: int
    """How many are above the bound."""
    total: int
    """Tokens that were compared."""
    learner: str = ""
    sampler: float = 0.0
    """How far the sampler's log-prob is from float64, nats; at the token that rounding explains least."""
    trainer: float = 0.0
    """How far the trainer's is."""
    rounding: float | None = None
    """Root mean square of what rounding does there; None where float64 was not asked."""
    refused: str | None = None
    """Why the step cannot pass; None when rounding explains all."""

    def told(self) -> str:
        """Return it in words."""
        where = f"{self.tokens} of {self.total} tokens are above the bound"
        if self.rounding is None:
            return f"{where}; {self.refused}"
        held = (
            f"against float64 the sampler is off by {self.sampler:.2g} and the trainer by {self.trainer:.2g} "
            f"(policy '{self.learner}'), where rounding makes about {self.rounding:.2g}"
        )
        return f"{where}; {held}: {self.refused}" if self.refused else f"{where}; {held}"


@dataclass(frozen=True, slots=True)
class _Row:
    sample: Sample
    trainer_T: Tensor
    above_T: Tensor
    """Where the gap is above the bound, or no number."""
    worst: float


def arbitrate(
    samples: Sequence[Sample],
    score: Callable[[Sequence[Sample]], list[Tensor]],
    homes: Homes,
    bound: float,
    worst: float,
) -> Finding:
    """Judge the samples of a step whose largest gap is `worst`; `score` is the trainer's."""
    policy = [sample for sample in samples if Column.BEHAVIOUR in sample.columns]
    rows = [_row(*each, bound) for each in zip(policy, score(policy), strict=True)]
    total = sum(len(row.above_T) for row in rows)
    suspects = sorted((row for row in rows if bool(row.above_T.any())), key=lambda row: -row.worst)
    tokens = sum(int(row.above_T.sum()) for row in suspects)
    finding = Finding(tokens, total)
    if not suspects or not worst <= 2 * suspects[0].worst:
        return replace(finding, refused="scored once more, the trainer says something else")
    if homes[suspects[0].sample.learner][0].flat is None:
        return replace(
            finding, refused="of this architecture there is no pass in float64 to hold them against"
        )
    try:
        found = max((_held(row, homes, finding) for row in suspects[:MOST_ROWS]), key=_unexplained)
    except (torch.OutOfMemoryError, MemoryError):
        return replace(finding, refused="there was no memory to hold them against float64")
    return replace(found, refused=_fault(found, len(suspects), bound, worst))


def _row(sample: Sample, trainer_T: Tensor, bound: float) -> _Row:
    counts_T = torch.ones_like(trainer_T) if sample.mask is None else sample.mask
    gap_T = (trainer_T - sample.columns[Column.BEHAVIOUR]).abs()
    return _Row(sample, trainer_T, ~(gap_T <= bound) & counts_T.bool(), float((gap_T * counts_T).max()))


def _held(row: _Row, homes: Homes, finding: Finding) -> Finding:
    sample, (model, adapter) = row.sample, homes[row.sample.learner]
    asked = (model, adapter, sample.tokens, sample.targets, sample.temperature)
    exact_T = exact_logprobs(*asked)
    rounding_T = rounding_of(*asked, exact_T)
    said = (sample.columns[Column.BEHAVIOUR], row.trainer_T)
    sampler_T, trainer_T = ((each.double() - exact_T).abs().nan_to_num(torch.inf) for each in said)
    each = [
        replace(finding, learner=sample.learner, sampler=float(s), trainer=float(t), rounding=float(r))
        for s, t, r, above in zip(sampler_T, trainer_T, rounding_T, row.above_T, strict=True)
        if above
    ]
    return max(each, key=_unexplained)


def _unexplained(found: Finding) -> float:
    assert found.rounding is not None
    return max(found.sampler, found.trainer) / max(found.rounding, 1e-12)


def _fault(found: Finding, rows: int, bound: float, worst: float) -> str | None:
    if not _unexplained(found) <= ROUNDINGS:
        if found.sampler >= found.trainer:
            return "the tokens were sampled by other weights, or from another distribution, than the ones that are trained"
        return "the trainer computes something else than its weights say; please report it"
    if found.tokens > max(1, SHARE * found.total) or rows > MOST_ROWS or not worst <= CEILING * bound:
        return (
            "the weights have grown until the compute type cannot carry them; go back to an earlier checkpoint with a "
            "lower `optimizer.lr`"
        )
    return None
