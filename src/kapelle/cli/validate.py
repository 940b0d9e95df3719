"""`kapelle validate`: all checks that need no model weights."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kapelle.cli.output import say
from kapelle.cli.parser import split_words
from kapelle.cli.quiet import hush
from kapelle.errors import ConfigError

if TYPE_CHECKING:
    from kapelle.environment import Environment
    from kapelle.settings.schema import RunConfig

S = TypeVar("S")


def run(arguments: argparse.Namespace) -> int:
    """Print every check that passed; the first one that fails is the error."""
    hush()
    if arguments.graph:
        say(draw(arguments.words))
        return 0
    environment = _environment(arguments)
    if environment is not None:
        return _conform(_looked_at(environment, start=arguments.start), arguments.agents)
    if arguments.agents is not None:
        raise ConfigError("--agents is for an environment alone; a recipe names its agents in `team.agents`.")
    from kapelle.cli.source import find_stages, read_recipe
    from kapelle.setup.preparation import DOUBT, prepare
    from kapelle.training.stages import check_weights

    def passed(name: str, detail: str) -> None:
        say(f"-   {detail}" if name == DOUBT else f"ok  {name:10} {detail}")

    def check(config: RunConfig, *, staged: bool = False) -> None:
        prepared = prepare(_looked_at(config, start=arguments.start), passed=passed)
        starts = check_weights(prepared, staged=staged)
        if starts:
            passed("start", "; ".join(f"{policy} from {folder}" for policy, folder in starts.items()))

    staged = find_stages(arguments.words, None, resume=False, real=arguments.real)
    if staged is not None:
        for stage, config in staged.checked():
            passed("stage", f"{stage.number} of {len(staged.stages)}: {stage.name}")
            _print_notes(stage.recipe.notes)
            check(config, staged=True)
        say(f"All {len(staged.stages)} stages of {staged.recipe} are ready to train.")
        return 0
    recipe = read_recipe(arguments.words, real=arguments.real)
    set_here = sum(source != "default" for source in recipe.origin.values())
    passed("settings", f"{len(recipe.origin)} values, {set_here} of them not defaults")
    _print_notes(recipe.notes)
    check(recipe.config)
    say(f"{recipe.config.name} is ready to train.")
    return 0


def _looked_at(settings: S, *, start: bool) -> S:
    """Return the settings that are checked: without the programs that they name, unless these are to be started."""
    if start:
        return settings
    from kapelle.setup.preparation import without_programs

    checked, left_out = without_programs(settings)
    for program in left_out:
        say(
            f"-   the MCP server `{program}` is left alone; `--start` starts or asks it, and checks its tools"
        )
    return checked


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        say(f"-   {note}")


def _environment(arguments: argparse.Namespace) -> Environment | None:
    """Return the environment if one is named by itself; None where a recipe is named."""
    from kapelle import environments
    from kapelle.evaluation.playing import model_config
    from kapelle.setup.recipe import builtin_recipes

    files, settings = split_words(arguments.words)
    name = arguments.environment
    if name is None:
        alone = len(files) == 1 and files[0] not in builtin_recipes() and not Path(files[0]).is_file()
        if not alone or not (files[0] in environments.BUILTIN or ":" in files[0]):
            return None
        name = files[0]
    return model_config("embedded", name, settings).environment


def _conform(environment: Environment, team: str | None) -> int:
    import asyncio

    from kapelle.conformance import conform

    agents = None if team is None else [name.strip() for name in team.split(",")]
    try:
        findings = asyncio.run(conform(environment, agents))
    except ConfigError as error:
        hint = "" if agents else " If it needs certain agents, name them: --agents A,B."
        raise ConfigError(f"{error}{hint}") from error
    marks = {"ok": "ok ", "failed": "NO ", "not checked": "-  "}
    for finding in findings:
        say(f"{marks[finding.status]} {finding.name:13} {finding.detail}")
    failed = [finding.name for finding in findings if finding.status == "failed"]
    if failed:
        raise ConfigError(
            f"`{environment.name}` is not fit for training yet: {', '.join(failed)}. See above."
        )
    say(f"{environment.name} is fit for training.")
    return 0


def draw(words: list[str]) -> str:
    """Return the Mermaid flowchart of a recipe's workflow, or of a workflow file alone."""
    files, _ = split_words(words)
    values = _workflow_file(files[0]) if len(files) == 1 else None
    if values is not None:
        return _drawn_file(values, files[0])
    from kapelle.cli.source import read_recipe
    from kapelle.setup.team_builder import seats_of
    from kapelle.workflow import Drawable

    config = read_recipe(words, real=False).config
    workflow = config.workflow
    if not isinstance(workflow, Drawable):
        raise ConfigError(
            f"The workflow `{workflow.name}` has no drawing. Give its class a method `mermaid(names)`."
        )
    return workflow.mermaid([seat.name for seat in seats_of(config.team)])


def _workflow_file(name: str) -> Mapping[str, Any] | None:
    """Return a YAML file that is a workflow and no recipe; None for anything else."""
    from kapelle.workflows.dag_file import is_workflow_file

    if not Path(name).is_file():
        return None
    from kapelle.settings.overlays import parse_yaml

    try:
        values = parse_yaml(Path(name).read_text("utf-8"))
    except (OSError, ValueError):
        return None  # reading the recipe will report what is wrong with it
    return values if isinstance(values, dict) and is_workflow_file(values) else None


def _drawn_file(values: Mapping[str, Any], name: str) -> str:
    import pydantic

    from kapelle.settings.messages import explain
    from kapelle.workflows.dag import Dag
    from kapelle.workflows.dag_file import read_workflow

    read = read_workflow(values, name)
    names = [agent["name"] for agent in read.sections["team"]["agents"]]
    notes = [f"%% set aside: {key} ({why})" for key, why in read.set_aside.items()]
    try:
        workflow = Dag(**read.sections["workflow"])
    except pydantic.ValidationError as error:
        raise ConfigError(
            f"{name}: {explain(Dag, read.sections['workflow'], error, {}, 'workflow')}"
        ) from None
    return "\n".join([workflow.mermaid(names), *notes])
