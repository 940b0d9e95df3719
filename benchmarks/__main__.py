"""Run a benchmark: `python -m benchmarks list`, `python -m benchmarks run NAME [--json]`.

Each benchmark is one module with one function `run() -> dict`. The modules stand in a literal table and are
imported when they run, because their peers need not be installed together.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

BENCHMARKS: Mapping[str, str] = {
    "grpo_step": "one GRPO step of one agent, against TRL's GRPOTrainer",
    "two_agent_step": "one step of two agents, against CoMLRL's MAGRPO",
    "lora_bank": "N adapters in one pass, against PEFT's set_adapter one after another",
    "rollout": "sampling, against transformers' generate",
    "rollout_turns": "four turns of a conversation, even and uneven, against generate, its cache carried over too",
    "cohorts": "decode steps of rows that joined at several times, against those of rows that joined at once",
    "update_skewed": "one update on skewed lengths, against padded microbatches",
    "large_head": "log-probs and entropies over 152,000 words, against all logits at once",
    "real_shape": "one step of two agents in the shape of a 0.6B model, against TRL with one (20 minutes; 13 GB)",
    "real_weights": "one step of one agent on Gemma 3 270M, against TRL (15 minutes; 12 GB; `make real` fetches the model)",
    "plan": "memory that `kapelle plan` says against what a step takes, for three sizes on the CPU (minutes; 5 GB)",
    "roofline": "share of the machine's own float32 GEMM peak that a whole step reaches",
    "parity": "largest difference of sampler and trainer log-probs",
    "constrained": "completions of a given form, with small and large vocabularies, against generate with llguidance and xgrammar",
    "calls": "calls of Python and C of an episode and of a training step: exact where times are not",
    "scaling": "cost per episode and memory from 16 to 2,048 episodes in flight",
    "scale_bounds": "what bounds a step of a team on 1 to 512 GPUs, by formulae (docs/scaling.md)",
    "scale_simulator": "the same as events, with stragglers and slow worlds, and which setting to turn (minutes)",
    "scale_measured": "whether the simulator foretells runs of 1, 2 and 4 processes here (ten minutes)",
    "asynchronous": "what `training.asynchronous` saves in two ranks where some episodes take long (minutes; four idle cores)",
    "sandbox": "starting, running and ending model-written code",
    "graders": "grading answers",
    "learning": "what algorithms learn on games with known optima, over five seeds (an hour; `python -m benchmarks.learning`)",
    "environment_server": "worlds on an environment server, its callers that vanish, a signal, hostile bodies (five minutes)",
    "environment_workers": "10,000 episodes in flight over 8 worker processes, against worlds in this one (ten minutes)",
    "viewer": "a run of 10,000 steps and 1,000,000 episodes in the viewer: to open it, to page, to index (10 GB of disk, an hour)",
    "saving": "how long a step waits for its checkpoint, written at once or in the background",
    "serving": "tokens a second through the policy server, against its engine alone; clients that vanish; a drain",
    "reward_server": "requests a second and their delay through the reward server, against its scorer alone",
    "tinker_clients": "eight clients of the Tinker server at once, against the same work of one after another",
    "gpu": "log-probs, decode steps, conversations, updates and whole steps on a CUDA device (a quarter of an hour)",
    "gpu_counts": "launches, waits, copies and bytes of the same, counted on a GPU's twin, and estimates (ten minutes; g++)",
    "load": "2,048 episodes in flight of which some fail, against the same without faults (half an hour)",
    "growth": "memory, descriptors, threads and objects of runs over thousands of tiny steps (an hour)",
    "debate_throughput": "debates of scripted agents: turns a second, and memory over 20,000 episodes",
}
"""Name (of a module beside this one) → what it measures."""


def main(arguments: list[str]) -> int:
    """Run what the command line asks for and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name every benchmark")
    run = commands.add_parser("run", help="run one benchmark")
    run.add_argument("name", choices=sorted(BENCHMARKS))
    run.add_argument("--json", action="store_true", help="print JSON alone")
    asked = parser.parse_args(arguments)
    if asked.command == "list":
        for name, about in BENCHMARKS.items():
            print(f"{name:16} {about}")
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, below
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with contextlib.redirect_stdout(sys.stderr):  # peers print
        result: dict[str, Any] = importlib.import_module(f"benchmarks.{asked.name}").run()
    if asked.json:
        print(json.dumps(result, indent=2))
    else:
        _print(result)
    return 0


def _print(value: Any, indent: int = 0) -> None:
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            print(f"{' ' * indent}{key}")
            _print(entry, indent + 2)
        else:
            shown = f"{entry:.4g}" if isinstance(entry, float) else entry
            print(f"{' ' * indent}{key:{max(1, 28 - indent)}} {shown}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
