"""Check for each token that trainer and sampler use the same weights and distribution. A float64 pass decides if they differ.

The largest gap between log-probs in a step is not decisive by itself, because it grows with the number of tokens. In
half precision, rounding errors have a heavy tail, and one token in a million is off by a nat in a correct run. In half
precision, the gaps of a step are therefore compared with the effect of rounding on *many* tokens (`improbability`). The
tests use the mean gap and the number of tokens above the bound, twice the bound, four times the bound and so on, for
each learner and each sample. These tests are exact for any number of tokens, so a long step is not stopped more easily
than a short step, and a fault in a few samples is not diluted.

In float32, a gap above the bound is rare and is always examined. Weights that have grown can make one token in a
thousand depend on sums of nearly cancelling terms. The log-probs of two correct float32 passes then differ at such a
token by more than any bound that is useful elsewhere, and both differ from float64 by as much. A fault (wrong weights,
tokens or temperature) either leaves the trainer close to float64 and the sampler far from it, or changes more than a
few tokens.

A bounded number of sequences (`MOST_ROWS`, `MOST_TOKENS`) is computed in float64: the sequences with the largest gaps
and some random sequences. The trainer's log-probs in this comparison are those of the step's own pass. A second pass
would pack the tokens differently, so that other kernels would sum in a different order, and a gap caused by rounding
might disappear. The step passes if all of the following hold: few tokens are above the bound (`SHARE`); no gap exceeds
`CEILING` bounds; each gap is at most `ROUNDINGS` times the effect of rounding errors of the compute type on that token;
and neither trainer nor sampler is off by more than `TIMES` times the distance of the other side and the rounding error.

In tensor shapes, K is the number of targets of several samples, T of targets of one sample, and L of tokens of one
sample; D is the hidden size and E the head size; H and J are the numbers of query heads and key heads, O and I of
features, R of draws, and S of samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kapelle.engines.train.batch import AllowedTargets, allowed_targets
from kapelle.engines.train.torch.sharing import Gaps, add_metric
from kapelle.errors import ParityError
from kapelle.models.fast.attention import capped
from kapelle.models.fast.elementwise import lit
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import BankedLinear, Factors, weight_of
from kapelle.rows import Column, Sample

PARITY = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.1}
"""The default bound on the absolute difference between the log-probs of trainer and sampler in nats, by the type in
which rounding occurs. In half precision, a few tokens exceed the bound."""

ROUGH = frozenset([torch.bfloat16, torch.float16])
"""The compute types whose rounding errors cause gaps above every useful bound at some tokens."""

TAIL = 2e-3
"""The maximum fraction of tokens whose gap exceeds the bound because of rounding. At most an eighth of this fraction
exceeds twice the bound, and so on.

For differences with a mean of 0.02 nats and a maximum of 1 nat in a million tokens, the measured fraction is 0.0003.
"""

MEAN = 1 / 8
"""The maximum mean gap caused by rounding, in units of the bound, with each gap clipped to the bound. The measured
value is 0.05."""

TAIL_OF_ONE, MEAN_OF_ONE = 25 * TAIL, 4 * MEAN
"""The values of `TAIL` and `MEAN` for a single sample, because some texts are harder to compute. The limits for several
samples lie between the two pairs of values."""

DOUBLINGS = 7
"""The number of multiples of the bound (1, 2, 4, …) above which tokens are counted. The largest multiple is 16 nats in
bfloat16."""

SUSPECT = 1e-2
"""A step whose gaps are less probable than this value is examined. Actual rounding errors are far below the limits
above, so correct steps are hardly ever examined."""

CERTAIN = 1e-9
"""A step whose gaps are less probable than this value fails if no float64 pass is available."""

SHARE = 0.01
"""The maximum fraction of a step's tokens whose gap may exceed the bound. One token is always allowed to exceed the
bound."""

CEILING = 100.0
"""The maximum gap in units of the bound. If a gap is larger, the compute type is too coarse for the weights."""

ROUNDINGS = 16.0
"""The maximum gap in units of the root mean square rounding error of the token. In correct passes, the measured gap
stays below 7."""

TIMES = 2.0
"""The maximum median distance of trainer or sampler from float64, as a multiple of the distance of the other side and
of the rounding error."""

MOST_ROWS = 64
"""The maximum number of sequences that are computed in float64."""

MOST_TOKENS = 1 << 15
"""The maximum number of tokens in the sequences that are computed in float64. At least one sequence is always computed."""

FEW = 32
"""The minimum number of tokens for a comparison of medians."""

HUGE = 1.0
"""The median size of weights that only a diverging run reaches. For adapters, the size of the update relative to the
base weights is used. For other weights, the root mean square is used.

