"""Kinds of run that train in a few milliseconds a step, for `benchmarks.growth`: smallest models, smallest batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kapelle.training.trainer import Trainer

MODEL = {
    "embedded": {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32, "context": 256}
}
LORA = {"rank": 2, "alpha": 4.0}
SUMS = {"name": "arithmetic", "digits": 1}
TWO = {"agents": 2, "lora": LORA, "sampling": {"max_tokens": 4}}
ONE = {**TWO, "agents": 1}


def _sections(steps: int, staleness: int = 0, **over: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "environment": SUMS,
        "workflow": {"name": "parallel"},
        "team": TWO,
        "training": {"steps": steps, "tasks_per_step": 2, "max_staleness": staleness},
        "evaluation": {"before_and_after": False},
        "checkpoint": {"every": 100},
        "optimizer": {"lr": 1e-3},
        **over,
    }


def _trainer(folder: Path, steps: int, **over: Any) -> Trainer:
    return Trainer(**_sections(steps, **over), run_dir=folder / "run")


def _against_past(folder: Path, steps: int, **over: Any) -> Trainer:
    """Train against the adapter that an earlier run of the same team has saved."""
    with Trainer(**_sections(1, **over), run_dir=folder / "earlier") as earlier:
        earlier.train()
    past = folder / "earlier" / "checkpoints" / "00000001" / "policies" / "agent_1"
    agents = [{"name": "agent_0"}, {"name": "agent_1", "weights": {"past": str(past)}}]
    return _trainer(folder, steps, **{**over, "team": {**TWO, "agents": agents}})


KUHN = {"name": "openspiel", "game": "kuhn_poker", "wording": "short", "penalty": -1}
DEBATE = {"name": "debate", "rounds": 2, "score_rounds": True}
FIT = {"target": "monte_carlo", "capacity": 32, "min_fill": 8, "updates": 2}
TOOLS = {
    "name": "tools",
    "form": "hermes",
    "max_turns": 2,
    "questions": SUMS,
    "tools": [{"tool": "calculator"}],
}

KINDS: Mapping[str, Callable[[Path, int], Trainer]] = {
    "grpo": partial(_trainer, algorithm={"name": "grpo", "group_size": 2}),
    "ppo": partial(_trainer, algorithm={"name": "ppo"}, workflow={"name": "solo"}, team=ONE),
    "mappo": partial(_trainer, algorithm={"name": "mappo"}),
    "happo": partial(_trainer, algorithm={"name": "happo"}),
    "qmix": partial(
        _trainer,
        algorithm={"name": "qmix", "group_size": 2, "credit": "difference", "fit": FIT},
        workflow=DEBATE,
    ),
    "vdn_token": partial(_trainer, algorithm={"name": "vdn_token"}),
    "sft": partial(_trainer, algorithm={"name": "sft"}),
    "dpo": partial(_trainer, algorithm={"name": "dpo", "group_size": 4}, workflow={"name": "solo"}, team=ONE),
    "mars": partial(
        _against_past,
        environment=KUHN,
        workflow={"name": "play"},
        algorithm={"name": "mars", "group_size": 2},
    ),
    "maporl": partial(
        _trainer, algorithm={"name": "maporl", "group_size": 2, "verifier": None}, workflow=DEBATE
    ),
    "verifier": partial(
        _trainer,
        algorithm={"name": "verifier", "group_size": 2},
        team={**TWO, "sharing": "frozen", "critic_lora": LORA},
        evaluation={"before_and_after": False, "problems": 10},
    ),
    "tools": partial(
        _trainer,
        environment=TOOLS,
        model={"embedded": {**MODEL["embedded"], "context": 2048}},
        workflow={"name": "tool_use"},
        algorithm={"name": "grpo", "group_size": 2},
        team=ONE,
    ),
    "stale": partial(
        _trainer,
        algorithm={"name": "grpo", "group_size": 2, "loss": {"importance_cap": 2.0}},
        staleness=2,
    ),
    "evaluated": partial(
        _trainer,
        algorithm={"name": "grpo", "group_size": 2},
        evaluation={"before_and_after": False, "every": 10, "problems_while_training": 2},
    ),
}
"""Kind → trainer of a run in a folder, of that many steps."""
