"""Whether trainer and sampler agree on weights and distribution, token by token; float64 judges where they do not.

The largest gap of a step does not decide by itself. Weights that have grown can make one token in a thousand depend on
sums whose terms nearly cancel; two correct float32 passes then differ there by more than any bound that is useful
elsewhere, and both differ from float64 by as much. A fault (other weights, another token, another temperature) leaves the
trainer close to float64 and the sampler far from it, or changes more than a few tokens.

So a step with gaps above the bound passes only if few tokens are above it (`SHARE`), none by more than `CEILING` bounds,
and each by no more than `ROUNDINGS` times the effect of rounding errors of the compute type on that token. It costs
nothing while there is no such gap.

Shapes: T targets of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kapelle.engines.train.sums import add_metric
from kapelle.errors import ParityError
from kapelle.models.exact import exact_logprobs, rounding_of
from kapelle.models.language_model import LanguageModel
from kapelle.rows import Column, Sample

PARITY = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.1}
"""Default bound on |trainer − sampler| log-prob (nats) by compute type; half precision as measured."""

SHARE = 0.01
"""Greatest share of a step's tokens above the bound; one token always may be."""

CEILING = 100.0
"""Greatest gap, in bounds: beyond it the compute type is too coarse for these weights."""

ROUNDINGS = 16.0
"""Greatest gap, in root mean squares of the token's rounding error; in correct passes it stays below 7 (measured)."""

MOST_ROWS = 64
"""Most sequences that are computed in float64."""


LearnerModels = Mapping[str, tuple[LanguageModel, str | None]]
"""Learner → its model, and its adapter."""


@dataclass(frozen=True, slots=True)
class ParityFinding:
    """The verdict of float64 on a step whose largest gap is above the bound."""

    tokens: int
    """Tokens above the bound."""
    total: int
    """Tokens that were compared."""
    learner: str = ""
    sampler: float = 0.0
    """Distance of the sampler's log-prob from float64 (nats), at the token that rounding explains least."""
    trainer: float = 0.0
    """The same distance for the trainer."""
    rounding: float | None = None
    """Root mean square of the rounding error there; None if nothing was computed in float64."""
    refused: str | None = None
    """Why the step cannot pass; None if rounding explains everything."""

    def describe(self) -> str:
        """Return it in words."""
        where = f"{self.tokens} of {self.total} tokens are above the bound"
        if self.rounding is None:
            return f"{where}; {self.refused}"
        distances = (
            f"against float64 the sampler is off by {self.sampler:.2g} and the trainer by {self.trainer:.2g} "
            f"(policy '{self.learner}'), where rounding makes about {self.rounding:.2g}"
        )
        return f"{where}; {distances}: {self.refused}" if self.refused else f"{where}; {distances}"


def check_parity(
    gaps: Sequence[Tensor],
    bound: float,
    totals: dict[str, list[float]],
    judge: Callable[[float, float], ParityFinding],
) -> None:
    """Record the largest and the mean gap; without gaps nothing happens.

    Where one is above the bound, `judge(bound, worst)` compares both sides with float64: ParityError if rounding
    does not explain it, else the number of such tokens is recorded too.
    """
    if not gaps:
        return
    gap = torch.cat([each.to(gaps[0].device) for each in gaps])
    worst = float(gap.max())
    if not worst <= bound:
        found = judge(bound, worst)
        if found.refused is not None:
            raise ParityError(
                f"Trainer and sampler log-probs differ by {worst:.3g} nats (bound {bound:.3g}): {found.describe()}. See "
                "docs/troubleshooting.md; `training.parity_tolerance` sets the bound, also when a run is resumed."
            )
        totals["parity/rounded"] = [found.tokens + totals.get("parity/rounded", [0.0])[0], 1.0]
    totals["parity/max"] = [max(worst, totals.get("parity/max", [0.0])[0]), 1.0]
    add_metric(totals, "parity/mean", float(gap.sum()), float(gap.numel()))


def judge_in_float64(
    samples: Sequence[Sample],
    score: Callable[[Sequence[Sample]], list[Tensor]],
    models: LearnerModels,
    bound: float,
    worst: float,
) -> ParityFinding:
    """Judge the samples of a step whose largest gap is `worst`; `score` is the trainer's forward pass."""
    policy = [sample for sample in samples if Column.BEHAVIOUR in sample.columns]
    suspects: list[tuple[float, Sample, Tensor, Tensor]] = []
    """Samples with a gap above the bound: the largest one, the sample, the trainer's log-probs, where it is above."""
    total = 0
    for sample, trainer_T in zip(policy, score(policy), strict=True):
        counts_T = torch.ones_like(trainer_T) if sample.mask is None else sample.mask
        gap_T = (trainer_T - sample.columns[Column.BEHAVIOUR]).abs()
        above_T = ~(gap_T <= bound) & counts_T.bool()  # NaN is above every bound
        total += len(above_T)
        if bool(above_T.any()):
            suspects.append((float((gap_T * counts_T).max()), sample, trainer_T, above_T))
    suspects.sort(key=lambda suspect: -suspect[0])
    finding = ParityFinding(sum(int(above_T.sum()) for *_, above_T in suspects), total)
    if not suspects or not worst <= 2 * suspects[0][0]:
        return replace(finding, refused="scored once more, the trainer returns other log-probs")
    model = models[suspects[0][1].learner][0]
    if model.flat is None or model.sharded_pass is not None:
        return replace(
            finding, refused="for this architecture or engine there is no pass in float64 to compare with"
        )
    try:
        compared = (
            _compared(sample, trainer_T, above_T, models, finding)
            for _, sample, trainer_T, above_T in suspects[:MOST_ROWS]
        )
        found = max(compared, key=_unexplained)
    except (torch.OutOfMemoryError, MemoryError):
        return replace(finding, refused="there was no memory to compare them with float64")
    if not _unexplained(found) <= ROUNDINGS:
        if found.sampler >= found.trainer:
            why = "the tokens were sampled with other weights, or from another distribution, than those that are trained"
        else:
            why = "the trainer does not compute what its weights define; please report it"
        return replace(found, refused=why)
    if (
        found.tokens > max(1, SHARE * found.total)
        or len(suspects) > MOST_ROWS
        or not worst <= CEILING * bound
    ):
        why = (
            "the weights have grown too large for the compute type; go back to an earlier checkpoint with a "
            "lower `optimizer.lr`"
        )
        return replace(found, refused=why)
    return found


def _compared(
    sample: Sample, trainer_T: Tensor, above_T: Tensor, models: LearnerModels, finding: ParityFinding
) -> ParityFinding:
    """Return the finding at the token of a sample that rounding explains least."""
    model, adapter = models[sample.learner]
    arguments = (model, adapter, sample.tokens, sample.targets, sample.temperature)
    exact_T = exact_logprobs(*arguments)
    rounding_T = rounding_of(*arguments, exact_T)
    logprobs = (sample.columns[Column.BEHAVIOUR], trainer_T)
    off_by = [(each.double() - exact_T).abs().nan_to_num(torch.inf) for each in logprobs]
    each = [
        replace(finding, learner=sample.learner, sampler=float(s), trainer=float(t), rounding=float(r))
        for s, t, r, above in zip(*off_by, rounding_T, above_T, strict=True)
        if above
    ]
    return max(each, key=_unexplained)


def _unexplained(found: ParityFinding) -> float:
    assert found.rounding is not None
    return max(found.sampler, found.trainer) / max(found.rounding, 1e-12)