Measured sizes for adapters are 0.02 to 0.07 after learning and 1.7 after ten steps at fifty times the learning rate.
"""


DEPTHS = (128, 512, 2048)
"""The boundaries of the ranges of `parity/kl`, as numbers of context tokens. The first range begins at 0."""


LearnerModels = Mapping[str, tuple[LanguageModel, str | None]]
"""Mapping from the name of a learner to its model and the name of its adapter."""


def rounded_as(model: LanguageModel) -> torch.dtype:
    """Return the type in which a model rounds. The type is float16 if CUDA computes float32 matrix products in TF32."""
    tf32 = model.device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return torch.float16 if tf32 and model.dtype == torch.float32 else model.dtype


@dataclass(frozen=True, slots=True)
class ParityFinding:
    """The result of comparing the log-probs of a step with float64."""

    tokens: int
    """The number of tokens whose gap exceeds the bound."""
    total: int
    """The number of compared tokens."""
    learner: str = ""
    sampler: float = 0.0
    """The distance in nats of the sampler's log-prob from float64, at the token that rounding explains least."""
    trainer: float = 0.0
    """The distance in nats of the trainer's log-prob from float64, at the token that rounding explains least."""
    rounding: float | None = None
    """The root mean square rounding error at the token that rounding explains least, or None if nothing was computed in
    float64."""
    failure: str | None = None
    """The reason why the step fails, or None if rounding explains all gaps."""

    @property
    def is_clear(self) -> bool:
        """Whether the sampler is off by so much that rounding cannot be the cause, even if the weights have diverged."""
        known = max(self.trainer, self.rounding or 0.0)
        return self.rounding is not None and self.sampler > CEILING * known

    def describe(self) -> str:
        """Return a description of the finding for an error message."""
        where = f"{self.tokens} of {self.total} tokens are above the bound"
        if self.rounding is None:
            return f"{where}; {self.failure}"
        distances = (
            f"compared with float64, the sampler is off by {self.sampler:.2g} and the trainer by {self.trainer:.2g} "
            f"(policy '{self.learner}'), and rounding explains about {self.rounding:.2g}"
        )
        return f"{where}; {distances}: {self.failure}" if self.failure else f"{where}; {distances}"


def improbability(gap_K: Tensor, group_K: Tensor, samples_G: Tensor, bound: float) -> Tensor:
    """Return an upper bound on the probability that rounding causes the observed gaps, for each group of tokens.

    The result is a float64 tensor of shape (G,). The tensor `group_K` contains the group of each token, and `samples_G`
    the number of samples in each group. The bound assumes that rounding lifts a token above the bound with probability
    at most `TAIL`, and above 2ʲ bounds with probability at most `TAIL`/8ʲ (a power law with exponent 3), and that the
    mean of gaps clipped at the bound is at most `MEAN` bounds. Under these assumptions, the number of tokens above a
    multiple is bounded by a Poisson variable, and Bernstein's inequality bounds the mean, for the largest variance that
    its range and mean allow. The result is the smallest of these probabilities times the number of probabilities, or 1
    for a group without tokens.
    """
    groups, gap_K = len(samples_G), gap_K.double().nan_to_num(torch.inf)
    tokens_G = torch.bincount(group_K, minlength=groups).double()
    tail_G, mean_G = (
        of_all + (of_one - of_all) / samples_G.double()
        for of_all, of_one in ((TAIL, TAIL_OF_ONE), (MEAN, MEAN_OF_ONE))
    )
    found = []
    for doubling in range(DOUBLINGS):
        above_G = torch.bincount(group_K[gap_K > bound * 2**doubling], minlength=groups).double()
        expected_G = (tokens_G * tail_G / 8**doubling).clamp_min(1e-300)
        at_least_G = torch.special.gammainc(above_G.clamp_min(1), expected_G)  # P(Poisson(expected) ≥ above)
        found.append(torch.where(above_G > 0, at_least_G, 1.0))
    over_G = torch.bincount(group_K, (gap_K / bound).clamp_max(1), minlength=groups) - tokens_G * mean_G
    variance_G = tokens_G * mean_G * (1 - mean_G)
    exponent_G = over_G.square() / (2 * (variance_G + over_G.abs() / 3)).clamp_min(1e-300)
    found.append(torch.where(over_G > 0, (-exponent_G).exp(), 1.0))
    return (len(found) * torch.stack(found).min(0).values).clamp_max(1)


