"""Everything that can be known to be wrong before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kapelle.models.outline import check_adapters, outlines
from kapelle.settings.schema import RunConfig
from kapelle.setup.team_builder import build_algorithm, build_team
from kapelle.setup.validation import check_prompts, check_run
from kapelle.team import Team

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kapelle.algorithm import Algorithm

PROMPTS = 64
"""Tasks of each split whose first prompts are measured."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A run that nothing speaks against, and what it would be made of."""

    algorithm: Algorithm
    team: Team
    outlines: Mapping[str, PreTrainedModel]
    """Base name → the model without its weights."""


def check(config: RunConfig, passed: Callable[[str, str], None] = lambda _name, _detail: None) -> Checked:
    """Make every check of a training run; `passed` hears of each one with what it found.

    Raises the first KapelleError that the run would meet.
    """
    environment = config.environment
    algorithm = build_algorithm(config)
    team = build_team(config, algorithm)
    passed("team", f"{', '.join(team.names)}; {', '.join(team.trained) or 'nothing'} trains")
    check_run(config, algorithm, team)
    passed("algorithm", f"{algorithm.name} can train this team")
    passed("workflow", f"{config.workflow.name} can be played on {environment.name}")
    told = [
        f"{split}: {source} ({_many(environment.size(split))})"
        for split, source in environment.sources.items()
    ]
    from kapelle.environment import Skipping

    if isinstance(environment, Skipping):
        told += [f"{split}: {said}" for split, said in environment.skipped().items()]
    passed("data", "; ".join(told))
    check_prompts(config, team, problems=PROMPTS)
    passed("prompts", f"the opening ones of {PROMPTS} tasks of each split fit the context")
    models = outlines(team, config.model)
    check_adapters(team, models)
    passed("models", ", ".join(dict.fromkeys(team.bases.values())) + ": settings read, adapters fit")
    return Checked(algorithm, team, models)


def _many(size: int | None) -> str:
    return "without end" if size is None else f"{size} tasks"
