"""kapelle: multi-agent reinforcement learning of language models.

    import kapelle

    with kapelle.Trainer.from_recipe("demo", run_dir="runs/mine") as trainer:
        trainer.train()

Names are loaded when they are first used, so that `import kapelle` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kapelle.former_names import install, renamed_in

__version__ = "0.1.0"

install()

_HOME = {
    "Agent": "team",
    "AgentConfig": "settings.schema",
    "Algorithm": "algorithm",
    "ConfigError": "errors",
    "Settings": "settings.base",
    "Credit": "algorithm",
    "DataError": "errors",
    "Environment": "environment",
    "Episode": "types",
    "Evaluation": "evaluation.evaluate",
    "Group": "types",
    "KapelleError": "errors",
    "LanguageModel": "models.language_model",
    "Message": "types",
    "Outcome": "environment",
    "Policy": "team",
    "RunConfig": "settings.schema",
    "Sampling": "types",
    "Scene": "workflow",
    "Step": "training.loop",
    "Summary": "training.summary",
    "Task": "types",
    "Team": "team",
    "TeamConfig": "settings.schema",
    "Trainer": "training.trainer",
    "Turn": "types",
    "Workflow": "workflow",
    "World": "environment",
    "load_recipe": "setup.recipe",
}
"""Public name → module that defines it."""

__all__ = ["__version__", *sorted(_HOME)]  # noqa: PLE0604 - built from the table above

if TYPE_CHECKING:
    from kapelle.algorithm import Algorithm as Algorithm
    from kapelle.algorithm import Credit as Credit
    from kapelle.environment import Environment as Environment
    from kapelle.environment import Outcome as Outcome
    from kapelle.environment import World as World
    from kapelle.errors import ConfigError as ConfigError
    from kapelle.errors import DataError as DataError
    from kapelle.errors import KapelleError as KapelleError
    from kapelle.evaluation.evaluate import Evaluation as Evaluation
    from kapelle.models.language_model import LanguageModel as LanguageModel
    from kapelle.settings.base import Settings as Settings
    from kapelle.settings.schema import AgentConfig as AgentConfig
    from kapelle.settings.schema import RunConfig as RunConfig
    from kapelle.settings.schema import TeamConfig as TeamConfig
    from kapelle.setup.recipe import load_recipe as load_recipe
    from kapelle.team import Agent as Agent
    from kapelle.team import Policy as Policy
    from kapelle.team import Team as Team
    from kapelle.training.loop import Step as Step
    from kapelle.training.summary import Summary as Summary
    from kapelle.training.trainer import Trainer as Trainer
    from kapelle.types import Episode as Episode
    from kapelle.types import Group as Group
    from kapelle.types import Message as Message
    from kapelle.types import Sampling as Sampling
    from kapelle.types import Task as Task
    from kapelle.types import Turn as Turn
    from kapelle.workflow import Scene as Scene
    from kapelle.workflow import Workflow as Workflow


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"kapelle.{_HOME[name]}"), name)
    return renamed_in("kapelle")(name)


def __dir__() -> list[str]:
    return sorted(__all__)
