"""Check token by token that trainer and sampler agree on weights and distribution; if they differ, a float64 pass decides.

The largest gap of a step is not decisive by itself, because it grows with the number of tokens. In half precision rounding
has a heavy tail, and one token in a million is off by a nat in a correct run. In half precision the step is therefore
compared with the effect of rounding on *many* tokens (`improbability`): the mean, and the number of tokens above the bound,
twice the bound, four times the bound and so on, for each learner and each sample. Both tests are exact for any number of
tokens, so a long step is not stopped more easily than a short one, and a fault in a few samples is not diluted.

In float32 a gap above the bound is rare and is always examined. Weights that have grown can make one token in a thousand
depend on sums of nearly cancelling terms; two correct float32 passes then differ there by more than any bound that is
useful elsewhere, and both differ from float64 by as much. A fault (wrong weights, tokens or temperature) leaves the trainer
close to float64 and the sampler far from it, or changes more than a few tokens.

A bounded number of sequences is examined (`MOST_ROWS`, `MOST_TOKENS`), the worst and some random ones: they are
computed in float64. The trainer's log-probs are those of the step's own pass. A second pass would pack the tokens
differently, so that other kernels sum in a different order, and a gap caused by rounding might disappear. The step passes
only if few tokens are above the bound (`SHARE`), none by more than `CEILING` bounds, each by no more than `ROUNDINGS` times
the effect of rounding errors of the compute type on that token, and neither side is off by more than `TIMES` times the
other side's distance and the rounding error.

Shapes: K targets of several samples, T targets of one sample, L its tokens, D hidden size, H query heads, J key heads, E head size, O
and I features, R draws, S samples.
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
"""Default bound on |trainer − sampler| log-prob (nats) by the type in which rounding occurs; in half precision few tokens
exceed it."""

ROUGH = frozenset([torch.bfloat16, torch.float16])
"""Compute types whose rounding errors lift some tokens above every useful bound."""

TAIL = 2e-3
"""Maximum share of tokens that such rounding lifts above the bound; an eighth of this share is lifted above twice the
bound, and so on.

For differences with a mean of 0.02 nats and a maximum of 1 nat in a million tokens, the share is 0.0003."""

MEAN = 1 / 8
"""Maximum mean gap of such rounding, in bounds, with each gap clipped at one bound. Measured: 0.05."""

TAIL_OF_ONE, MEAN_OF_ONE = 25 * TAIL, 4 * MEAN
"""Both limits for a single sample, because some texts are harder to compute; the limits for several samples lie in
between."""

DOUBLINGS = 7
"""Multiples of the bound above which tokens are counted: 1, 2, 4, … ; the last one is 16 nats in bfloat16."""

SUSPECT = 1e-2
"""A step less probable than this is examined; actual rounding is far below the limits above, so correct steps are hardly
ever examined."""

CERTAIN = 1e-9
"""A step less probable than this fails if there is no float64 pass."""

SHARE = 0.01
"""Maximum share of a step's tokens above the bound; one token is always allowed."""

CEILING = 100.0
"""Maximum gap, in bounds; beyond it the compute type is too coarse for these weights."""

ROUNDINGS = 16.0
"""Maximum gap, in root mean squares of the token's rounding error; in correct passes it stays below 7 (measured)."""

TIMES = 2.0
"""Maximum median distance of one side from float64, in multiples of the other side's distance and of rounding errors."""

MOST_ROWS = 64
"""Maximum sequences that are computed in float64."""

MOST_TOKENS = 1 << 15
"""Maximum tokens of these sequences; one sequence is always computed."""

FEW = 32
"""Minimum tokens for a comparison of medians."""

HUGE = 1.0
"""Median size of weights that only a diverging run reaches: for adapters, updates relative to their base weights; otherwise
root mean squares.

Measured for adapters: 0.02 to 0.07 after learning, 1.7 after ten steps at fifty times the rate."""


DEPTHS = (128, 512, 2048)
"""Numbers of context tokens at which the ranges of `parity/kl` after the first begin."""


LearnerModels = Mapping[str, tuple[LanguageModel, str | None]]
"""Mapping from a learner to its model and its adapter."""


def rounded_as(model: LanguageModel) -> torch.dtype:
    """Return the type of a model's rounding: float16 if CUDA computes float32 products in TF32."""
    tf32 = model.device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return torch.float16 if tf32 and model.dtype == torch.float32 else model.dtype