def check_parity(
    gaps: Sequence[Gaps],
    samples: Sequence[Sample],
    compute: torch.dtype,
    bound: float,
    totals: dict[str, list[float]],
    models: LearnerModels,
) -> None:
    """Record the largest gap, the mean gap and the KL by context length, for all models of one compute type.

    Without gaps, the function does nothing. The KL divergence from trainer to sampler is estimated as the mean of
    exp(d) − 1 − d, where d is the trainer's log-prob minus the sampler's (k3 of Schulman, "Approximating KL
    divergence", 2020). If the gaps are unlikely to be caused by rounding, some of the samples are compared with
    float64, and ParityError is raised if rounding does not explain the gaps. Otherwise, the number of tokens above the
    bound is also recorded, if there are any. The argument `samples` contains the samples of the step, to which the
    indices in `gaps` refer.
    """
    off_K = torch.cat([each.off_K.to(gaps[0].off_K.device) for each in gaps]) if gaps else torch.zeros(0)
    if not len(off_K):
        return
    gap_K = off_K.abs()
    worst, total = torch.stack([gap_K.double().max(), gap_K.double().sum()]).tolist()  # one synchronisation
    mean, rough = total / len(gap_K), compute in ROUGH
    members = [k for each in gaps for k in each.samples]
    depths = [_counted(samples[k]) for k in members]
    above = 0
    if rough or not worst <= bound:
        gap_K = gap_K.cpu()
        counts = torch.tensor([len(depth_T) for depth_T in depths])
        sample_K = torch.arange(len(members)).repeat_interleave(counts)
        above_K = ~(gap_K <= bound)
        above = int(above_K.sum())
        probability = 0.0
        if rough:
            probability = improbability_of_step(gap_K, sample_K, [samples[k].learner for k in members], bound)
        if probability < SUSPECT:
            largest_S = torch.zeros(len(members), dtype=gap_K.dtype).scatter_reduce(
                0, sample_K, gap_K.nan_to_num(torch.inf), "amax"
            )
            chosen = _chosen(largest_S, [samples[k] for k in members], 0.0 if rough else bound)
            off_S = off_K.cpu().split(counts.tolist())
            found = judge_in_float64(
                [(samples[members[k]], off_S[k]) for k in chosen],
                models,
                bound,
                ParityFinding(above, len(gap_K)),
                rough=rough,
                probability=probability,
            )
            if found.failure is not None:
                learners = dict.fromkeys(each.learner for each in gaps)
                growth = None if found.is_clear else growth_of({name: models[name] for name in learners})
                differ = (
                    f"Trainer and sampler log-probs differ by {worst:.3g} nats (bound {bound:.3g}), on average by {mean:.2g}: "
                    f"{found.describe()}."
                )
                if growth is not None:
                    raise ParityError(f"{growth} {LOWER_RATE} {differ}")
                raise ParityError(
                    f"{differ} See docs/troubleshooting.md; `training.parity_tolerance` sets the bound, even when a run "
                    "is resumed."
                )
    if above:
        totals["parity/rounded"] = [above + totals.get("parity/rounded", [0.0])[0], 1.0]
    totals["parity/max"] = [max(worst, totals.get("parity/max", [0.0])[0]), 1.0]
    add_metric(totals, "parity/mean", total, float(len(gap_K)))
    range_K = torch.bucketize(torch.cat(depths), torch.tensor(DEPTHS), right=True)
    kl_K = (off_K.double().expm1() - off_K.double()).cpu()
    for number in range_K.unique().tolist():
        first, end = (0, *DEPTHS)[number], (*DEPTHS, None)[number]
        chosen_K = kl_K[range_K == number]
        name = f"parity/kl/{first}-{'' if end is None else end - 1}"
        add_metric(totals, name, float(chosen_K.sum()), float(len(chosen_K)))


