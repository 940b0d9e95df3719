"""Record the experts that the routers of a mixture choose while sampling, and replay these choices in training.

Near a tie, rounding decides which expert a router chooses. A sampler and a trainer that compute in a different order,
or in half precision, then send a token to different experts, and the token's log-prob jumps. R3 (arXiv:2510.11370)
records the sampler's choice for each token and block and replays the choice in the trainer's forward pass. The weights
of the experts are computed from the trainer's own scores, so that routers and all layers below them still receive
gradients.

Routers of `transformers` choose experts by calling `torch.topk` over all experts. While a block with experts is
running, the result of this call is recorded or replaced.

In tensor shapes, N is the number of tokens of a pass, L of blocks with experts, k of experts of a token, and E of
experts.
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
    """Records or replays the choices of a model's routers by wrapping the `forward` method of the model's blocks."""

    def __init__(self, model: nn.Module, bank: LoraBank) -> None:
        """Wrap the blocks of a model. The bank contains the choices to replay.

        Raises ModelError if the model has no routers whose choices can be recorded.
        """
        self._bank = bank
        self._recorded: list[Tensor | None] | None = None
        check_routing(layers_of(model))
        mixtures: list[tuple[nn.Module, Any]] = [
            (block, block.get_submodule(EXPERTS))
            for block in model.modules()
            if EXPERTS in dict(block.named_children())
        ]
        self.layers = len(mixtures)
        """The number of blocks with experts (L)."""
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
        """Record choices in this context, and yield a function that returns the choices of the last pass.

        The choices have shape (N, L, k) and type int16. The yielded function raises ModelError if a router did not
        choose by calling `torch.topk` over its experts.
        """
        self._recorded = [None] * self.layers

        def taken() -> Tensor:
            found = [each for each in self._recorded or () if each is not None]
            if len(found) < self.layers or len({each.shape for each in found}) > 1:
                raise ModelError(
                    "`model.routing: replayed` does not support a router of this model: it does not choose experts by "
                    "`torch.topk`. Set `model.routing: free`."
                )
            return torch.stack(found, 1).to(torch.int16)

        try:
            yield taken
        finally:
            self._recorded = None


class _Choice(TorchFunctionMode):
    """Records or replaces the result of `torch.topk` over all experts."""

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
            return found  # a choice of groups of experts, which comes first
        if self._given_Nk is not None:
            assert self._given_Nk.shape == found.indices.shape, "one choice for each token of the pass"
            # The router chooses for tokens without a record.
            index_Nk = torch.where(self._given_Nk >= 0, self._given_Nk.long(), found.indices)
            found = torch.return_types.topk((scores_NE.gather(1, index_Nk), index_Nk))
        self.taken_Nk = found.indices
        return found


def packed(experts_TLk: Tensor) -> Routing:
    """Return recorded choices as bytes together with their sizes."""
    _, layers, chosen = experts_TLk.shape
    return Routing(layers, chosen, experts_TLk.to(torch.int16).cpu().contiguous().numpy().tobytes())


def unpacked(routing: Routing) -> Tensor:
    """Return the choices that `packed` has stored, as int16 of shape (T, L, k)."""
    flat = torch.frombuffer(bytearray(routing.data), dtype=torch.int16)
    return flat.view(-1, routing.layers, routing.chosen)
