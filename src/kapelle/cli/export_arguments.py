"""The arguments of `kapelle export`."""

from __future__ import annotations

import argparse

from kapelle.cli.run_arguments import ONE_OBJECT, add_flag

EXPORT_USAGE = "RUN [--out FOLDER] [--merge] [--format peft|hf|gguf-ready] [--agent NAME …] [--push OWNER/NAME [--public]] [--dry-run] [--json]"


def declare_export(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("words", nargs="*", metavar="RUN", help="a run directory, RUN@best or RUN@STEP")
    parser.add_argument("--out", metavar="FOLDER", help="a new folder (RUN-export)")
    add_flag(parser, "--merge", "whole models with the adapters in them; the same as --format hf")
    parser.add_argument(
        "--format",
        choices=("peft", "hf", "gguf-ready"),
        help="peft: adapters; hf: merged models; gguf-ready: merged models that llama.cpp's converter takes (peft)",
    )
    parser.add_argument(
        "--agent",
        action="append",
        metavar="NAME",
        help="the weights of this agent alone; may be given several times",
    )
    parser.add_argument("--push", metavar="OWNER/NAME", help="send the folder to this repository of a hub")
    add_flag(parser, "--public", "make a new repository public (private)")
    add_flag(parser, "--dry-run", "list what would be written and sent, and keep and send nothing")
    add_flag(parser, "--json", ONE_OBJECT)
