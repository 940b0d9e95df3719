"""The layers of a model in memory, by name: what the choice of adapters' places reads of it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from kapelle.models.banked_linear import BankedLinear, features_of, is_linear
from kapelle.models.targets import Layers


def layers_of(model: nn.Module) -> Layers:
    """Return a model's modules by path, as if it had no adapters."""
    modules = dict(_bare_modules(model))
    head = _output_head(model)
    return Layers(
        type(model).__name__,
        frozenset(modules),
        {path: features_of(module) for path, module in modules.items() if is_linear(module)},  # type: ignore[arg-type]
        next((path for path, module in modules.items() if module is head and head is not None), None),
        frozenset(path for path, module in modules.items() if _is_mixer(module)),
    )


def _bare_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    banked: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if banked and path.startswith(banked):
            continue
        if isinstance(module, BankedLinear):
            banked = (*banked[-1:], f"{path}.")
        yield path, module.base if isinstance(module, BankedLinear) else module


def _is_mixer(module: nn.Module) -> bool:
    return {"A_log", "D"} <= {name for name, _ in module.named_parameters(recurse=False)}


def _output_head(model: nn.Module) -> nn.Module | None:
    """Return the layer that cannot have an adapter: it reads chosen tokens, not whole rows."""
    from transformers import PreTrainedModel

    head: nn.Module | None = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return head
