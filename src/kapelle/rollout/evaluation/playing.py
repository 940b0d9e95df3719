"""Prepare a team without training, so that it can be evaluated, used in a chat or used to collect episodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from kapelle.environment import Answerable, environment_class
from kapelle.models.adapters import base_and_adapter
from kapelle.rollout.setup import RolloutSetup, make_rollout_setup
from kapelle.settings.feature import without_features
from kapelle.settings.schema import RunConfig
from kapelle.settings.weights import EndpointConfig, PastAdapter
from kapelle.setup.preparation import prepare
from kapelle.setup.recipe import lay_over, load_recipe, names_environment
from kapelle.setup.servers import check_endpoints
from kapelle.setup.team_builder import agent_configs

MAX_TOKENS = 512
"""Default maximum number of completion tokens of a model that acts alone in an environment."""

ALONE = {"tools": "tool_use"}
"""Mapping from environments to the workflow of a single agent, if it is neither `solo` nor `parallel`."""


def model_config(
    model: str,
    environment: str,
    settings: tuple[str, ...] = (),
    *,
    real: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> RunConfig:
    """Return the settings for a model that acts alone in an environment, or that acts for all agents of a recipe's team.

    The argument `model` is a model, or the folder of a PEFT adapter, which all agents use with the base model of this adapter. The
    argument `environment` is the name of an environment (built in or `module:Class`) or of a recipe. The agents of a recipe, except
    endpoints, use the model without warm-up. With `real`, the values of the recipe for pretrained models are used. The function
    `report` receives a message for each value that is not suitable for this model.
    """
    path, adapter = named_base(model, settings)
    if names_environment(environment):
        answers = issubclass(environment_class(environment), Answerable)
        workflow = ALONE.get(environment, "solo" if answers else "parallel")
        values = {
            "name": environment,
            "team": {"sharing": "frozen", "sampling": {"max_tokens": MAX_TOKENS}},
            "model": {"path": path},
            "environment": {"name": environment},
            "workflow": {"name": workflow},
            "algorithm": {"name": "grpo"},
        }
        return _acting_with(adapter, lay_over([("--model", values)], settings).config)
    named = ("warmup=null", f"model.path={json.dumps(path)}")
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
    return _acting_with(adapter, config.model_copy(update={"team": team}))


def named_base(model: str, settings: tuple[str, ...] = ()) -> tuple[str, str | None]:
    """Return the path of the base model, and the folder of the PEFT adapter or None if `model` is not an adapter.

    The base model of an adapter is specified by its `adapter_config.json` or by a setting `model.path=…`. Raises ModelError if the
    base model is unknown.
    """
    given = [word.partition("=")[2] for word in settings if word.startswith("model.path=")]
    if given and (Path(model) / "adapter_config.json").is_file():
        return given[-1].strip("\"'"), model
    return base_and_adapter(model)


def _acting_with(adapter: str | None, config: RunConfig) -> RunConfig:
    """Return a copy of the settings in which every agent, except endpoints, uses an adapter."""
    if adapter is None:
        return config
    agents = tuple(
        role
        if isinstance(role.weights, EndpointConfig)
        else role.model_copy(update={"weights": PastAdapter(past=adapter)})
        for role in agent_configs(config.team)
    )
    return config.model_copy(update={"team": config.team.model_copy(update={"agents": agents})})


def open_rollout_setup(config: RunConfig) -> RolloutSetup:
    """Check the settings, load the models, and return the rollout setup of the team.

    Raises the errors of `errors.py`.
    """
    from kapelle.setup.model_loading import build_engine, load_weights

    prepared = prepare(without_features(config), training=False)
    check_endpoints(prepared.team, config.environment)
    team, models = prepared.team, prepared.load()
    weights = load_weights(team, models, {}, config.seed)
    engine = build_engine(config, models, team)
    for name in (each.name for each in team.policies.values() if each.past):
        engine.load(name, weights(name), 0)
    return make_rollout_setup(config, team, engine)
