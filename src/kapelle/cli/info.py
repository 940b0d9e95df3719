"""`kapelle info`: what is installed and what this machine has, for bug reports."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from kapelle.cli.output import say
from kapelle.cli.quiet import hush

CORE = ("torch", "transformers", "tokenizers", "safetensors", "pydantic", "numpy", "rich")


def run(arguments: argparse.Namespace) -> int:
    """Print what there is."""
    hush()
    found = gather()
    if arguments.json:
        say(json.dumps(found, indent=1))
        return 0
    for section, values in found.items():
        say(section)
        width = max((len(name) for name in values), default=0)
        for name, value in values.items():
            say(f"  {name:{max(width, 12)}}  {value}")
    return 0


def gather() -> dict[str, dict[str, Any]]:
    """Return everything as plain JSON, by section."""
    return {
        "versions": {"kapelle": _version("kapelle"), "python": platform.python_version()}
        | {name: _version(name) for name in CORE},
        "machine": _machine(),
        "extras": {name: _extra(packages) for name, packages in extras().items()},
        "sandbox": _sandbox(),
        "folders": _folders(),
    }


def extras() -> dict[str, list[str]]:
    """Return the optional extras that users install, with the packages that each brings."""
    found: dict[str, list[str]] = {}
    for requirement in _requirements():
        needed, _, marker = requirement.partition(";")
        if "extra ==" in marker:
            extra = marker.rpartition("==")[2].strip().strip("\"'")
            found.setdefault(extra, []).append(needed.partition(">")[0].strip())
    return {name: packages for name, packages in found.items() if name not in {"test", "dev"}}


def _requirements() -> list[str]:
    try:
        return requires("kapelle") or []
    except PackageNotFoundError:  # run from its source, not installed
        return []


def _extra(packages: list[str]) -> str:
    there = {name: _version(name) for name in packages}
    missing = [name for name, number in there.items() if number is None]
    if missing:
        return f"not installed ({', '.join(missing)})"
    return ", ".join(f"{name} {number}" for name, number in there.items())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": _memory(),
        "gpus": ", ".join(devices) or "none",
    }


def _memory() -> str:
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return f"{pages * page / 1e9:.0f} GB"


def _sandbox() -> dict[str, str]:
    """Return each layer of protection for model-written code, and whether this machine provides it."""
    from kapelle.sandbox import layers

    return {
        layer.name: f"{_presence(required=layer.required, present=layer.present)}: {layer.detail}"
        for layer in layers()
    }


def _presence(*, required: bool, present: bool) -> str:
    if present:
        return "yes"
    return "MISSING, model-written code is refused" if required else "no (optional)"


def _folders() -> dict[str, Any]:
    from kapelle.training.warmup_settings import cache_folder

    cache = cache_folder()
    used = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) if cache.is_dir() else 0
    return {
        "cache": f"{cache} ({used / 1e6:.1f} MB)",
        "data": os.environ.get("KAPELLE_DATA", "KAPELLE_DATA is not set"),
    }
