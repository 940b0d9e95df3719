"""Train engines, which hold the trained weights behind one protocol; the built-in ones by name."""

from collections.abc import Mapping

BUILTIN: Mapping[str, str] = {
    "torch": "kapelle.engines.train.settings:Torch",
    "ddp": "kapelle.engines.train.settings:Ddp",
    "fsdp": "kapelle.engines.train.settings:Fsdp",
}
"""Name in a recipe → `module:Class`, imported on first use."""
