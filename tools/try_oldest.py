"""Run tests with the oldest versions that pyproject.toml allows: `python tools/try_oldest.py [TESTS …]`.

Every lower bound `name>=X` of the dependencies becomes `name==X` in an environment of its own, which is kept under
build/ for the next time. Extras are not there, so tests that need one say so. Without TESTS, what is quick of the
rooms that stand on torch and transformers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
ENVIRONMENT = HERE / "build" / "oldest"
TOOLS = ("accelerate", "hypothesis", "peft", "pytest", "pytest-asyncio")
TESTS = ("tests/models", "tests/engines", "tests/algorithms", "tests/settings", "tests/setup", "tests/runs")


def oldest() -> list[str]:
    """Return the dependencies at their lower bounds; ValueError for one that has none."""
    named = tomllib.loads((HERE / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    if loose := [each for each in named if ">=" not in each]:
        raise ValueError(f"{', '.join(loose)} in pyproject.toml: name the oldest version, as in 'name>=1.2'")
    return [each.replace(">=", "==") for each in named]


def main(*tests: str) -> int:
    """Make the environment, say what is in it, run the tests; return their exit status."""
    python = str(ENVIRONMENT / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", *oldest(), *TOOLS], check=True)
    print(*oldest(), sep="\n", flush=True)
    marks = "not slow and not sandbox_full and not vllm and not ranks and not models"
    asked = [python, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", "-m", marks, *(tests or TESTS)]
    done = subprocess.run(asked, cwd=HERE, env={**os.environ, "PYTHONPATH": str(HERE / "src")}, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
