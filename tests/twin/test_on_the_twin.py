"""What a CUDA device is asked, asked of its twin in a process of its own; see `tests/twin`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.twin import COMPILER

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        COMPILER is None, reason="g++ is not installed: nothing proves the code for GPUs here"
    ),
]


@pytest.mark.parametrize(
    "asked",
    [
        "tests/engines/test_on_a_gpu.py",
        pytest.param("tests/twin/budgets.py", marks=pytest.mark.long),
        pytest.param("tests/twin/runs_on_both.py", marks=pytest.mark.long),
        pytest.param("tests/twin/processes.py", marks=pytest.mark.ranks),
        pytest.param("tests/twin/families.py", marks=pytest.mark.models),
        pytest.param(
            "-m long tests/engines/test_on_a_gpu.py tests/twin/runs_on_both.py", marks=pytest.mark.long
        ),
    ],
)
def test_the_twin_agrees(asked: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.twin.plugin", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, *asked.split()],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert "skipped" not in ended.stdout
