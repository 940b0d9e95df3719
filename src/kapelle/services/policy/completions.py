"""Completions as OpenAI's clients read them: whole, and as the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kapelle.engines.rollout.protocol import Completion, Likeliest
from kapelle.services.policy.conversation import call_row, parse_answer
from kapelle.types import Json

Decode = Callable[[Sequence[int]], str]
"""Token ids → text."""


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of one answer have in common."""

    model: str
    identity: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def row(self, kind: str) -> dict[str, Json]:
        """Return the fields that stand before the choices."""
        return {"id": self.identity, "object": kind, "created": self.created, "model": self.model}


def choice_row(
    index: int,
    completion: Completion,
    alternatives: Sequence[Likeliest],
    *,
    tools: bool,
    decode: Decode | None,
) -> dict[str, Json]:
    """Return one choice; `tools` looks for calls, `decode` is given where log-probs are asked for."""
    message, reason = message_of(completion, tools=tools)
    logprobs = None
    if decode is not None:
        logprobs = {"content": token_rows(completion.ids, completion.logprobs, decode, alternatives)}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def chunk_row(
    head: Head,
    choice: int,
    delta: Mapping[str, Json],
    logprobs: Json,
    reason: str | None,
    extra: Mapping[str, Json] | None = None,
) -> dict[str, Json]:
    """Return one piece of one choice; `extra` is what it says beyond OpenAI's form."""
    row: dict[str, Json] = {
        **head.row("chat.completion.chunk"),
        "choices": [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}],
    }
    return {**row, "kapelle": extra} if extra else row


def message_of(completion: Completion, *, tools: bool) -> tuple[dict[str, Json], str]:
    """Return the message that a completion is, and why it ended."""
    message: dict[str, Json] = {"role": "assistant", "content": completion.text, "refusal": None}
    calls = parse_answer(completion.text) if tools else None
    if calls is None or not calls.calls:
        return message, completion.finish_reason
    rows = [call_row(call, f"call_{secrets.token_hex(12)}") for call in calls.calls]
    return {**message, "content": calls.content, "tool_calls": rows}, "tool_calls"


def token_rows(
    ids: Sequence[int],
    logprobs: Sequence[float],
    decode: Decode,
    alternatives: Sequence[Likeliest] = (),
) -> list[Json]:
    """Return each sampled token with its log-prob, and with the likeliest ones in its place where those are given."""
    rows: list[Json] = []
    for place, (number, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        others = alternatives[place] if alternatives else ()
        top = [_token_row(other, likely, decode) for other, likely in others]
        rows.append({**_token_row(number, logprob, decode), "top_logprobs": top})
    return rows


def _token_row(number: int, logprob: float, decode: Decode) -> dict[str, Json]:
    """Return one token; bytes that are no whole character have no `bytes`."""
    text = decode([number])
    known = None if "\ufffd" in text else list(text.encode("utf-8", "surrogatepass"))
    return {"token": text, "logprob": logprob, "bytes": known}


def usage_row(prompt: int, completions: Sequence[Completion]) -> dict[str, Json]:
    """Return how many tokens were read and written."""
    written = sum(len(completion.ids) for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def weights_row(completion: Completion) -> Mapping[str, Json]:
    """Return which weights answered."""
    return {"version": completion.version, "weights_hash": completion.weights_hash}
