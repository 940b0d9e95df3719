"""Implements `kapelle train`, which trains a team as described by a recipe, or resumes a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from kapelle.cli.arguments import start_words
from kapelle.cli.parser import split_words
from kapelle.cli.quiet import hush
from kapelle.errors import ConfigError
from kapelle.runs.named_checkpoint import resumed_run
from kapelle.runtime.console import printable, say

if TYPE_CHECKING:
    from kapelle.cli.source import Source


def run(arguments: argparse.Namespace) -> int:
    """Train or resume a run or, with `--dry-run`, print what would be trained."""
    hush()
    arguments.words = [*arguments.words, *start_words(arguments.start_from)]
    from kapelle.cli.running import announce, train
    from kapelle.cli.source import find_stages, read_source, stage_sources

    if arguments.resume:
        # Replace `RUN@latest` and similar names by the run that they refer to.
        files, settings = split_words(arguments.words)
        if arguments.run_dir is not None:
            arguments.run_dir = str(resumed_run(arguments.run_dir))
        elif files:
            arguments.words = [str(resumed_run(files[0])), *files[1:], *settings]
    if arguments.processes is not None and arguments.launch is None:
        raise ConfigError(
            "`--processes` needs `--launch`, which starts the processes. Add `--launch torchrun` or `--launch ray`."
        )
    if arguments.launch is not None and not arguments.dry_run:
        from kapelle.cli.train_launch import launch_ray, launch_torchrun, words_of

        if arguments.launch == "ray":
            return launch_ray(arguments)
        words = words_of(arguments) + (["--no-rich"] if arguments.no_rich else [])
        return launch_torchrun(words, arguments.processes)
    how = {"resume": arguments.resume, "real": arguments.real}
    staged = find_stages(arguments.words, arguments.run_dir, **how)
    if staged is not None and arguments.dry_run:
        return max(
            _dry_run(source, as_json=arguments.json, staged=True)
            for source in staged.dry(as_json=arguments.json)
        )
    if staged is not None:
        announce("kapelle train", as_json=arguments.json)
        for title, source in stage_sources(staged, resume=arguments.resume):
            code = train(source, title, as_json=arguments.json, plain=arguments.no_rich)
            if code:
                return code
        return 0
    source = read_source(arguments.words, arguments.run_dir, **how)
    if arguments.dry_run:
        return _dry_run(source, as_json=arguments.json)

    announce("kapelle train", as_json=arguments.json)
    with source.read.explained():
        return train(source, "kapelle train", as_json=arguments.json, plain=arguments.no_rich)


def _dry_run(source: Source, *, as_json: bool, staged: bool = False) -> int:
    from kapelle.cluster.planning import questions
    from kapelle.cluster.planning.planned_run import in_four_bits
    from kapelle.cluster.planning.weights_map import describe, weights_map
    from kapelle.models.renderer import light_renderer
    from kapelle.setup.preparation import prepare, without_programs
    from kapelle.training.stages import check_weights

    config = source.config
    absent: list[str] = []
    shown, programs = without_programs(config)
    with source.read.explained():
        prepared = prepare(shown, renderer_of=light_renderer, absent=absent)
    found = None
    if prepared.outlines:
        check_weights(prepared, source.start_from, source.run_dir, staged=staged)
        found = weights_map(prepared.team, prepared.outlines, in_four_bits(config, prepared.team))
    absent += [f"The MCP server `{program}` is started only by a run." for program in programs]
    values = config.model_dump(mode="json")
    changed = {key: origin for key, origin in source.origin.items() if origin != "default"}
    notes = [*source.notes, *prepared.notes, *prepared.doubts]
    calls = questions.requested_by(prepared.config.environment)
    step = prepared.config.training.tasks_per_step, questions.episodes_of(prepared.algorithm)
    if as_json:
        weights = None if found is None else found.row()
        row = {
            "weights": weights,
            "judges": questions.rows(calls, *step),
            "config": values,
            "origin": changed,
            "notes": notes,
            "not_looked_at": absent,
        }
        say(json.dumps(row, indent=1))
        return 0
    for note in notes:
        say(f"# {note}")
    if absent:
        say("# not checked, because this machine lacks it; run `kapelle validate` on the machine of the run")
        for line in absent:
            say(f"# - {printable(' '.join(line.split()))}")
    if found is not None:
        say("# weights: which agent uses which weights, and which are trained (nothing is loaded)")
        for line in describe(found):
            say(f"# {line}".rstrip())
    for line in questions.describe(calls, *step):
        say(f"# {printable(line)}")
    say()
    say("# settings; values that were set show where they come from")
    say(annotated_yaml(values, changed))
    return 0


# -------- Resolved settings as YAML, with the origin of each set value as a comment


def annotated_yaml(values: Mapping[str, Any], origin: Mapping[str, str]) -> str:
    """Return `values` as YAML in which a comment states the origin of each leaf, except for leaves with the origin `default`.

    The keys of `origin` are dotted paths, as in `Recipe.origin`. Parsing the returned YAML results in `values`.
    """
    return "\n".join(_mapping(values, origin, "", 0))


def _mapping(values: Mapping[str, Any], origin: Mapping[str, str], at: str, depth: int) -> list[str]:
    lines: list[str] = []
    for key, value in values.items():
        path = f"{at}.{key}" if at else str(key)
        head = f"{'  ' * depth}{_scalar(str(key))}:"
        if isinstance(value, Mapping) and value:
            lines += [head, *_mapping(value, origin, path, depth + 1)]
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            lines.append(head)
            for index, item in enumerate(value):
                inner = _mapping(item, origin, f"{path}.{index}", depth + 2)
                first = inner[0].lstrip()
                lines += [f"{'  ' * (depth + 1)}- {first}", *inner[1:]]
        else:
            source = origin.get(path, "default")
            comment = "" if source == "default" else f"   # {printable(' '.join(source.split()))}"
            lines.append(f"{head} {_scalar(value)}{comment}")
    return lines


def _scalar(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    # Double quotes keep text on one line that YAML would otherwise spread over several.
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    text = yaml.safe_dump(
        [value], default_flow_style=True, default_style=style, allow_unicode=True, width=10**9
    )
    return text.strip().removeprefix("[").removesuffix("]")
