"""Pools of processes that the tests of graders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kapelle.environments.grading.math.grade import math_processes
from kapelle.environments.grading.processes import KillableProcesses
from kapelle.environments.grading.text.match import regex_processes


@pytest.fixture(scope="session")
def math_pool() -> Iterator[KillableProcesses]:
    """math-verify, started once for all tests."""
    with math_processes(size=1) as pool:
        pool.warm()
        yield pool


@pytest.fixture(scope="session")
def regex_pool() -> Iterator[KillableProcesses]:
    """Regular expressions, started once for all tests."""
    with regex_processes(size=1) as pool:
        pool.warm()
        yield pool
