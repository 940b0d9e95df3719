"""`kapelle validate` runs the program of a recipe once."""

from __future__ import annotations

from pathlib import Path

import yaml
from tests.cli.conftest import Kapelle


def test_the_program_of_an_entry_is_imported_and_run(kapelle: Kapelle) -> None:
    recipe = {
        "team": {"agents": [{"name": "planner"}]},
        "environment": {"name": "external", "port": 0, "entry": "program.py:episode"},
        "workflow": {"name": "external"},
        "algorithm": {"name": "grpo"},
    }
    Path("mine.yaml").write_text(yaml.safe_dump(recipe))
    Path("program.py").write_text("import absent_package\n")
    missing = kapelle("validate", "mine.yaml")
    assert missing.code == 2
    assert "No module named 'absent_package'" in missing.err
    Path("program.py").write_text("def episode(task):\n    raise ValueError('no ticket')\n")
    failed = kapelle("validate", "mine.yaml")
    assert failed.code == 2
    assert "ran once and failed before it called an agent" in failed.err
    assert "ValueError: no ticket" in failed.err
    call = "client.chat.completions.create(model='team/planner', messages=[{'role': 'user', 'content': 'x'}])"
    lines = [
        "import openai",
        "client = openai.OpenAI()",
        "def episode(task):",
        f"    {call}",
        "    return 1 / 0",
    ]
    Path("program.py").write_text("\n".join(lines) + "\n")
    doubtful = kapelle("validate", "mine.yaml")
    assert doubtful.code == 0
    *_, doubt, ready = doubtful.out.splitlines()
    assert "posted no reward: ZeroDivisionError: division by zero." in doubt
    assert ready.endswith(" is ready to train, unless its program also fails with the answers of a model.")
