"""Whether trainer and sampler agree on weights and distribution, token by token; float64 judges where they do not.

The largest gap of a step does not decide by itself. Weights that have grown can make one token in a thousand depend on
sums whose terms nearly cancel; two correct float32 passes then differ there by more than any bound that is useful
elsewhere, and both differ from float64 by as much. A fault (other weights, another token, another temperature) leaves the
trainer close to float64 and the sampler far from it, or changes more than a few tokens.

So a step with gaps above the bound passes only if few tokens are above it (`SHARE`), none by more than `CEILING` bounds,
and each by no more than `ROUNDINGS` times the effect of rounding errors of the compute type on that token. It costs
nothing while there is no such gap.

Shapes: T targets of one sample, L its tokens, D hidden size, H query heads, J key heads, E head size, O and I features, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kapelle.engines.train.torch.sharing import add_metric
from kapelle.errors import ParityError
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import BankedLinear
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


# The log-probs of one sequence in float64: the reference when trainer and sampler disagree.
#
# It is written out plainly, one sequence at a time. It shares no pass, packing or routing with the trainer and no
# merged copies with the sampler, so that it does not repeat a fault of either. The weights are widened layer by
# layer and not kept, so that it needs memory only while it runs. The angles of rotary attention are the model's own,
# which both sides use.
#
# A second result is how far rounding alone may move a log-prob: the same pass with random rounding errors of the compute
# type in every weight and every intermediate. A sum whose terms nearly cancel shows up as a large error there.

DRAWS = 8
"""Passes with rounding errors from which their size is estimated."""

SCORES = 1 << 26
"""Most attention scores in memory at once, over heads."""


@torch.no_grad()
def exact_logprobs(
    model: LanguageModel,
    adapter: str | None,
    tokens: Sequence[int],
    targets: Sequence[int],
    temperature: float,
) -> Tensor:
    """Return the log-probs `_T` (float64) of the tokens at `targets` after those before them; on the CPU.

    The model must have a flat pass: what another architecture computes is not known here.
    """
    return _Pass(model, adapter, None).logprobs(tokens, targets, temperature)


@torch.no_grad()
def rounding_of(
    model: LanguageModel,
    adapter: str | None,
    tokens: Sequence[int],
    targets: Sequence[int],
    temperature: float,
    exact_T: Tensor,
) -> Tensor:
    """Return the root mean square `_T` by which rounding errors move `exact_logprobs`; the same at each call."""
    generator = torch.Generator(model.device).manual_seed(0)
    noisy_RT = torch.stack(
        [_Pass(model, adapter, generator).logprobs(tokens, targets, temperature) for _ in range(DRAWS)]
    )
    return (noisy_RT - exact_T).square().mean(0).sqrt()


class _Pass:
    """A forward pass of one adapter, exact or with rounding errors from `generator`."""

    def __init__(self, model: LanguageModel, adapter: str | None, generator: torch.Generator | None) -> None:
        assert model.flat is not None, "only what the flat pass knows is computed here"
        self._model = model
        self._flat = model.flat
        self._adapter = adapter
        self._generator = generator
        self._eps = torch.finfo(model.dtype).eps / 2

    def logprobs(self, tokens: Sequence[int], targets: Sequence[int], temperature: float) -> Tensor:
        flat, device = self._flat, self._model.device
        tokens_L = torch.tensor(tokens, device=device)
        x_LD = self._off(flat.body.embed_tokens(tokens_L).double())
        turn_L1e = flat.turns(x_LD, torch.arange(len(tokens), device=device)).to(torch.complex128)
        for layer in flat.layers:
            h_LD = self._norm(x_LD, layer.input_layernorm)
            x_LD = self._off(
                x_LD + self._times(layer.self_attn.o_proj, self._attention(layer.self_attn, h_LD, turn_L1e))
            )
            h_LD = self._norm(x_LD, layer.post_attention_layernorm)
            gate, up = self._times(layer.mlp.gate_proj, h_LD), self._times(layer.mlp.up_proj, h_LD)
            inner = self._off(torch.nn.functional.silu(gate) * up)
            x_LD = self._off(x_LD + self._times(layer.mlp.down_proj, inner))
        before_T = torch.tensor([target - 1 for target in targets], device=device)
        h_TD = self._norm(x_LD[before_T], flat.body.norm)
        logits_TV = self._times(flat.head, h_TD) / temperature
        logp_TV = self._off(logits_TV).log_softmax(-1)
        target_T = tokens_L[torch.tensor(list(targets), device=device)]
        return self._off(logp_TV.gather(1, target_T[:, None])[:, 0]).cpu()

    def _attention(self, a: Any, h_LD: Tensor, turn_L1e: Tensor) -> Tensor:
        flat, length = self._flat, len(h_LD)
        q, k, v = (
            self._times(each, h_LD).view(length, -1, flat.head_size)
            for each in (a.q_proj, a.k_proj, a.v_proj)
        )
        if flat.normed_heads:
            q, k = self._norm(q, a.q_norm), self._norm(k, a.k_norm)
        q, k = self._turned(q, turn_L1e), self._turned(k, turn_L1e)
        k, v = (each.repeat_interleave(flat.heads // flat.key_heads, dim=1) for each in (k, v))
        hidden_LL = torch.ones(length, length, dtype=torch.bool, device=h_LD.device).triu(1)
        some = max(1, SCORES // length**2)
        gathered = []
        for q_LHE, k_LHE, v_LHE in zip(*(each.split(some, dim=1) for each in (q, k, v)), strict=True):
            scores_HLL = self._off(torch.einsum("lhe,mhe->hlm", q_LHE, k_LHE) * flat.scale)
            weights_HLL = self._off(scores_HLL.masked_fill(hidden_LL, -math.inf).softmax(-1))
            gathered.append(torch.einsum("hlm,mhe->lhe", weights_HLL, v_LHE))
        return self._off(torch.cat(gathered, 1).flatten(1))

    def _turned(self, x_LHE: Tensor, turn_L1e: Tensor) -> Tensor:
        half = x_LHE.shape[-1] // 2
        turned = torch.complex(x_LHE[..., :half], x_LHE[..., half:]) * turn_L1e
        return self._off(torch.cat((turned.real, turned.imag), -1))

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        scaled = x * (x.square().mean(-1, keepdim=True) + self._flat.eps).rsqrt()
        return self._off(scaled * norm.weight.double())

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
        """Return numbers with relative rounding errors: normal, of half a unit in the last place."""
        if self._generator is None:
            return x
        drawn = torch.randn(x.shape, generator=self._generator, dtype=torch.float64, device=x.device)
        return x * (1 + self._eps * drawn)
