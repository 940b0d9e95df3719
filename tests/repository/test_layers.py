"""The layer contracts hold, and a planted upward import breaks them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIGHT = (
    "kapelle",
    "kapelle.types",
    "kapelle.team",
    "kapelle.workflow",
    "kapelle.workflows.debate",
    "kapelle.environment",
    "kapelle.environments.arithmetic",
    "kapelle.environments.matrix",
    "kapelle.cli.parser",
    "kapelle.runs.writer",
)

FOR_HELP = {
    "kapelle.cli",
    "kapelle.cli.arguments",
    "kapelle.cli.option_values",
    "kapelle.cli.parser",
    "kapelle.cli.output",
    "kapelle.cli.stopping",
    "kapelle.errors",
    "kapelle.runtime.early_stop",
    "kapelle.runtime.lazy_names",
    "kapelle.runtime",
    "kapelle.runtime.characters",
    "kapelle.runtime.console",
    "kapelle.runtime.machine",
    "kapelle.runtime.interrupts",
    "kapelle.runtime.watchdog",
}
"""What `kapelle --help` imports of ours."""


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run the contracts on the package `tree/kapelle`."""
    program = f"import sys; sys.path.insert(0, {str(tree)!r}); from importlinter.cli import lint_imports; "
    program += f"sys.exit(lint_imports(config_filename={str(ROOT / 'pyproject.toml')!r}, no_cache=True))"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tree, check=False
    )


def test_the_layers_hold() -> None:
    done = lint_imports(ROOT / "src")
    assert done.returncode == 0, done.stdout + done.stderr


PLANTED = {
    "Of the nouns only the team": [("types.py", "from kapelle.team import Team")],
    "What sets a run up": [("runs/reader.py", "from kapelle.setup import recipe")],
    "Signals know what models are": [("models/paths.py", "from kapelle.algorithms.signals import greedy")],
    "Training evaluates": [("rollout/play.py", "from kapelle.training import loop")],
    "A workflow knows": [
        ("environment.py", "from kapelle.workflow import Scene"),
        ("environment.py", "from kapelle.settings import sections"),
    ],
    "Train engines are reached by their protocol": [
        ("setup/model_loading.py", "from kapelle.engines.train.torch.engine import TorchTrainEngine"),
    ],
    "Data flows one way": [
        ("functional/masking.py", "from kapelle.training import loop"),
        ("workflows/chain.py", "from kapelle.environments.arithmetic import Arithmetic"),
        ("new_module_without_a_room.py", ""),
    ],
    "without torch": [("workflows/chain.py", "import torch"), ("team.py", "import transformers")],
}
"""Imports that break a contract, each as a line of a module."""


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("contract", "module", "line"), [(name, *each) for name, planted in PLANTED.items() for each in planted]
)
def test_a_planted_import_breaks_them(tmp_path: Path, contract: str, module: str, line: str) -> None:
    shutil.copytree(ROOT / "src/kapelle", tmp_path / "kapelle", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "kapelle" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert (
        any(contract in row and "BROKEN" in row for row in done.stdout.splitlines())
        or contract in done.stdout
    )


def modules_after(statement: str) -> set[str]:
    """Return the full names of the modules that a new interpreter holds after a statement."""
    program = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def tops(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_no_torch(module: str) -> None:
    assert tops(modules_after(f"import {module}")) & {"torch", "transformers", "peft", "datasets"} == set()


def test_help_loads_little() -> None:
    # What makes --help slow is what it imports. Each name here costs milliseconds at every call.
    statement = (
        "from kapelle.cli import main\nassert main(['--help']) == 0\nassert main(['train', '--help']) == 0"
    )
    added = modules_after(statement) - modules_after("pass")
    assert tops(added) - sys.stdlib_module_names == {"kapelle"}
    assert {name for name in added if name.startswith("kapelle")} == {"kapelle", *FOR_HELP}
    assert added & {"asyncio", "importlib.resources", "json", "logging", "statistics", "tempfile"} == set()
