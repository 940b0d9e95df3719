"""Implements `kapelle validate`, which makes all checks that work without model weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kapelle.cli.parser import split_words
from kapelle.cli.quiet import hush
from kapelle.errors import Absent, ConfigError
from kapelle.runtime.console import say

if TYPE_CHECKING:
    from kapelle.environment import Environment
    from kapelle.settings.schema import RunConfig
    from kapelle.setup.preparation import PreparedRun

S = TypeVar("S")


def run(arguments: argparse.Namespace) -> int:
    """Print every check that passes. Raises the error of the first check that fails."""
    hush()
    if arguments.graph:
        say(draw(arguments.words))
        return 0
    if arguments.judge is not None:
        from kapelle.cli.agreement import print_report, report
        from kapelle.cli.source import read_recipe

        config = read_recipe(arguments.words, real=arguments.real).config
        print_report(report(config, Path(arguments.judge)), as_json=arguments.json)
        return 0
    if arguments.json:
        raise ConfigError(
            "--json needs --judge, which compares judges with graded answers. Add --judge GRADED.jsonl."
        )
    environment = _environment(arguments)
    if environment is not None:
        environment = _looked_at(environment, start=arguments.start)
        import asyncio

        from kapelle.rollout.conformance import conform
        from kapelle.runtime.event_loop import run_async

        team = None if arguments.agents is None else [name.strip() for name in arguments.agents.split(",")]
        try:
            findings = run_async(lambda: conform(environment, team))
        except Absent:
            raise  # other agent names would not help
        except ConfigError as error:
            reason = str(error) if str(error).endswith((".", "!", "?")) else f"{error}."
            hint = "" if team else " If it needs certain agents, list them: --agents A,B."
            raise ConfigError(f"{reason}{hint}") from error
        except (asyncio.CancelledError, RuntimeError) as error:
            raise ConfigError(
                f"The code of `{environment.name}` cancelled the checks or stopped their event loop ({type(error).__name__}: "
                f"{error}). Change it to end only tasks that it has started itself."
            ) from error
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
    if arguments.agents is not None:
        raise ConfigError(
            "--agents applies only to an environment that is checked alone. Remove it; a recipe lists its agents in `team.agents`."
        )
    from kapelle.cli.source import find_stages, read_recipe
    from kapelle.setup.preparation import DOUBT, prepare
    from kapelle.training.stages import check_weights

    unless = ""

    def passed(name: str, detail: str) -> None:
        say(f"-   {detail}" if name == DOUBT else f"ok  {name:10} {detail}")

    def check(config: RunConfig, *, staged: bool = False) -> None:
        nonlocal unless
        prepared = prepare(_looked_at(config, start=arguments.start), passed=passed)
        starts = check_weights(prepared, staged=staged)
        if starts:
            passed("start", "; ".join(f"{policy} from {folder}" for policy, folder in starts.items()))
        for name, detail in _program(prepared):
            passed(name, detail)
            unless = (
                ", unless its program also fails with the answers of a model" if name == DOUBT else unless
            )

    staged = find_stages(arguments.words, None, resume=False, real=arguments.real)
    if staged is not None:
        for stage, config in staged.checked():
            passed("stage", f"{stage.number} of {len(staged.stages)}: {stage.name}")
            _print_notes(stage.recipe.notes)
            check(config, staged=True)
        say(f"All {len(staged.stages)} stages of {staged.recipe} are ready to train{unless}.")
        return 0
    recipe = read_recipe(arguments.words, real=arguments.real)
    set_here = sum(source != "default" for source in recipe.origin.values())
    passed("settings", f"{len(recipe.origin)} values, {set_here} of them set by the recipe or the command")
    _print_notes(recipe.notes)
    check(recipe.config)
    say(f"{recipe.config.name} is ready to train{unless}.")
    return 0


MOCK = "1"
"""The answer that every agent gives to an external program while the program is checked."""


def _program(prepared: PreparedRun) -> Iterator[tuple[str, str]]:
    """Run the external program of an environment for one episode, and yield the result of the check.

    Raises ConfigError if the program fails before it calls an agent. If the program fails after it has called an agent,
    no error is raised, because the mock answers may be the cause.
    """
    from kapelle.engines.rollout.scripted import ScriptedEngine
    from kapelle.environments.adapters.verifiers_v1 import VerifiersV1
    from kapelle.environments.external import External
    from kapelle.rollout.episodes import rollout
    from kapelle.rollout.setup import make_rollout_setup
    from kapelle.runtime.event_loop import run_async
    from kapelle.setup.preparation import DOUBT

    own = prepared.config.environment
    environment: External | VerifiersV1
    if isinstance(own, External) and own.starts:
        setting, program = ("entry", own.entry) if own.entry else ("command", " ".join(own.command))
        environment = own.model_copy(update={"port": 0})  # a run may be using the port
    elif isinstance(own, VerifiersV1):
        setting, program, environment = "id", own.id, own
    else:
        return
    config, team = prepared.config.model_copy(update={"environment": environment}), prepared.team
    setup = make_rollout_setup(config, team, ScriptedEngine(dict.fromkeys(team.policies, lambda _: MOCK)))
    with environment.serve(setup, lambda *_: None):
        (group,) = run_async(lambda: rollout(setup, [environment.task("train", 0)], 1, config.seed))
    (episode,) = group.episodes
    calls = f"it called agents {len(episode.turns)} times, and every answer was '{MOCK}'"
    if episode.error is None:
        rewards = ", ".join(f"{agent} {reward:g}" for agent, reward in episode.rewards.items())
        yield "program", f"`{program}` ran once and posted the reward {rewards}; {calls}"
    elif episode.turns:
        yield DOUBT, f"The program of `environment.{setting}` ran once and failed; {calls}: {episode.error}"
    else:
        raise ConfigError(
            f"The program of `environment.{setting}` ran once and failed before it called an agent: {episode.error.rstrip('.')}. "
            f"Fix it, or the {setting}."
        )


def _looked_at(settings: S, *, start: bool) -> S:
    """Return the settings to check. Unless `start` is true, the external programs in the settings are excluded."""
    if start:
        return settings
    from kapelle.setup.preparation import without_programs

    checked, excluded = without_programs(settings)
    for program in excluded:
        say(
            f"-   the MCP server `{program}` is not checked; `--start` starts or calls it and checks its tools"
        )
    return checked


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        say(f"-   {note}")


def _environment(arguments: argparse.Namespace) -> Environment | None:
    """Return the environment that is checked alone, or None for a recipe."""
    from kapelle.rollout.evaluation.playing import model_config
    from kapelle.setup.recipe import builtin_recipes, names_environment

    files, settings = split_words(arguments.words)
    name = arguments.environment
    if name is None:
        if len(files) != 1 or files[0] in builtin_recipes() or Path(files[0]).is_file():
            return None
        if not names_environment(files[0]):
            return None
        name = files[0]
    return model_config("embedded", name, settings).environment


def draw(words: list[str]) -> str:
    """Return the Mermaid flowchart of a recipe's workflow, or of the workflow in a file."""
    files, _ = split_words(words)
    if len(files) == 1 and Path(files[0]).is_file():
        from kapelle.settings.overlays import parse_yaml
        from kapelle.workflows.dag_file import is_workflow_file

        values = None
        with suppress(OSError, ValueError):  # reading the recipe reports it
            values = parse_yaml(Path(files[0]).read_text("utf-8"))
        if isinstance(values, dict) and is_workflow_file(values):
            return _drawn_file(values, files[0])
    from kapelle.cli.source import read_recipe
    from kapelle.setup.team_builder import agent_configs
    from kapelle.workflow import Drawable

    config = read_recipe(words, real=False).config
    workflow = config.workflow
    if not isinstance(workflow, Drawable):
        raise ConfigError(
            f"The workflow `{workflow.name}` cannot be drawn. Give its class a method `mermaid(names)`."
        )
    return workflow.mermaid([role.name for role in agent_configs(config.team)])


def _drawn_file(values: Mapping[str, Any], name: str) -> str:
    from kapelle.settings.messages import made
    from kapelle.workflows.dag import Dag
    from kapelle.workflows.dag_file import read_workflow

    read = read_workflow(values, name)
    names = [agent["name"] for agent in read.sections["team"]["agents"]]
    notes = [f"%% set aside: {key} ({why})" for key, why in read.set_aside.items()]
    workflow = made(Dag, read.sections["workflow"], "workflow")
    return "\n".join([workflow.mermaid(names), *notes])
