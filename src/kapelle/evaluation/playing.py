"""A team that only plays: settings and weights to evaluate or collect with, nothing to train."""

from __future__ import annotations

import json
from collections.abc import Callable

from kapelle.environment import Answerable, environment_class
from kapelle.rollout.play import Play, make_play
from kapelle.settings.schema import EndpointConfig, RunConfig
from kapelle.setup.preparation import check_endpoints, prepare
from kapelle.setup.recipe import lay_over, load_recipe, names_environment

MAX_TOKENS = 512
"""Most tokens of an answer of a model that plays an environment alone, unless set otherwise."""

ALONE = {"tools": "tool_use"}
"""Environments in which one agent alone plays another workflow than `solo` or `parallel`."""


def model_config(
    model: str,
    environment: str,
    settings: tuple[str, ...] = (),
    *,
    real: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> RunConfig:
    """Return the settings of a model, as it is, that plays an environment alone or a recipe as its team.

    `environment` is the name of an environment (built in, or `module:Class`), else that of a recipe, whose
    agents are then all played by the model, endpoints excepted, without adapters and without warm-up.
    `real` takes a recipe's values for a pretrained model; `report` gets a line for each that does not suit this model.
    """
    if names_environment(environment):
        answers = issubclass(environment_class(environment), Answerable)
        workflow = ALONE.get(environment, "solo" if answers else "parallel")
        values = {
            "name": environment,
            "team": {"sharing": "frozen", "sampling": {"max_tokens": MAX_TOKENS}},
            "model": {"path": model},
            "environment": {"name": environment},
            "workflow": {"name": workflow},
            "algorithm": {"name": "grpo"},
        }
        return lay_over([("--model", values)], settings).config
    named = ("warmup=null", f"model.path={json.dumps(model)}")
    recipe = load_recipe(environment, (), (*settings, *named), real=real)
    for note in recipe.notes:
        report(note)
    config = recipe.config
    agents = config.team.agents
    if not isinstance(agents, int):
        agents = tuple(
            agent
            if isinstance(agent.weights, EndpointConfig)
            else agent.model_copy(
                update={"weights": None, "lora": None, "share_critic_with": None, "optimizer": None}
            )
            for agent in agents
        )
    team = config.team.model_copy(update={"sharing": "frozen", "agents": agents, "critic_sharing": None})
    return config.model_copy(update={"team": team})


def open_play(config: RunConfig) -> Play:
    """Check everything, load the models and return what plays; raises the errors of `errors.py`."""
    from kapelle.setup.model_loading import build_engine

    unpaid = config.model_copy(update={"reward_model": None})  # a reward model is only for training
    prepared = prepare(unpaid, training=False)
    check_endpoints(prepared.team, config.environment)
    return make_play(config, prepared.team, build_engine(config, prepared.load(), prepared.team))
