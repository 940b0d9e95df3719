"""Implements `kapelle plan`, which estimates how much memory a run needs, before a model is loaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kapelle.cli.quiet import hush
from kapelle.runtime.console import say

if TYPE_CHECKING:
    from kapelle.cluster.planning import Plan, Process

DOES_NOT_FIT = 3
"""The exit code if the run does not fit into memory."""


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Returns 0 if the run fits into memory or no limit is given, and 3 if it does not fit."""
    hush()
    from kapelle.cli.source import find_stages, read_recipe
    from kapelle.cluster.planning import plan

    staged = find_stages(arguments.words, None, resume=False, real=arguments.real)
    notes: tuple[str, ...] = ()
    if staged is not None:
        notes = tuple(dict.fromkeys(note for stage in staged.stages for note in stage.recipe.notes))
        plans = {
            stage.name: plan(config, gpu_memory=arguments.gpu_memory, ranks=arguments.processes)
            for stage, config in staged.checked()
        }
    else:
        recipe = read_recipe(arguments.words, real=arguments.real)
        notes = recipe.notes
        plans = {"": plan(recipe.config, gpu_memory=arguments.gpu_memory, ranks=arguments.processes)}
    if arguments.json:
        rows = {name: found.row() for name, found in plans.items()}
        say(json.dumps({**rows.get("", {"stages": rows}), "notes": list(notes)}, indent=1))
    else:
        for note in notes:
            say(f"# {note}")
        for name, found in plans.items():
            for line in (*([f"stage {name}", ""] if name else []), *lines(found), ""):
                say(line)
    return 0 if all(found.fits for found in plans.values()) else DOES_NOT_FIT


def lines(found: Plan) -> Iterator[str]:
    """Yield a plan as lines of text."""
    from kapelle.cluster.planning import questions
    from kapelle.cluster.planning.weights_map import describe, size

    yield "weights: which agent uses which weights, and which are trained (nothing is loaded)"
    yield from (f"  {line}" for line in describe(found.weights))
    yield ""
    work = found.run.work
    yield (
        f"a step: {work.tasks} tasks x {work.group} episodes, {len(work.turns)} answers in an episode; the longest sequence has "
        f"{work.longest} tokens"
    )
    if not work.played:
        yield "  environments on servers were not opened; the plan assumes one answer of every agent to its first prompt"
    yield from questions.describe(found.run.asked, work.tasks, work.group)
    yield from _computing(found)
    for process in found.processes:
        yield ""
        each = f", each of {found.run.ranks} processes" if found.run.ranks > 1 else ""
        yield f"{process.name} on {process.device}{each}: {size(process.peak)}, in the {process.worst.name} phase"
        yield from _table(process)
    if found.memory is None:
        return
    yield ""
    yield from _verdict(found)


def _computing(found: Plan) -> Iterator[str]:
    run = found.run
    for base, place in run.places.items():
        cpu = run.cpu(base)
        products = "" if cpu else f", float32 products {'in TF32' if run.config.model.tf32 else 'exact'}"
        tokens = f"at most {run.pass_tokens(base)} tokens"
        if run.left_open and not cpu:
            fits = "what fits" if base in run.chosen_tokens else "with --gpu-memory, what fits"
            tokens += f" ({fits}, `training.microbatch_tokens: auto`)"
        yield f"{base} on {run.device(base)}: computes in {place.dtype}{products}; passes of {tokens}"


def _table(process: Process) -> Iterator[str]:
    from kapelle.cluster.planning.memory import KINDS
    from kapelle.cluster.planning.weights_map import size

    kinds = [kind for kind in KINDS if any(phase.kinds.get(kind) for phase in process.phases)]
    width = max(map(len, kinds))
    yield "  ".join(["", " " * width, *(f"{phase.name:>10}" for phase in process.phases)])
    for kind in (*kinds, "together"):
        cells = (phase.total if kind == "together" else phase.kinds.get(kind, 0) for phase in process.phases)
        yield "  ".join(["", f"{kind:{width}}", *(f"{size(cell) if cell else '':>10}" for cell in cells)])


def _verdict(found: Plan) -> Iterator[str]:
    from kapelle.cluster.planning.weights_map import size

    assert found.memory is not None
    for device, held in found.devices.items():
        verb = "fits" if held <= found.memory else "does not fit"
        yield f"{device}: {size(held)} of {size(found.memory)}: {verb}"
    if found.advice:
        yield "to make it fit, change in this order:"
        for each in found.advice:
            yield f"  {each.setting:42} {size(each.peak):>8}   {each.costs}"
        if found.advice[-1].peak > found.memory:
            yield "  it is still too large: use a smaller model, adapters in place of whole weights, or more memory"
