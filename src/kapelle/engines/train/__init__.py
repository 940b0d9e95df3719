"""Train engines, which hold the trained weights, and the table of the built-in train engines."""

from collections.abc import Mapping

BUILTIN: Mapping[str, str] = {
    "torch": "kapelle.engines.train.settings:Torch",
    "ddp": "kapelle.engines.train.settings:Ddp",
    "fsdp": "kapelle.engines.train.settings:Fsdp",
}
"""Mapping from the name of a built-in train engine (`train_engine.name` in a recipe) to the `module:Class` of its
settings, which is imported on first use."""
