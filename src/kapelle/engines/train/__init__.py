"""Train engines, which hold the trained weights and share one protocol; the built-in ones by name."""

from collections.abc import Mapping

BUILTIN: Mapping[str, str] = {
    "torch": "kapelle.engines.train.settings:Torch",
    "ddp": "kapelle.engines.train.settings:Ddp",
    "fsdp": "kapelle.engines.train.settings:Fsdp",
}
"""Mapping from the name in a recipe to `module:Class`, which is imported on first use."""
