"""The log-probs of one sequence in float64: the reference when trainer and sampler disagree.

It is written out plainly, one sequence at a time. It shares no pass, packing or routing with the trainer and no
merged copies with the sampler, so that it does not repeat a fault of either. The weights are widened layer by
layer and not kept, so that it needs memory only while it runs. The angles of rotary attention are the model's own,
which both sides use.

A second result is how far rounding alone may move a log-prob: the same pass with random rounding errors of the compute
type in every weight and every intermediate. A sum whose terms nearly cancel shows up as a large error there.

Shapes: L tokens, D hidden size, H query heads, J key heads, E head size, T targets, O and I features, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import BankedLinear

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
        x_LD = self._off(flat.embed(tokens_L).double())
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
        h_TD = self._norm(x_LD[before_T], flat.last_norm)
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
