"""Extracts the tool calls in the text of a turn, each with its result if the agent has read the result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, get_args

from kapelle.environments.grading.text.tool_call import Form, NotCalls, beside_calls, parse_calls

FORMS: Sequence[Form] = ("hermes", "qwen_coder", "glm", "mistral", "deepseek", "harmony", "llama")
"""The formats of tool calls that are tried for every run. The format `pythonic` is excluded, because ordinary text can look like it."""


def shown_calls(text: str, form: object, results: Sequence[str] | None = None) -> dict[str, Any] | None:
    """Return the tool calls in a text and the rest of the text, or None if the text contains no valid calls.

    The argument `form` is the format of tool calls in the run's environment, if the environment has one. The argument
    `results` contains the results that the agent read next, or None if they are unknown. If there is one result for
    each call, each result is shown beside its call. Otherwise, all results are shown beside the first call.
    """
    own: list[Form] = [each for each in get_args(Form) if each == form]
    for kind in dict.fromkeys([*own, *FORMS]):
        try:
            calls = parse_calls(text, (kind,))
        except NotCalls:
            continue
        if calls:
            rows: list[dict[str, Any]] = [
                {
                    "name": call.name,
                    "arguments": [(key, _plain(value)) for key, value in call.arguments.items()],
                }
                for call in calls
            ]
            if results is not None:
                paired = results if len(results) == len(calls) else ["\n\n".join(results)]
                for row, result in zip(rows, paired, strict=False):
                    row |= {"result": result, "rows": len(rows) if len(paired) < len(rows) else 1}
            return {"rows": rows, "words": beside_calls(text, kind), "results": results is not None}
    return None


def results_after(turns: Sequence[Any], place: int) -> list[str]:
    """Return the tool results that the agent of a turn read in the prompt of its next turn."""
    following = (turn for turn in turns[place + 1 :] if turn.agent == turns[place].agent)
    messages: Sequence[Mapping[str, Any]] = next((turn.new_messages for turn in following), ())
    return [str(message["content"]) for message in messages if message["role"] == "tool"]


def _plain(value: object) -> str:
    return (
        str(value)
        if isinstance(value, str | Decimal)
        else json.dumps(value, ensure_ascii=False, default=float)
    )