LOWER_RATE = "Go back to an earlier step with `kapelle runs rollback RUN --to STEP`, and resume with a lower `optimizer.lr`."


@torch.no_grad()
def growth_of(models: LearnerModels) -> str | None:
    """Return a message if the weights of a learner diverge, or None if no learner diverges.

    Weights diverge if most of them are not finite or larger than `HUGE`. The update of an adapter is compared with the
    weights that it changes, by the Frobenius norm. Other weights have a root mean square far below 1, because every
    layer normalises its inputs.
    """
    for learner, (model, adapter) in models.items():
        sizes = []
        for layer in model.model.modules():
            factors = layer.factors_of(adapter) if isinstance(layer, BankedLinear) and adapter else None
            if isinstance(factors, Factors) and layer.base.weight.is_floating_point():
                a_rI, b_Or = factors.a_rI.double(), factors.b_Or.double()
                square = float(((b_Or.T @ b_Or) * (a_rI @ a_rI.T)).sum())
                base = float(weight_of(layer.base).double().norm())
                sizes.append(factors.scale * math.sqrt(max(square, 0.0)) / base if base else 0.0)
        compared = "their updates have a median of {:.3g} times the base weights"
        if adapter is None:
            matrices = [weight for weight in model.base_parameters().values() if weight.ndim == 2]
            sizes = [float(weight.double().square().mean().sqrt()) for weight in matrices]
            compared = "they have a median root mean square of {:.3g}"
        median = float(torch.tensor(sizes or [0.0]).median())
        if not median <= HUGE:
            return f"The weights of policy '{learner}' diverge: {compared.format(median)}."
    return None


def improbability_of_step(gap_K: Tensor, sample_K: Tensor, learners: Sequence[str], bound: float) -> float:
    """Return the `improbability` of the least probable learner or sample, corrected for the number of comparisons.

    The sequence `learners` contains the learner of each sample.
    """
    names = sorted(set(learners))
    learner_S = torch.tensor([names.index(name) for name in learners])
    of_learners = improbability(gap_K, learner_S[sample_K], learner_S.bincount(minlength=len(names)), bound)
    of_samples = improbability(gap_K, sample_K, torch.ones(len(learners)), bound)
    return 2 * min(len(each) * float(each.min()) for each in (of_learners, of_samples))


def _counted(sample: Sample) -> Tensor:
    """Return the indices of a sample's counted targets, of shape (T,), which are also the numbers of tokens before the targets."""
    targets = torch.tensor(sample.targets)
    return targets if sample.mask is None else targets[sample.mask.bool().cpu()]


