"""Fill environments with the real packages whose episode states and agents kapelle plays with: `python tools/apps_environment.py .venv-apps`.

They disagree with kapelle's other extras about the versions of their own requirements (verifiers about mcp, inspect_ai about
fsspec), so they are kept apart from the environment of `make test`. verifiers disagrees with openenv-core too (about mcp, by way of
fastmcp): it has an environment of its own inside the named one, `.venv-apps/verifiers`. verifiers 0.4 is in a third one, `.venv-apps/verifiers-v1`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

EXTRAS = ("openenv", "inspect", "constrain")
"""Extras of kapelle that are installed: packages whose episode states are played, what their servers are asked with, and what answers in the
forms that programs ask for (`tool_choice: required`)."""
ALONE = "verifiers"
"""The extra that has an environment of its own."""
WITHOUT_KAPELLE = ("verifiers-v1", "verifiers==0.4.0")
"""The name of an environment without kapelle, and its package. kapelle starts that package's environments as outside programs."""
SERVER = "openenv-core==0.3.0"
TESTS = ("pytest", "pytest-asyncio", "pytest-xdist", "hypothesis")
DECIDING = ("torch", "transformers", "pydantic", "datasets", "grpcio", "llguidance", "math-verify", "peft")
"""Of the constraints, what decides how kapelle behaves; the rest is left to what these packages ask for."""


def pinned(constraints: str) -> list[str]:
    """Return the lines of the constraints that are kept here."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==.*$", constraints, re.MULTILINE)
    lines = re.findall(r"^[A-Za-z0-9_.-]+==.*$", constraints, re.MULTILINE)
    return [line for name, line in zip(found, lines, strict=True) if name in DECIDING]


def main(environment: str, *options: str) -> None:
    """Fill the environment, then make and fill the one inside it; `options` go to pip where torch is installed."""
    fill(environment, (*EXTRAS,), (SERVER,), options)
    subprocess.run([sys.executable, "-m", "venv", str(Path(environment) / ALONE)], check=True)
    fill(str(Path(environment) / ALONE), (ALONE,), (), options)
    name, package = WITHOUT_KAPELLE
    subprocess.run([sys.executable, "-m", "venv", str(Path(environment) / name)], check=True)
    python = str(Path(environment) / name / "bin" / "python")
    subprocess.run([python, "-m", "pip", "--quiet", "install", package], check=True)


def fill(environment: str, extras: Sequence[str], packages: Sequence[str], options: Sequence[str]) -> None:
    """Install torch, then kapelle with these extras and these packages beside it."""
    python = str(Path(environment) / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    kept = pinned(Path("constraints.txt").read_text("utf-8"))
    (torch,) = (line for line in kept if line.startswith("torch=="))
    subprocess.run([*pip, *options, torch], check=True)
    subprocess.run([*pip, "-e", f".[serve,data,{','.join(extras)}]", *packages, *TESTS, *kept], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
