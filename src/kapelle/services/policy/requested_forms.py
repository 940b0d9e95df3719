"""Handles the constraints that callers set on a completion, which are JSON that matches a schema, or a tool call."""

from __future__ import annotations

import asyncio
from collections.abc import Set as AbstractSet

from kapelle.engines.rollout.compose import engine_of
from kapelle.engines.rollout.endpoint import constraint_fields
from kapelle.engines.rollout.protocol import AppliesConstraints
from kapelle.errors import ConfigError
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.constraints import closed, forced_call, json_rule
from kapelle.services.policy.chat_form import (
    ChatRequest,
    JsonFormat,
    MessageReader,
    NamedChoice,
    SamplingBody,
    SchemaFormat,
)
from kapelle.services.request_errors import wrong
from kapelle.types import Constraint, Json, Sampling


def constraint_of(
    request: ChatRequest, reader: MessageReader, setup: RolloutSetup, agent: str, *, training: bool = False
) -> Constraint | None:
    """Return the constraint on a completion, or None for an unconstrained completion.

    Tool calls have the format of the agent's `reader`. Raises RequestError (400) for constraints that no completion can
    satisfy, and for engines without constrained decoding.
    """
    form, choice = request.response_format, request.tool_choice
    forced = choice == "required" or isinstance(choice, NamedChoice)
    if forced and not request.tools:
        raise wrong("`tool_choice` requires a call, but there are no `tools`. Add `tools`.", "tool_choice")
    if reader.is_endpoint:
        return _forwarded(
            request, setup.team[agent].sampling.constraint, FORMS if training else FORMS | SERVED
        )
    schema: dict[str, Json] | None = None
    if isinstance(form, SchemaFormat):
        schema = closed(form.json_schema.schema_)
    elif isinstance(form, JsonFormat):
        schema = {"type": "object"}
    tools: list[Json] = [tool.model_dump(exclude_none=True) for tool in request.tools]
    if not forced and schema is None:
        return None
    place = "tool_choice" if forced else "response_format"
    if not isinstance(engine_of(setup.engine, setup.team.policy(agent).name), AppliesConstraints):
        raise wrong(
            f"`{place}` needs constrained decoding, which the engine of '{agent}' does not support. Set `engine.name: local`.",
            place,
        )
    calls = forced or request.calls_tools
    if calls and reader.calls is None:
        raise wrong(
            f"`{place}`: calls in the format `{reader.form}` cannot be forced, because their arguments are "
            "not JSON. Serve the team with "
            "`--tool-form hermes`.",
            place,
        )
    name = choice.function.name if isinstance(choice, NamedChoice) else None
    try:
        constraint = Constraint.json_schema(schema or {}) if schema is not None else Constraint.json_object()
        if calls and reader.calls is not None:
            several = request.parallel_tool_calls and name is None
            constraint = forced_call(tools, name, reader.calls, several=several)
            if not forced and schema is not None:  # either a tool call, or JSON that matches the schema
                either = constraint.text.replace("start: ", "called: ", 1)
                rules = f"start: called | answer\nanswer: {json_rule(schema)}\n{either}"
                constraint = Constraint.grammar(rules)
        from kapelle.models.token_masks import unsupported_reason

        reason = unsupported_reason(constraint)
        if reason is None:
            return constraint
        for number, tool in enumerate(tools if calls else ()):
            named = name in (None, tool["function"]["name"])
            if (
                reader.calls
                and named
                and (own := unsupported_reason(forced_call([tool], None, reader.calls)))
            ):
                place = f"tools.{number}.function.parameters"
                raise wrong(
                    f"`{place}`: no call of the tool '{tool['function']['name']}' can satisfy this constraint: {own}.",
                    place,
                )
    except ConfigError as error:
        raise wrong(f"`{place}`: {error}", place) from None
    raise wrong(f"`{place}`: no completion can satisfy this constraint: {reason}.", place)


async def check_length(request: ChatRequest, sampling: Sampling, setup: RolloutSetup, agent: str) -> None:
    """Raise RequestError (400) if no completion within `max_tokens` tokens can satisfy the constraint."""
    policy, constraint, most = setup.team.policy(agent).name, sampling.constraint, sampling.max_tokens
    engine = engine_of(setup.engine, policy)
    if constraint is None or not isinstance(engine, AppliesConstraints):
        return

    if await asyncio.to_thread(engine.fits, policy, constraint, most) is False:
        name = "max_completion_tokens" if request.max_tokens is None else "max_tokens"
        raise wrong(
            f"`{name}`: no completion in the requested format fits into {most} tokens. Set a higher limit.",
            name,
        )


FORMS = {"tools", "tool_choice", "parallel_tool_calls", "response_format"}
"""The fields that are forwarded unchanged to the server of an endpoint."""
SERVED = {"top_k", "chat_template_kwargs", "reasoning_effort", "verbosity", *SamplingBody.model_fields} - {
    "seed",
    "stop",
}
"""Additional fields that are forwarded unchanged outside of training. All other fields, including `seed` and `stop`, are
sampling parameters."""


def _forwarded(request: ChatRequest, own: Constraint | None, names: AbstractSet[str]) -> Constraint | None:
    """Return the fields for the server of an endpoint.

    If the caller sets no response format, the fields contain the agent's `own` constraint.
    """
    fields = request.model_dump(include=request.model_fields_set & names, by_alias=True, exclude_none=True)
    if not request.tools:
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            fields.pop(name, None)
    if "response_format" not in fields and own is not None:
        fields |= constraint_fields(own)
    return Constraint.endpoint(fields) if fields else None
