"""The prompt about tools: their schemas, and how a call is written in the model's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kapelle.grading.text.tool_call import Form
from kapelle.types import Json

_HOW: Mapping[Form, str] = {
    "hermes": (
        "Write each call on lines of its own, and nothing but calls when you make one:\n"
        '<tool_call>\n{"name": "tool name", "arguments": {"argument": "value"}}\n</tool_call>'
    ),
    "llama": (
        "To call a tool, answer with this object and nothing else; several calls are a list of them:\n"
        '{"name": "tool name", "parameters": {"argument": "value"}}'
    ),
    "pythonic": (
        "To call tools, answer with a list of calls and nothing else; every argument is named:\n"
        '[tool_name(argument="value"), other_tool(argument=1)]'
    ),
}


def tools_prompt(schemas: Sequence[Json], form: Form) -> str:
    """Return what an agent reads about its tools, given their JSON schemas."""
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return f"You can call these tools:\n<tools>\n{listed}\n</tools>\n{_HOW[form]}"
