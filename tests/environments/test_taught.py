"""Demonstrations by a user's function, in third-party environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from kapelle.environment import Scripted, offers
from kapelle.environments.adapters.openenv import OpenEnv
from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.taught import WithTeacher
from kapelle.errors import ConfigError, EpisodeError
from kapelle.features.warmup.key import warmup_key
from kapelle.rollout.conformance import gold_is_rewarded
from kapelle.setup.recipe import resolve
from kapelle.types import Message, Task

URL = "http://127.0.0.1:9"
TEACHER = """
def say(agent, task, messages, seed):
    return f"{agent} heard {messages[-1].content} ({seed})"

def dumb(agent, task, messages, seed):
    return None
"""


class TaughtSums(WithTeacher, Arithmetic):
    """Sums with a teacher."""


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    file = tmp_path / "teacher.py"
    file.write_text(TEACHER)
    return file


def test_a_teacher_answers_for_every_agent(teacher: Path) -> None:
    environment = OpenEnv(url=URL, teacher=f"{teacher}:say")
    assert offers(environment, Scripted)
    text = environment.script("clerk", Task("t", ""), [Message("user", "tea")], 7)
    assert text == "clerk heard tea (7)"
    with pytest.raises(EpisodeError, match="NoneType"):
        OpenEnv(url=URL, teacher=f"{teacher}:dumb").script("clerk", Task("t", ""), [], 0)


def test_an_unknown_teacher_is_an_error(teacher: Path) -> None:
    with pytest.raises(ConfigError, match="nobody"):
        OpenEnv(url=URL, teacher=f"{teacher}:nobody").check(["a"])


def test_a_warmed_up_model_depends_on_the_teachers_code(teacher: Path) -> None:
    recipe = {
        "team": {"agents": 2},
        "environment": {"name": "openenv", "url": URL, "teacher": f"{teacher}:say"},
        "workflow": {"name": "chain"},
        "algorithm": {"name": "grpo"},
        "warmup": {"steps": 1},
    }
    before = warmup_key(resolve(recipe))
    assert warmup_key(resolve(recipe)) == before
    teacher.write_text(TEACHER.replace("heard", "read"))
    assert warmup_key(resolve(recipe)) != before


def test_the_hash_of_a_teacher_in_a_module_is_that_of_its_file() -> None:
    here = OpenEnv(url=URL, teacher=f"{__file__}:TaughtSums").teacher_hash()
    assert here is not None
    assert OpenEnv(url=URL, teacher="json:dumps").teacher_hash() not in (None, here)
    assert OpenEnv(url=URL, teacher="no_such_module:say").teacher_hash() is None
    assert OpenEnv(url=URL).teacher_hash() is None


async def test_a_teacher_is_not_checked_as_gold(teacher: Path) -> None:
    environment = TaughtSums(teacher=f"{teacher}:say")
    findings = await gold_is_rewarded(environment, {"train": [environment.task("train", 0)], "test": []})
    assert [finding.status for finding in findings] == ["not checked"] * 2
    assert "`environment.teacher`" in findings[0].detail
