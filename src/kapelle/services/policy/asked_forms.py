"""What an answer has to look like because its caller asks for it: JSON of a schema, or a call of a tool."""

from __future__ import annotations

from typing import Any

from kapelle.engines.rollout.protocol import Recites
from kapelle.errors import ConfigError
from kapelle.rollout.play import Play
from kapelle.runtime.constraints import forced_call, json_rule
from kapelle.services.policy.chat_form import ChatRequest, MessageReader
from kapelle.services.refusals import wrong
from kapelle.types import Constraint, Json


def form_asked(request: ChatRequest, reader: MessageReader, play: Play, agent: str) -> Constraint | None:
    """Return what the answer is held to, calls in the form of the agent's `reader`; None where the caller leaves it free.

    Raises Refusal (400) for what no text can be, and where nothing holds the agent to it.
    """
    schema, place = _schema(request)
    tools: list[Json] = [tool.model_dump(exclude_none=True) for tool in request.tools]
    chosen = request.tool_choice
    forced = chosen == "required" or isinstance(chosen, dict)
    if forced and not tools:
        raise wrong("`tool_choice` asks for a call, and there are no `tools`.", "tool_choice")
    if not forced and schema is None:
        return None
    if forced:
        place = "tool_choice"
    if not _holds(play, agent):
        raise wrong(
            f"`{place}` needs an engine that holds answers to a form, which the engine of '{agent}' does not: `engine.name: local` "
            "does. Ask for the form in words.",
            place,
        )
    calls = forced or request.calls_tools
    if calls and reader.calls is None:
        raise wrong(
            f"`{place}`: calls in the form `{reader.form}` cannot be forced, as their arguments are no JSON. Ask for a call in words, "
            "or serve the team with `--tool-form hermes`.",
            place,
        )
    name = _name(chosen) if isinstance(chosen, dict) else None
    try:
        constraint = Constraint.json_schema(schema or {}) if schema is not None else Constraint.json_object()
        if calls and reader.calls is not None:
            called = forced_call(
                tools, name, reader.calls, several=request.parallel_tool_calls and name is None
            )
            constraint = called
            if not forced and schema is not None:  # either: the agent calls a tool, or answers
                either = called.text.replace("start: ", "called: ", 1)
                constraint = Constraint.grammar(
                    f"start: called | answer\nanswer: {json_rule(schema)}\n{either}"
                )
        from kapelle.models.token_masks import why_refused

        reason = why_refused(constraint)
        if reason is None:
            return constraint
        for number, tool in enumerate(tools if calls else ()):
            function = tool["function"]
            if (
                reader.calls
                and name in (None, function["name"])
                and (own := why_refused(forced_call([tool], None, reader.calls)))
            ):
                part = f"tools.{number}.function.parameters"
                raise wrong(
                    f"`{part}`: no call of the tool '{function['name']}' can be held to it: {own}.", part
                )
    except ConfigError as error:
        raise wrong(f"`{place}`: {error}", place) from None
    raise wrong(f"`{place}`: no answer can be held to it: {reason}.", place)


def _schema(request: ChatRequest) -> tuple[dict[str, Json] | None, str]:
    """Return the schema that the answer's text is to have, and the parameter that says so; None for any text."""
    given = request.response_format
    kind = given.get("type")
    if kind == "text" and len(given) == 1:
        return None, ""
    if kind == "json_object" and len(given) == 1:
        return {"type": "object"}, "response_format"
    asked: Any = given.get("json_schema")
    if (
        kind == "json_schema"
        and len(given) == 2
        and isinstance(asked, dict)
        and isinstance(asked.get("schema"), dict)
    ):
        for name in asked:
            if name not in ("name", "schema", "strict", "description"):
                raise wrong(f"The parameter `response_format.json_schema.{name[:64]}` is not supported.",
                            f"response_format.json_schema.{name[:64]}")  # fmt: skip
        return asked["schema"], "response_format"
    if kind == "json_schema":
        raise wrong(
            "`response_format.json_schema` is an object with a `schema`.", "response_format.json_schema"
        )
    raise wrong("`response_format.type` is `text`, `json_object` or `json_schema`.", "response_format.type")


def _name(chosen: dict[str, Any]) -> str:
    function = chosen.get("function")
    if (
        chosen.get("type") == "function"
        and isinstance(function, dict)
        and isinstance(function.get("name"), str)
    ):
        return str(function["name"])
    raise wrong("`tool_choice` is `auto`, `none`, `required` or a function by its name.", "tool_choice")


def _holds(play: Play, agent: str) -> bool:
    """Return whether the engine samples an agent's answers by masks, or says what a script does, such as the teacher of a warm-up."""
    from kapelle.engines.rollout.local.engine import LocalEngine

    if isinstance(play.engine, Recites):
        return True
    return isinstance(play.engine, LocalEngine) and play.team.policy(agent).endpoint is None