def _chosen(largest_S: Tensor, samples: Sequence[Sample], least: float) -> list[int]:
    """Return the indices of samples with a gap above `least` to compute in float64.

    Half of the chosen samples have the largest gaps, and the other half is chosen at random. The random choice is the
    same in every call.
    """
    order = [k for k in largest_S.argsort(descending=True, stable=True).tolist() if largest_S[k] > least]
    worst, others = order[: MOST_ROWS // 2], order[MOST_ROWS // 2 :]
    drawn = torch.randperm(len(others), generator=torch.Generator().manual_seed(0)).tolist()
    chosen: list[int] = []
    filled = 0
    for k in [*worst, *(others[place] for place in drawn[: MOST_ROWS - len(worst)])]:
        if not chosen or filled + len(samples[k].tokens) <= MOST_TOKENS:
            chosen.append(k)
            filled += len(samples[k].tokens)
    return chosen


def judge_in_float64(
    judged: Sequence[tuple[Sample, Tensor]],
    models: LearnerModels,
    bound: float,
    finding: ParityFinding,
    *,
    rough: bool = False,
    probability: float = 0.0,
) -> ParityFinding:
    """Judge some samples of a step by comparing their log-probs with a float64 pass.

    Each sample is paired with the gaps between trainer and sampler at its counted targets. The argument `finding`
    contains the token counts of the whole step, and `probability` is the probability of the step's gaps under rounding.
    """
    pairs = [models[sample.learner] for sample, _ in judged]
    if any(model.flat is None or model.sharded_pass is not None for model, _ in pairs):
        if rough and probability >= CERTAIN:
            return finding
        why = "this architecture or engine has no float64 pass to compare with"
        return replace(
            finding, failure=f"rounding does not explain the difference, and {why}" if rough else why
        )
    try:
        compared = [
            (sample.learner, *_against_float64(sample, off_T, models), ~(off_T.abs() <= bound))
            for sample, off_T in judged
        ]
    except (torch.OutOfMemoryError, MemoryError):
        if rough and probability >= CERTAIN:
            return finding
        return replace(finding, failure="memory ran out during the comparison with float64")
    # Find the gap that rounding explains least: that of a token above the bound, or in half precision the median of a
    # sample or learner.
    least: list[tuple[float, ParityFinding]] = []
    for learner, off_2T, rounding_T, above_T in compared:
        for off_2, rounding in zip(off_2T.T[above_T], rounding_T[above_T], strict=True):
            unexplained = float(off_2.max()) / (ROUNDINGS * max(float(rounding), 1e-12))
            least.append((unexplained, _found(finding, learner, off_2, rounding)))
    for learner in sorted({learner for learner, *_ in compared}) if rough else ():
        own = [(off_2T, rounding_T) for each, off_2T, rounding_T, _ in compared if each == learner]
        together = tuple(torch.cat(each, -1) for each in zip(*own, strict=True))
        for off_2K, rounding_K in [*own, together]:
            if len(rounding_K) >= FEW:
                off_2, rounding = off_2K.median(1).values, rounding_K.median()
                usual = max(float(off_2.min()), float(rounding), 1e-12)
                least.append(
                    (float(off_2.max()) / (TIMES * usual), _found(finding, learner, off_2, rounding))
                )
    unexplained, found = max(least, key=lambda each: each[0], default=(0.0, finding))
    if not unexplained <= 1:
        if found.sampler >= found.trainer:
            why = "the tokens were sampled with other weights, or from another distribution, than the trained ones"
        else:
            why = "the trainer does not compute what its weights define; please report it"
        return replace(found, failure=why)
    worst = max(float(off_T.abs().max()) for _, off_T in judged)
    if found.tokens > max(1, SHARE * found.total) or (not rough and worst > CEILING * bound):
        why = (
            "the weights have grown too large for the compute type; go back to an earlier checkpoint with a "
            "lower `optimizer.lr`"
        )
        return replace(found, failure=why)
    return found


def _found(finding: ParityFinding, learner: str, off_2: Tensor, rounding: Tensor) -> ParityFinding:
    sampler, trainer = off_2.tolist()
    return replace(finding, learner=learner, sampler=sampler, trainer=trainer, rounding=float(rounding))


def _against_float64(sample: Sample, off_T: Tensor, models: LearnerModels) -> tuple[Tensor, Tensor]:
    """Return the distances of sampler and trainer from float64, and the rounding errors, at the counted targets of a sample.

    The distances have shape (2, T) and are in nats. The rounding errors have shape (T,).
    """
    model, adapter = models[sample.learner]
    arguments = (model, adapter, sample.tokens, sample.targets, sample.temperature)
    allowed = allowed_targets([sample], model.masks)
    exact_T = exact_logprobs(*arguments, allowed=allowed)
    rounding_T = rounding_of(*arguments, exact_T, allowed=allowed)
    counts_T = torch.ones(len(exact_T)).bool() if sample.mask is None else sample.mask.bool().cpu()
    sampler_T = (sample.columns[Column.BEHAVIOUR].cpu().double() - exact_T)[counts_T]
    off_2T = torch.stack([sampler_T, sampler_T + off_T])
    return off_2T.abs().nan_to_num(torch.inf), rounding_T[counts_T]


# The log-probs of one sequence in float64: the reference when trainer and sampler disagree.
#
# This is plain code that processes one sequence at a time. It shares no pass, packing or routing with the trainer and no
# merged copies with the sampler, so it cannot repeat a fault of either. The weights are widened layer by layer and then
# freed. The angles of rotary attention are the model's own, as on both sides.
#
# A second result is how much rounding alone may change a log-prob: the same pass with random rounding errors of the compute
# type in every weight and every intermediate result. A sum of nearly cancelling terms shows up as a large error there.

DRAWS = 8
"""The number of passes with random rounding errors from which the size of rounding errors is estimated."""

SCORES = 1 << 26
"""The maximum number of attention scores that are in memory at the same time, over all heads."""


@torch.no_grad()
def exact_logprobs(
    model: LanguageModel,
    adapter: str | None,
    tokens: Sequence[int],
    targets: Sequence[int],
    temperature: float,
    *,
    allowed: AllowedTargets | None = None,
) -> Tensor:
    """Return the log-probs of the tokens at `targets` given the tokens before them, computed in float64.

    The result has shape (T,) and is on the CPU. With `allowed`, the log-probs are those of the constrained
    distributions.

    The model must have a flat pass. Other architectures are not supported.
    """
    return _Pass(model, adapter, None).logprobs(tokens, targets, temperature, allowed)


@torch.no_grad()
def rounding_of(
    model: LanguageModel,
    adapter: str | None,
    tokens: Sequence[int],
    targets: Sequence[int],
    temperature: float,
    exact_T: Tensor,
    *,
    allowed: AllowedTargets | None = None,
) -> Tensor:
    """Return the root mean square effect of rounding errors on each log-prob of `exact_logprobs`, of shape (T,).

    The random rounding errors are the same in every call.
    """
    generator = torch.Generator(model.device).manual_seed(0)
    noisy_RT = torch.stack(
        [
            _Pass(model, adapter, generator).logprobs(tokens, targets, temperature, allowed)
            for _ in range(DRAWS)
        ]
    )
    return (noisy_RT - exact_T).square().mean(0).sqrt()


class _Pass:
    """A forward pass with one adapter in float64, either exact or with random rounding errors drawn from `generator`."""

    def __init__(self, model: LanguageModel, adapter: str | None, generator: torch.Generator | None) -> None:
        assert model.flat is not None, "only architectures with a flat pass are supported"
        self._model = model
        self._flat = model.flat
        self._adapter = adapter
        self._generator = generator
        self._eps = torch.finfo(rounded_as(model)).eps / 2

    def logprobs(
        self,
        tokens: Sequence[int],
        targets: Sequence[int],
        temperature: float,
        allowed: AllowedTargets | None,
    ) -> Tensor:
        flat, device = self._flat, self._model.device
        tokens_L = torch.tensor(tokens, device=device)
        x_LD = self._off(flat.body.embed_tokens(tokens_L).double())
        positions_L, sandwiched = torch.arange(len(tokens), device=device), flat.family.sandwiched
        for number, layer in enumerate(flat.layers):
            turn_L1e = flat.turns(x_LD, positions_L, number).to(torch.complex128)
            h_LD = self._norm(x_LD, layer.input_layernorm)
            more_LD = self._times(layer.self_attn.o_proj, self._attention(number, h_LD, turn_L1e))
            if sandwiched:
                more_LD = self._norm(more_LD, layer.post_attention_layernorm)
            x_LD = self._off(x_LD + more_LD)
            before = layer.pre_feedforward_layernorm if sandwiched else layer.post_attention_layernorm
            h_LD = self._norm(x_LD, before)
            gate, up = self._times(layer.mlp.gate_proj, h_LD), self._times(layer.mlp.up_proj, h_LD)
            more_LD = self._times(layer.mlp.down_proj, self._off(lit(gate, flat.family.gelu) * up))
            if sandwiched:
                more_LD = self._norm(more_LD, layer.post_feedforward_layernorm)
            x_LD = self._off(x_LD + more_LD)
        before_T = torch.tensor([target - 1 for target in targets], device=device)
        h_TD = self._norm(x_LD[before_T], flat.body.norm)
        logits_TV = self._model.head.finish(self._times(flat.head, h_TD)) / temperature
        noisy_TV = self._off(logits_TV)
        logp_TV = (noisy_TV if allowed is None else allowed.to(device).cut(noisy_TV)).log_softmax(-1)
        target_T = tokens_L[torch.tensor(list(targets), device=device)]
        return self._off(logp_TV.gather(1, target_T[:, None])[:, 0]).cpu()

    def _attention(self, number: int, h_LD: Tensor, turn_L1e: Tensor) -> Tensor:
        flat, length, window = self._flat, len(h_LD), self._flat.windows[number]
        a = flat.layers[number].self_attn
        q, k, v = (
            self._times(each, h_LD).view(length, -1, flat.head_size)
            for each in (a.q_proj, a.k_proj, a.v_proj)
        )
        if flat.normed_heads:
            q, k = self._norm(q, a.q_norm), self._norm(k, a.k_norm)
        q, k = self._turned(q, turn_L1e), self._turned(k, turn_L1e)
        k, v = (each.repeat_interleave(flat.heads // flat.key_heads, dim=1) for each in (k, v))
        seen_LL = torch.ones(length, length, dtype=torch.bool, device=h_LD.device).tril()
        hidden_LL = ~(seen_LL if window is None else seen_LL.triu(1 - window))
        some = max(1, SCORES // length**2)
        gathered = []
        for q_LHE, k_LHE, v_LHE in zip(*(each.split(some, dim=1) for each in (q, k, v)), strict=True):
            scores_HLL = torch.einsum("lhe,mhe->hlm", q_LHE, k_LHE) * flat.scale
            scores_HLL = self._off(capped(scores_HLL, flat.cap))
            weights_HLL = self._off(scores_HLL.masked_fill(hidden_LL, -math.inf).softmax(-1))
            gathered.append(torch.einsum("hlm,mhe->lhe", weights_HLL, v_LHE))
        return self._off(torch.cat(gathered, 1).flatten(1))

    def _turned(self, x_LHE: Tensor, turn_L1e: Tensor) -> Tensor:
        half = x_LHE.shape[-1] // 2
        turned = torch.complex(x_LHE[..., :half], x_LHE[..., half:]) * turn_L1e
        return self._off(torch.cat((turned.real, turned.imag), -1))

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        scaled = x * (x.square().mean(-1, keepdim=True) + self._flat.eps).rsqrt()
        return self._off(scaled * self._flat.gain(norm).double())

    def _times(self, layer: nn.Module, x: Tensor) -> Tensor:
        base = layer.base if isinstance(layer, BankedLinear) else layer
        assert isinstance(base, nn.Linear)
        weight_OI = self._off(base.weight.double())
        factors = None
        if self._adapter is not None and isinstance(layer, BankedLinear):
            factors = layer.factors_of(self._adapter)
        if factors is not None:
            update_OI = self._off(factors.b_Or.double()) @ self._off(factors.a_rI.double())
            weight_OI = self._off(weight_OI + factors.scale * update_OI)
        y, bias_O = self._off(x @ weight_OI.T), base._parameters["bias"]  # noqa: SLF001
        return y if bias_O is None else self._off(y + bias_O.double())

    def _off(self, x: Tensor) -> Tensor:
        """Return the numbers with random relative rounding errors, which are normal with half a unit in the last place."""
        if self._generator is None:
            return x
        drawn = torch.randn(x.shape, generator=self._generator, dtype=torch.float64, device=x.device)
        return x * (1 + self._eps * drawn)
