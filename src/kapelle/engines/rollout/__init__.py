"""Rollout engines, which sample completions, and the table of the built-in engines."""

from collections.abc import Mapping

BUILTIN: Mapping[str, str] = {
    "local": "kapelle.engines.rollout.local.settings:Local",
    "vllm": "kapelle.engines.rollout.vllm.settings:Vllm",
}
"""Mapping from the name of a built-in rollout engine (`engine.name` in a recipe) to the `module:Class` of its settings,
which is imported on first use."""
