"""Rollout engines, which sample through one protocol; the built-in ones by name."""

from collections.abc import Mapping

BUILTIN: Mapping[str, str] = {
    "local": "kapelle.engines.rollout.local.settings:Local",
    "vllm": "kapelle.engines.rollout.vllm.settings:Vllm",
}
"""Mapping from the name in a recipe to `module:Class`, which is imported on first use."""
