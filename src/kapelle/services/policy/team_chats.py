"""A team's answer to one request: whole, or as the chunks of a stream in which each agent is heard as it speaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kapelle.services.policy.chat_form import ChatRequest
from kapelle.services.policy.completions import Head, chunk_row
from kapelle.services.policy.teams import Played, Spoken, turn_rows
from kapelle.types import Json


@dataclass(frozen=True)
class TeamChat:
    """A request to a team that is about to be answered."""

    model: str
    request: ChatRequest
    session: str | None = None
    """The session that it is part of; None where none are kept."""
    head: Head = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", Head(self.model))

    @property
    def _extra(self) -> dict[str, Json]:
        """What the answer says of itself beyond OpenAI's form."""
        return {} if self.session is None else {"session": self.session}

    async def whole(self, answers: AsyncIterator[Spoken | Played]) -> Json:
        """Return the answer, with the turns behind it."""
        async with aclosing(answers) as told:  # type: ignore[type-var]
            played = [each async for each in told if isinstance(each, Played)]
        choices = [
            {
                "index": each.choice,
                "message": {"role": "assistant", "content": each.text, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "kapelle": {"turns": turn_rows(each.episode)},
            }
            for each in played
        ]
        row = {**self.head.row("chat.completion"), "choices": choices, "usage": _usage(played)}
        return row if self.session is None else {**row, "kapelle": self._extra}

    async def chunks(self, answers: AsyncIterator[Spoken | Played]) -> AsyncIterator[Json | str]:
        """Yield the answer in pieces: what agents say beside the content, then the team's answer as the content."""
        played: list[Played] = []
        for choice in range(self.request.n):
            yield chunk_row(
                self.head,
                choice,
                {"role": "assistant", "content": "", "refusal": None},
                None,
                None,
                self._extra,
            )
        async with aclosing(answers) as told:  # type: ignore[type-var]
            async for each in told:
                if isinstance(each, Spoken):
                    said = {"agent": each.agent, "text": each.text, "begins": each.begins, "ends": each.ends}
                    yield chunk_row(self.head, each.choice, {"content": ""}, None, None, said)
                    continue
                played.append(each)
                yield chunk_row(self.head, each.choice, {"content": each.text}, None, None)
                turns = {"turns": turn_rows(each.episode)}
                yield chunk_row(self.head, each.choice, {}, None, "stop", turns)
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield {**self.head.row("chat.completion.chunk"), "choices": [], "usage": _usage(played)}
        yield "[DONE]"


def _usage(played: Sequence[Played]) -> Json:
    """Return how many tokens all agents read and wrote."""
    turns = [turn for each in played for turn in each.episode.turns]
    read, written = sum(len(t.prompt_ids) for t in turns), sum(len(t.completion_ids) for t in turns)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
