"""The section `episode.compaction` of a recipe."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from kapelle.settings.feature import FeatureSettings


class CompactionConfig(FeatureSettings):
    """Which messages are kept in a conversation that no longer fits the context. `rollout/compaction.py` applies this in each turn."""

    plan: ClassVar[str] = "kapelle.features.compaction.plan:CompactionPlan"

    over: int | None = Field(default=None, ge=1)
    """Prompt length in tokens above which messages are dropped; null means the length above which the answer
    (`sampling.max_tokens`) would not fit."""
    keep_first: int = Field(default=1, ge=0)
    """Number of messages that are kept at the beginning, after the system message."""
    keep_last: int = Field(default=8, ge=1)
    """Maximum number of messages that are kept at the end; fewer if they do not fit."""
    note: str = "[{dropped} messages are omitted here.]"
    """Text in place of the dropped messages, with `{dropped}` for their number; empty for none."""

    @field_validator("note")
    @classmethod
    def _writable(cls, value: str) -> str:
        try:
            value.format(dropped=1)
        except (KeyError, IndexError, ValueError, AttributeError):
            raise ValueError("only `{dropped}` is allowed as a field; write a brace as {{ or }}") from None
        return value
