"""What stands without torch imports none, and `kapelle --help` imports little."""

from __future__ import annotations

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
