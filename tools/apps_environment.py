"""Fill an environment with the real packages whose worlds and agents kapelle plays with: `python tools/apps_environment.py .venv-apps`.

They disagree with kapelle's other extras about the versions of their own requirements (verifiers about mcp, inspect_ai about
fsspec), so they are kept apart from the environment of `make test`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXTRAS = ("verifiers", "openenv", "inspect")
"""Extras of kapelle that are installed: packages whose worlds are played, or what their servers are asked with."""
TESTS = ("openenv-core==0.3.0", "pytest", "pytest-asyncio", "pytest-xdist", "hypothesis")
DECIDING = ("torch", "transformers", "pydantic", "datasets", "grpcio", "math-verify", "peft")
"""Of the constraints, what decides how kapelle behaves; the rest is left to what these packages ask for."""


def pinned(constraints: str) -> list[str]:
    """Return the lines of the constraints that are kept here."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==.*$", constraints, re.MULTILINE)
    lines = re.findall(r"^[A-Za-z0-9_.-]+==.*$", constraints, re.MULTILINE)
    return [line for name, line in zip(found, lines, strict=True) if name in DECIDING]


def main(environment: str, *options: str) -> None:
    """Install torch, then the rest beside it; `options` go to pip where torch is installed."""
    python = str(Path(environment) / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    kept = pinned(Path("constraints.txt").read_text("utf-8"))
    (torch,) = (line for line in kept if line.startswith("torch=="))
    subprocess.run([*pip, *options, torch], check=True)
    subprocess.run([*pip, "-e", f".[serve,data,{','.join(EXTRAS)}]", *TESTS, *kept], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
