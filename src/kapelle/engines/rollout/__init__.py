"""Rollout engines, which sample behind one protocol; the built-in ones by name."""

from collections.abc import Mapping

BUILTIN: Mapping[str, str] = {
    "local": "kapelle.engines.rollout.local.settings:Local",
    "vllm": "kapelle.engines.rollout.vllm.settings:Vllm",
}
"""Name in a recipe → `module:Class`, imported on first use."""