@dataclass(frozen=True, slots=True)
class ParityFinding:
    """The result of the comparison of a step with float64."""

    tokens: int
    """Tokens above the bound."""
    total: int
    """Number of compared tokens."""
    learner: str = ""
    sampler: float = 0.0
    """Distance of the sampler's log-prob from float64 (nats), at the token that rounding explains least."""
    trainer: float = 0.0
    """The same distance for the trainer."""
    rounding: float | None = None
    """Root mean square of the rounding error at that token; None if nothing was computed in float64."""
    failure: str | None = None
    """Why the step fails; None if rounding explains everything."""

    @property
    def is_clear(self) -> bool:
        """Whether the sampler is off by so much that rounding cannot be the cause, even if the weights have exploded."""
        known = max(self.trainer, self.rounding or 0.0)
        return self.rounding is not None and self.sampler > CEILING * known

    def describe(self) -> str:
        """Return the finding as text."""
        where = f"{self.tokens} of {self.total} tokens are above the bound"
        if self.rounding is None:
            return f"{where}; {self.failure}"
        distances = (
            f"compared with float64, the sampler is off by {self.sampler:.2g} and the trainer by {self.trainer:.2g} "
            f"(policy '{self.learner}'), and rounding explains about {self.rounding:.2g}"
        )
        return f"{where}; {distances}: {self.failure}" if self.failure else f"{where}; {distances}"


def improbability(gap_K: Tensor, group_K: Tensor, samples_G: Tensor, bound: float) -> Tensor:
    """Return a bound `_G` (float64) on the probability that rounding causes such gaps in each group of tokens.

    `group_K` are the tokens' groups, `samples_G` the number of samples of each group. Rounding lifts a token above the
    bound with probability at most `TAIL`, and above 2ʲ bounds with at most `TAIL`/8ʲ (a power law with exponent 3). The
    mean of gaps clipped at the bound is at most `MEAN` bounds. The number of tokens above a multiple is then bounded by a
    Poisson variable; Bernstein's inequality bounds the mean, for the largest variance that its range and mean allow. The
    result is the smallest of these probabilities times their number, or 1 without tokens.
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
    """Record the largest and the mean gap of models of one compute type, and their KL by depth; do nothing without gaps.

    The KL from trainer to sampler is estimated as the mean of exp(d) − 1 − d, where d is the trainer's log-prob minus the
    sampler's (k3 of Schulman, "Approximating KL divergence", 2020). If rounding is unlikely to explain the gaps, some of
    the samples are compared with float64; ParityError is raised if rounding does not explain them. Otherwise the number of
    tokens above the bound is also recorded, if there are any. `samples` are those of the step, which `gaps` refer to.
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
    """Return a message if most of a learner's weights are not finite or larger than `HUGE`; None if no learner diverges.

    The update of an adapter is compared with the weights that it changes, by the Frobenius norm. Other weights have root mean
    squares far below 1, as every layer normalises its inputs.
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
    """Return the `improbability` of the least probable learner or sample, times their number; `learners` are by sample."""
    names = sorted(set(learners))
    learner_S = torch.tensor([names.index(name) for name in learners])
    of_learners = improbability(gap_K, learner_S[sample_K], learner_S.bincount(minlength=len(names)), bound)
    of_samples = improbability(gap_K, sample_K, torch.ones(len(learners)), bound)
    return 2 * min(len(each) * float(each.min()) for each in (of_learners, of_samples))


def _counted(sample: Sample) -> Tensor:
    """Return the indices `_T` of a sample's counted targets: the number of tokens before each."""
    targets = torch.tensor(sample.targets)
    return targets if sample.mask is None else targets[sample.mask.bool().cpu()]


def _chosen(largest_S: Tensor, samples: Sequence[Sample], least: float) -> list[int]:
    """Return the samples with a gap above `least` to compute in float64: half by their largest gap, half at random.

    The random choice is the same in every call.
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
    """Judge some samples of a step, each with the gaps between trainer and sampler at its counted targets.

    `finding` counts the tokens of the whole step, and `probability` is that of the step.
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
    """Return the distances of sampler and trainer from float64 `_2T` (nats) and the rounding errors `_T`, at the counted targets."""
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
"""Number of passes with rounding errors that estimate the size of these errors."""

SCORES = 1 << 26
"""Maximum attention scores in memory at once, over all heads."""


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
    """Return the log-probs `_T` (float64) of the tokens at `targets` given the tokens before them; on the CPU.

    With `allowed`, the log-probs are those of the constrained distributions.

    The model must have a flat pass; other architectures are not supported.
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
    """Return the root mean square `_T` of the effect of rounding errors on `exact_logprobs`; the same in every call."""
    generator = torch.Generator(model.device).manual_seed(0)
    noisy_RT = torch.stack(
        [
            _Pass(model, adapter, generator).logprobs(tokens, targets, temperature, allowed)
            for _ in range(DRAWS)
        ]
    )
    return (noisy_RT - exact_T).square().mean(0).sqrt()


class _Pass:
    """A forward pass of one adapter, exact or with rounding errors from `generator`."""

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
        """Return numbers with random relative rounding errors: normal, of half a unit in the last place."""
        if self._generator is None:
            return x
        drawn = torch.randn(x.shape, generator=self._generator, dtype=torch.float64, device=x.device)
        return x * (1 + self._eps * drawn)
