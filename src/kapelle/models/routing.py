"""Which experts the routers of a mixture choose: recorded while sampling, and chosen again while training.

Near a tie, rounding decides which expert a router takes: a sampler and a trainer that compute in another order, or in half precision, then
send a token to different experts, and its log-probs jump. R3 (2510.11370) records the sampler's choice for each token and block, and
the trainer's pass takes it, with shares that follow from the trainer's own scores, so that routers and everything below still get gradients.

Routers of `transformers` choose by `torch.topk` over all experts, whatever they do with the scores before and after. So while a block that
holds experts runs, that one call is listened to, or answered with what was recorded.

Shapes: N tokens of a pass, L blocks with experts, k experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kapelle.errors import ModelError
from kapelle.models.adapters import EXPERTS, check_routing
from kapelle.models.lora_bank import LoraBank, layers_of
from kapelle.types import Routing


class RouterChoices:
    """The choices of one model's routers; while it exists, its blocks run under it."""

    def __init__(self, model: nn.Module, bank: LoraBank) -> None:
        """Take the model and its bank, which knows what a pass is to take again; ModelError for a model without such routers."""
        self._bank = bank
        self._recorded: list[Tensor | None] | None = None
        check_routing(layers_of(model))
        mixtures: list[tuple[nn.Module, Any]] = [
            (block, block.get_submodule(EXPERTS))
            for block in model.modules()
            if EXPERTS in dict(block.named_children())
        ]
        self.layers = len(mixtures)
        """L."""
        for layer, (block, experts) in enumerate(mixtures):
            block.forward = partial(self._run, layer, int(experts.num_experts), block.forward)

    def _run(self, layer: int, experts: int, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        replayed_NLk = self._bank.experts_NLk
        if replayed_NLk is None and self._recorded is None:
            return forward(*args, **named)
        given_Nk = None if replayed_NLk is None else replayed_NLk[:, layer]
        with _Choice(experts, given_Nk) as choice:
            found = forward(*args, **named)
        if self._recorded is not None:
            self._recorded[layer] = choice.taken_Nk
        return found

    @contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor]]:
        """Inside, choices are recorded; what is yielded returns those of the last pass, `_NLk` (int16).

        Raises ModelError where a router has chosen in another way than by `torch.topk` over its experts.
        """
        self._recorded = [None] * self.layers

        def taken() -> Tensor:
            found = [each for each in self._recorded or () if each is not None]
            if len(found) < self.layers or len({each.shape for each in found}) > 1:
                raise ModelError(
                    "`model.routing: replayed` finds no choice of experts in a router of this model. Set `model.routing: free`."
                )
            return torch.stack(found, 1).to(torch.int16)

        try:
            yield taken
        finally:
            self._recorded = None


class _Choice(TorchFunctionMode):
    """Listens to the `topk` over all experts, or answers it."""

    def __init__(self, experts: int, given_Nk: Tensor | None) -> None:
        super().__init__()
        self._experts, self._given_Nk = experts, given_Nk
        self.taken_Nk: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        scores_NE = args[0] if args else None
        if func not in (torch.topk, Tensor.topk) or scores_NE is None:
            return found
        if scores_NE.ndim != 2 or scores_NE.shape[1] != self._experts:
            return found  # of groups of experts, before
        if self._given_Nk is not None:
            assert self._given_Nk.shape == found.indices.shape, "one choice for each token of the pass"
            # Tokens that nobody recorded choose freely.
            index_Nk = torch.where(self._given_Nk >= 0, self._given_Nk.long(), found.indices)
            found = torch.return_types.topk((scores_NE.gather(1, index_Nk), index_Nk))
        self.taken_Nk = found.indices
        return found


def packed(experts_TLk: Tensor) -> Routing:
    """Return recorded choices as plain data."""
    _, layers, chosen = experts_TLk.shape
    return Routing(layers, chosen, experts_TLk.to(torch.int16).cpu().contiguous().numpy().tobytes())


def unpacked(routing: Routing) -> Tensor:
    """Return `_TLk` (int16) of plain data."""
    flat = torch.frombuffer(bytearray(routing.data), dtype=torch.int16)
    return flat.view(-1, routing.layers, routing.chosen)
