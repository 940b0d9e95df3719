"""The arguments of `kapelle launch`."""

from __future__ import annotations

import argparse

from kapelle.cli.run_arguments import add_flag, count


def declare_launch(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments but for the recipe's."""
    add_flag(parser, "--slurm", "write a batch script for SLURM")
    add_flag(parser, "--kubernetes", "write a manifest for Kubernetes")
    numbers = {
        "--nodes": ("N", 1, "machines (1)"),
        "--processes": ("P", 1, "processes on each machine (1)"),
        "--cpus": ("N", None, "CPU cores for each process (the scheduler's choice)"),
        "--memory": ("GB", None, "memory on each machine, in gigabytes (the scheduler's choice)"),
    }
    for name, (metavar, default, meaning) in numbers.items():
        parser.add_argument(name, type=count, default=default, metavar=metavar, help=meaning)
    parser.add_argument(
        "--gpus", type=_from_zero, metavar="N", help="GPUs on each machine (one for each process); 0 for none"
    )
    parser.add_argument("--time", metavar="TIME", help="when to end it: minutes, H:MM:SS or DAYS-HOURS")
    parser.add_argument("--image", metavar="IMAGE", help="the container image; Kubernetes needs one")
    parser.add_argument(
        "--volume", metavar="CLAIM", help="Kubernetes: the persistent volume claim that keeps /runs"
    )
    parser.add_argument("--name", metavar="NAME", help="what the job is called (the recipe's name)")
    parser.add_argument(
        "--run-dir", metavar="DIR", help="where the run is kept (runs/NAME, /runs/NAME in a pod)"
    )
    parser.add_argument("--output", metavar="FILE", help="write it there; must not exist yet")
    add_flag(parser, "--unchecked", "do not look at models and data, which only the cluster has")


def _from_zero(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number from 0")
    return int(text)
