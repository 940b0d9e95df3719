"""kapelle: multi-agent reinforcement learning of language models.

    import kapelle

    with kapelle.Trainer.from_recipe("demo", run_dir="runs/mine") as trainer:
        trainer.train()

Names are loaded when they are first used, so that `import kapelle` is quick.
"""

from __future__ import annotations

import os

# torch reads this variable when it is imported. Its waiting threads must sleep: with another busy process, spinning takes ten times
# the time of the work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from kapelle.runtime.early_stop import is_command, take_ctrl_c

if is_command():  # before anything slower is imported
    take_ctrl_c()

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kapelle.runtime.lazy_names import lazy

__version__ = "0.1.0"

_NAMES: Mapping[str, str] = {
    "kapelle.algorithm": "Algorithm Credit",
    "kapelle.comparison.arena": "arena",
    "kapelle.environment": "Answerable Environment Outcome Scripted StateWithImages ShowsImages EpisodeState",
    "kapelle.environments.judged": "Ranking Rubric",
    "kapelle.errors": "ConfigError DataError KapelleError",
    "kapelle.models.language_model": "LanguageModel",
    "kapelle.one_call": "blame train",
    "kapelle.rollout.evaluation.arena": "Arena",
    "kapelle.rollout.evaluation.evaluate": "Evaluation",
    "kapelle.runs.blamed": "Blame",
    "kapelle.settings.base": "Settings",
    "kapelle.settings.schema": "AgentConfig RunConfig TeamConfig",
    "kapelle.setup.recipe": "load_recipe",
    "kapelle.team": "Agent Policy Team",
    "kapelle.training.step_report": "Step",
    "kapelle.training.trainer": "Summary Trainer",
    "kapelle.types": "Episode Group Image Message Sampling Task Turn",
    "kapelle.workflow": "Scene Workflow",
}
"""Mapping from each module to the public names that it defines."""
HOMES: Mapping[str, str] = {name: module for module, names in _NAMES.items() for name in names.split()}
"""Mapping from each public name to the module that defines it."""

__all__ = ["__version__", *sorted(HOMES)]  # noqa: PLE0604 - built from the table above

if TYPE_CHECKING:
    from kapelle.algorithm import Algorithm as Algorithm
    from kapelle.algorithm import Credit as Credit
    from kapelle.comparison.arena import arena as arena
    from kapelle.environment import Answerable as Answerable
    from kapelle.environment import Environment as Environment
    from kapelle.environment import EpisodeState as EpisodeState
    from kapelle.environment import Outcome as Outcome
    from kapelle.environment import Scripted as Scripted
    from kapelle.environment import ShowsImages as ShowsImages
    from kapelle.environment import StateWithImages as StateWithImages
    from kapelle.environments.judged import Ranking as Ranking
    from kapelle.environments.judged import Rubric as Rubric
    from kapelle.errors import ConfigError as ConfigError
    from kapelle.errors import DataError as DataError
    from kapelle.errors import KapelleError as KapelleError
    from kapelle.models.language_model import LanguageModel as LanguageModel
    from kapelle.one_call import blame as blame
    from kapelle.one_call import train as train
    from kapelle.rollout.evaluation.arena import Arena as Arena
    from kapelle.rollout.evaluation.evaluate import Evaluation as Evaluation
    from kapelle.runs.blamed import Blame as Blame
    from kapelle.settings.base import Settings as Settings
    from kapelle.settings.schema import AgentConfig as AgentConfig
    from kapelle.settings.schema import RunConfig as RunConfig
    from kapelle.settings.schema import TeamConfig as TeamConfig
    from kapelle.setup.recipe import load_recipe as load_recipe
    from kapelle.team import Agent as Agent
    from kapelle.team import Policy as Policy
    from kapelle.team import Team as Team
    from kapelle.training.step_report import Step as Step
    from kapelle.training.trainer import Summary as Summary
    from kapelle.training.trainer import Trainer as Trainer
    from kapelle.types import Episode as Episode
    from kapelle.types import Group as Group
    from kapelle.types import Image as Image
    from kapelle.types import Message as Message
    from kapelle.types import Sampling as Sampling
    from kapelle.types import Task as Task
    from kapelle.types import Turn as Turn
    from kapelle.workflow import Scene as Scene
    from kapelle.workflow import Workflow as Workflow

__getattr__, __dir__ = lazy("kapelle", HOMES)
