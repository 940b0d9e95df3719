"""`kapelle train … --launch ray`: a run whose ranks and rollout workers are actors on a cluster (docs/ray.md)."""

from __future__ import annotations

import argparse

from kapelle.cli.source import find_stages, read_source
from kapelle.cli.torchrun import refuse_second_launcher, words_of
from kapelle.cluster.guard import check_installed
from kapelle.cluster.guard import launch as launch_on_ray
from kapelle.cluster.placed import check_workers
from kapelle.setup.preparation import prepare


def launch(arguments: argparse.Namespace) -> int:
    """Check the recipe here, then run the command without `--launch` on a cluster, and return its exit code."""
    refuse_second_launcher()
    check_installed()
    how = {"resume": arguments.resume, "real": arguments.real}
    staged = find_stages(arguments.words, arguments.run_dir, **how)
    if staged is None:
        configs = [read_source(arguments.words, arguments.run_dir, **how).config]
    else:
        configs = [config for _, config in staged.checked()]
    for config in configs:
        check_workers(config)
        prepare(config)
    processes, worlds = arguments.processes or 1, configs[0].episode.environment_workers
    return launch_on_ray(configs[0].ray, processes, worlds, [*words_of(arguments), "--no-rich"])
