"""Build the wheel and use it as a stranger does, in an environment of its own: `python tools/try_wheel.py`.

Nothing of the checkout is on the path there: what the wheel lacks (a recipe, a page of the viewer, a dependency) is
missing here too. Options go to pip where torch is installed, for example `--index-url URL`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
PACKAGE = "src/kapelle/"
COMMANDS = (
    ("kapelle", "--version"),
    ("python", "-m", "kapelle", "info"),
    ("kapelle", "recipes", "ls"),
    ("kapelle", "validate", "demo"),
    (
        "kapelle",
        "train",
        "demo",
        "training.steps=2",
        "warmup.steps=2",
        "evaluation.problems=4",
        "--run-dir",
        "run",
    ),
    ("kapelle", "runs", "show", "run"),
    ("kapelle", "view", "run", "--export", "page.html"),
)


def built(folder: Path) -> Path:
    """Return the wheel, made in `folder` from what is committed or staged."""
    source = folder / "source"
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={source}/"], cwd=HERE, check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("kapelle-*.whl")
    return wheel


def left_out(wheel: Path) -> list[str]:
    """Return the package's tracked files that the wheel lacks."""
    listed = subprocess.run(
        ["git", "ls-files", PACKAGE], cwd=HERE, check=True, capture_output=True, text=True
    )
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    return [name for name in listed.stdout.splitlines() if name.removeprefix("src/") not in held]


def main(*options: str) -> int:
    """Build, compare with the checkout, install, and run each command; return the exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = built(folder)
        if missing := left_out(wheel):
            print(
                f"the wheel lacks {', '.join(missing)}: see package-data in pyproject.toml", file=sys.stderr
            )
            return 1
        programs = folder / "environment" / "bin"
        subprocess.run([sys.executable, "-m", "venv", str(programs.parent)], check=True)
        pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        constraints = HERE / "constraints.txt"
        (torch,) = re.findall(r"^torch==.*$", constraints.read_text("utf-8"), re.MULTILINE)
        subprocess.run([*pip, *options, torch], check=True)
        subprocess.run([*pip, "-c", str(constraints), f"{wheel}[viewer]"], check=True)
        for program, *arguments in COMMANDS:
            done = subprocess.run(
                [str(programs / program), *arguments], cwd=folder, capture_output=True, text=True, check=False
            )
            print(f"{'ok    ' if done.returncode == 0 else 'FAILED'} {program} {' '.join(arguments)}")
            if done.returncode:
                print(done.stdout + done.stderr, file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
