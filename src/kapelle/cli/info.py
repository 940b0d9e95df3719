"""Implements `kapelle info`, which prints the names for recipes, the installed and missing packages, and facts about this machine.

The command does not import torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from typing import Any

from kapelle.algorithms import BUILTIN as ALGORITHMS
from kapelle.cli.quiet import hush
from kapelle.runtime.console import say
from kapelle.runtime.plugins import catalogue

CORE = ("torch", "transformers", "tokenizers", "safetensors", "pydantic", "numpy", "rich")


def run(arguments: argparse.Namespace) -> int:
    """Print all sections, as text or as JSON."""
    hush()
    found = gather()
    if arguments.json:
        say(json.dumps(found, indent=1))
        return 0
    for section, values in found.items():
        say(section)
        if section == "names":
            for name, known in values.items():
                say(f"  {name:14}{', '.join(known)}")
            continue
        width = max((len(name) for name in values), default=0)
        for name, value in values.items():
            say(f"  {name:{max(width, 12)}}  {value}")
    return 0


def gather() -> dict[str, dict[str, Any]]:
    """Return the facts of each section as plain JSON values."""
    return {
        "versions": {"kapelle": _version("kapelle"), "python": platform.python_version()}
        | {name: _version(name) for name in CORE},
        "machine": _machine(),
        "names": _names(),
        "missing": {name: f"needs {module}, which is not installed" for name, module in _missing().items()},
        "extras": {name: _extra(name, packages) for name, packages in extras().items()},
        "sandbox": _sandbox(),
        "folders": _folders(),
    }


NEEDS = {
    "gymnasium": "gymnasium",
    "inspect": "inspect_ai",
    "openenv": "websockets",
    "openspiel": "pyspiel",
    "pettingzoo": "pettingzoo",
    "reasoning_gym": "reasoning_gym",
    "remote": "websockets",
    "textarena": "textarena",
    "verifiers": "verifiers",
    "vllm": "vllm",
}
"""Mapping from an environment or engine to the module of another package that it needs."""


def _names() -> dict[str, list[str]]:
    """Return the names that recipes may use, by section. Names that other packages provide through entry points are included."""
    catalogues = {
        "algorithms": ALGORITHMS,
        "environments": catalogue("kapelle.environments"),
        "workflows": catalogue("kapelle.workflows"),
        "engines": catalogue("kapelle.engines.rollout"),
        "train_engines": catalogue("kapelle.engines.train"),
    }
    return {
        kind: sorted({*known, *(point.name for point in entry_points(group=f"kapelle.{kind}"))})
        for kind, known in catalogues.items()
    }


def _missing() -> dict[str, str]:
    return {name: module for name, module in NEEDS.items() if find_spec(module) is None}


def extras() -> dict[str, list[str]]:
    """Return the optional extras that users can install, with the packages of each extra."""
    found: dict[str, list[str]] = {}
    for requirement in _requirements():
        needed, _, marker = requirement.partition(";")
        if "extra ==" not in marker:
            continue
        extra = marker.rpartition("==")[2].strip().strip("\"'")
        package, *inner = re.split(r"[<>=!~\[\] ]", needed.strip())
        packages = [package]
        if package == "kapelle" and inner:  # `kapelle[peft,games]` means the packages of these extras
            packages = list(
                dict.fromkeys(name for each in inner[0].split(",") for name in found.get(each, ()))
            )
        found.setdefault(extra, []).extend(packages)
    return {name: packages for name, packages in found.items() if name not in {"test", "dev"}}


def _requirements() -> list[str]:
    try:
        return requires("kapelle") or []
    except PackageNotFoundError:  # run from its source, not installed
        return []


def _extra(extra: str, packages: list[str]) -> str:
    there = {name: _version(name) for name in packages}
    missing = [name for name, number in there.items() if number is None]
    if missing:
        return f"missing {', '.join(missing)}: pip install 'kapelle[{extra}]'"
    return ", ".join(f"{name} {number}" for name, number in there.items())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": int(threads) if threads.isdigit() else os.cpu_count(),
        "memory": _memory(),
        "gpus": _gpus(),
        **({"note": ON_WINDOWS} if os.name == "nt" else {}),
    }


ON_WINDOWS = "kapelle supports Linux and macOS. On Windows, sandboxes and worker processes are missing; to use them, install kapelle in WSL 2"


def _gpus() -> str:
    """Return the names of NVIDIA GPUs as reported by nvidia-smi, because importing torch takes seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none found (nvidia-smi is not installed)"
    words = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603 - fixed arguments
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
    return ", ".join(answer.stdout.split("\n")).strip(", ") or "none"


def _memory() -> str:
    if not hasattr(os, "sysconf"):  # Windows
        return "unknown"
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return f"{pages * page / 1e9:.0f} GB"


def _sandbox() -> dict[str, str]:
    """Return, for each layer of protection for model-written code, whether this machine provides it."""
    try:
        from kapelle.environments.sandbox import layers
    except ModuleNotFoundError as error:  # Windows
        return {"all layers": f"MISSING, model-written code cannot run: {error}"}
    absent = {True: "MISSING, model-written code cannot run", False: "no (optional)"}
    return {
        layer.name: f"{'yes' if layer.present else absent[layer.required]}: {layer.detail}"
        for layer in layers()
    }


def _folders() -> dict[str, Any]:
    from kapelle.runtime.files import cache_folder

    cache = cache_folder()
    used = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) if cache.is_dir() else 0
    return {
        "cache": f"{cache} ({used / 1e6:.1f} MB)",
        "data": os.environ.get("KAPELLE_DATA", "KAPELLE_DATA is not set"),
    }
