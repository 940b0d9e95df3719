"""A flat forward pass for the Llama and Qwen families: flat tokens, no padding, attention by plan.

`transformers` computes a layer in some forty calls and pads every sequence to the longest. Here tokens of
all sequences lie flat, one after another, so that linear layers see no padding at all and the LoRA bank routes
ranges of tokens. Only attention needs sequences: a *plan* defines which tokens attend to which. The weights are
the `transformers` modules' own; a model that this file does not know is left to `transformers`.

Shapes: N flat tokens, D hidden size, H query heads, J key heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from kapelle.functional.masking import as_float
from kapelle.models.fast.blocks import Gated, Heads, Mlp, Project
from kapelle.models.fast.plan import Plan
from kapelle.models.fast.planned import attend_by_plan
from kapelle.models.lora_bank import computes_in, order_of

KNOWN = frozenset({"llama", "qwen2", "qwen3", "mistral"})
"""Values of `config.model_type` whose layers are RMSNorm, rotary attention and SwiGLU, and nothing else."""


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_NHE, k_NJE, v_NJE) → attention outputs `_NHE`."""


class FlatModel:
    """The forward pass over a `transformers` model's own modules."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._body = model.base_model
        self._head_of = model.get_output_embeddings
        self._layers: Sequence[Any] = list(self._body.layers)
        attention = self._layers[0].self_attn
        self.head_size = int(attention.head_dim)
        self.key_heads = int(config.num_key_value_heads)
        self.heads = int(config.num_attention_heads)
        self.eps = float(config.rms_norm_eps)
        self.scale = float(attention.scaling)
        self.normed_heads = isinstance(getattr(attention, "q_norm", None), nn.Module)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self._layers)

    @property
    def layers(self) -> Sequence[Any]:
        """The `transformers` modules of the layers."""
        return self._layers

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = self._body.embed_tokens.weight.device
        return device

    def embed(self, tokens_N: Tensor) -> Tensor:
        """Return the tokens' embeddings `_ND`."""
        embedded: Tensor = self._body.embed_tokens(tokens_N)
        return embedded

    def turns(self, x_ND: Tensor, positions_N: Tensor) -> Tensor:
        """Return the complex numbers `_N1e` by which positions turn the E / 2 pairs of a head."""
        cos_N1E, sin_N1E = self._rotary(x_ND, positions_N)
        half = self.head_size // 2
        return torch.complex(cos_N1E[..., :half].float(), sin_N1E[..., :half].float())

    @property
    def last_norm(self) -> nn.Module:
        """The norm before the output head."""
        norm: nn.Module = self._body.norm
        return norm

    @property
    def head(self) -> nn.Module:
        """The output head."""
        head: nn.Module = self._head_of()
        return head

    def hidden(
        self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, run: Callable[..., Any] | None = None
    ) -> Tensor:
        """Return the last hidden states `_ND`; `attend` mixes tokens, everything else is token by token.

        `run` is called with each block and its arguments; None calls the block itself.
        """
        x_ND = as_float(self._body.embed_tokens(tokens_N))
        turn = self._rotary(x_ND, positions_N)
        for number in range(self.depth):
            args = (number, x_ND, *turn, attend)
            x_ND = self._block(*args) if run is None else run(self._block, *args)
        return self._norm(x_ND, self._body.norm)

    def _block(self, number: int, x_ND: Tensor, cos_N1E: Tensor, sin_N1E: Tensor, attend: Attend) -> Tensor:
        """Return the stream `_ND` after a layer."""
        layer = self._layers[number]
        gathered_NHE = attend(number, *self._heads(layer, x_ND, cos_N1E, sin_N1E))
        return self._mlp(layer, x_ND + layer.self_attn.o_proj(gathered_NHE.flatten(1)))

    def _heads(
        self, layer: Any, x_ND: Tensor, cos_N1E: Tensor, sin_N1E: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what attention reads: `q_NHE`, `k_NJE` and `v_NJE`."""
        a = layer.self_attn
        tensors: list[Tensor] = [layer.input_layernorm.weight]
        if self.normed_heads:
            tensors += (a.q_norm.weight, a.k_norm.weight)
        q, k, v = (order_of(each, x_ND.shape, tensors) for each in (a.q_proj, a.k_proj, a.v_proj))
        task = Heads((q, k, v), self.heads, self.key_heads, self.eps, computes_in(x_ND), self.normed_heads)
        read: tuple[Tensor, Tensor, Tensor] = Project.apply(task, x_ND, cos_N1E, sin_N1E, *tensors)  # type: ignore[no-untyped-call]
        return read

    def _mlp(self, layer: Any, x_ND: Tensor) -> Tensor:
        """Return the stream after a layer's second half."""
        mlp = layer.mlp
        tensors: list[Tensor] = [layer.post_attention_layernorm.weight]
        gate, up, down = (
            order_of(each, x_ND.shape, tensors) for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        out_ND: Tensor = Mlp.apply(Gated((gate, up, down), self.eps, computes_in(x_ND)), x_ND, *tensors)  # type: ignore[no-untyped-call]
        return out_ND

    def by_plan(self, plan: Plan) -> Attend:
        """Return attention inside one pass, by a plan."""

        def attend(_layer: int, q_NHE: Tensor, k_NJE: Tensor, v_NJE: Tensor) -> Tensor:
            return attend_by_plan(plan, q_NHE, k_NJE, v_NJE, self.scale)

        return attend

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return rms_norm(x, (x.shape[-1],), norm.weight.to(x.dtype), self.eps)

    def _rotary(self, x_ND: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        cos_1NE, sin_1NE = self._body.rotary_emb(x_ND, positions_N[None])
        return cos_1NE[0][:, None], sin_1NE[0][:, None]


def flat_of(model: Any) -> FlatModel | None:
    """Return the flat pass of a model, None when its architecture does more than this file knows."""
    config = model.config
    plain = (
        config.model_type in KNOWN
        and not getattr(config, "final_logit_softcapping", None)
        and getattr(config, "hidden_act", "silu") == "silu"
        and not getattr(config, "use_sliding_window", False)
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and (config.model_type != "mistral" or config.sliding_window is None)
        and all(
            weight.is_floating_point() for weight in model.parameters()
        )  # codes are read by their layers alone
    )
    return FlatModel(model) if plain else None
