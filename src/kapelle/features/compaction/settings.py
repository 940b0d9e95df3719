"""The section `episode.compaction` of a recipe."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from kapelle.settings.feature import FeatureSettings


class CompactionConfig(FeatureSettings):
    """Settings of the messages that are kept in a conversation that no longer fits in the context (`rollout/compaction.py`)."""

    plan: ClassVar[str] = "kapelle.features.compaction.plan:CompactionPlan"

    over: int | None = Field(default=None, ge=1)
    """Length of the prompt in tokens above which messages are removed. With null, messages are removed if the prompt is so long that the
    completion (`sampling.max_tokens`) would not fit in the context."""
    keep_first: int = Field(default=1, ge=0)
    """Number of messages that are kept at the beginning of the conversation, after the system message."""
    keep_last: int = Field(default=8, ge=1)
    """Maximum number of messages that are kept at the end of the conversation. Fewer messages are kept if they do not fit in the
    context."""
    note: str = "[{dropped} messages are omitted here.]"
    """Text that replaces the removed messages, in which `{dropped}` stands for their number. With an empty string, no text is added."""

    @field_validator("note")
    @classmethod
    def _writable(cls, value: str) -> str:
        try:
            value.format(dropped=1)
        except (KeyError, IndexError, ValueError, AttributeError):
            raise ValueError("only `{dropped}` is allowed as a field; write a brace as {{ or }}") from None
        return value
