"""From questions of the contract to sessions, and from what they answer to the contract's messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kapelle.wire import environment_v1_pb2 as pb
from kapelle.wire.values import to_map


def view_message(view: Mapping[str, Any]) -> pb.View:
    """Return a session's view as a message."""
    shown, movers = view["shown"], view["movers"]
    return pb.View(
        movers=movers.get("value", ()),
        movers_error=raised(movers["error"]) if "error" in movers else None,
        shown={agent: seen["value"] for agent, seen in shown.items() if "value" in seen},
        shown_errors={agent: raised(seen["error"]) for agent, seen in shown.items() if "error" in seen},
    )


def act_message(answer: Mapping[str, Any]) -> pb.ActReply:
    """Return the answer to a move as a message."""
    return pb.ActReply(rewards=_rewards(answer["rewards"]), view=view_message(answer["view"]))


def act_question(asked: pb.ActRequest) -> dict[str, Any]:
    """Return a move as a session takes it."""
    question: dict[str, Any] = {
        "call": "act",
        "actions": {move.agent: move.text for move in asked.moves},
        "final": asked.final if asked.HasField("final") else None,
    }
    if asked.HasField("answers_allowed"):
        question["allow_answers"] = asked.answers_allowed
    return question


def outcome_message(outcome: Mapping[str, Any]) -> pb.Outcome:
    """Return a session's outcome as a message."""
    return pb.Outcome(
        rewards=_rewards(outcome["rewards"]),
        success=outcome["success"],
        info=to_map(outcome["info"], "info"),
        truncated=outcome["truncated"],
        roles=[pb.Role(agent=agent, role=role) for agent, role in outcome["roles"].items()],
    )


def raised(form: list[str]) -> str:
    """Return the message of what an environment raised."""
    return ": ".join(form)


def _rewards(rewards: Mapping[str, float]) -> list[pb.Reward]:
    return [pb.Reward(agent=agent, amount=amount) for agent, amount in rewards.items()]
