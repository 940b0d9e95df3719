"""The section `episode.compaction` of a recipe."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from kapelle.settings.base import Settings
from kapelle.settings.feature import FeatureSettings


class SummaryConfig(Settings):
    """Settings of the summaries that agents write of their own conversations (CompactionRL, arXiv 2607.05378)."""

    instruction: str = Field(
        default="Most of this conversation will be removed. Write a summary that contains everything you need to continue.",
        min_length=1,
    )
    """The message after which the agent writes the summary."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of a summary. With null, this is the `sampling.max_tokens` of the agent."""


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
    summary: SummaryConfig | None = None
    """Settings of the summary that the agent writes before messages are removed. The summary follows the `note`. With null, no summary is
    written."""

    @field_validator("note")
    @classmethod
    def _writable(cls, value: str) -> str:
        try:
            value.format(dropped=1)
        except (KeyError, IndexError, ValueError, AttributeError):
            raise ValueError("only `{dropped}` is allowed as a field; write a brace as {{ or }}") from None
        return value
