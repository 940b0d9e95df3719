"""Demonstrations by a function of the user's, in worlds of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from kapelle.environment import Scripted, offers
from kapelle.environments.adapters.openenv import OpenEnv
from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.taught import WithTeacher
from kapelle.errors import ConfigError, EpisodeError
from kapelle.rollout.conformance import gold_pays
from kapelle.setup.recipe import resolve
from kapelle.setup.validation import check_run
from kapelle.training.warmup_settings import stage_team, warmup_key
from kapelle.types import Message, Task

URL = "http://127.0.0.1:9"
TEACHER = """
def say(agent, task, messages, seed):
    return f"{agent} heard {messages[-1].content} ({seed})"

def dumb(agent, task, messages, seed):
    return None
"""


class TaughtSums(WithTeacher, Arithmetic):
    """Sums that somebody's function demonstrates."""


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    file = tmp_path / "teacher.py"
    file.write_text(TEACHER)
    return file


def test_a_teacher_answers_for_every_agent(teacher: Path) -> None:
    environment = OpenEnv(url=URL, teacher=f"{teacher}:say")
    assert offers(environment, Scripted)
    said = environment.script("clerk", Task("t", ""), [Message("user", "tea")], 7)
    assert said == "clerk heard tea (7)"
    with pytest.raises(EpisodeError, match="a NoneType for 'clerk'"):
        OpenEnv(url=URL, teacher=f"{teacher}:dumb").script("clerk", Task("t", ""), [], 0)


def test_a_world_without_a_script_offers_one_by_a_teacher_alone() -> None:
    assert not offers(OpenEnv(url=URL), Scripted)


def test_a_teacher_that_is_not_there_is_refused(teacher: Path) -> None:
    with pytest.raises(ConfigError, match="has no 'nobody', named as teacher"):
        OpenEnv(url=URL, teacher=f"{teacher}:nobody").check(["a"])


def test_a_warm_up_without_a_script_names_the_setting() -> None:
    recipe = {
        "environment": {"name": "openenv", "url": URL},
        "workflow": {"name": "play"},
        "algorithm": {"name": "grpo"},
        "warmup": {"steps": 1},
    }
    config = resolve(recipe)
    with pytest.raises(ConfigError, match=r"Or name one: `environment.teacher`"):
        check_run(config, *stage_team(config))


def test_a_warmed_up_model_belongs_to_what_its_teacher_said_then(teacher: Path) -> None:
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


def test_a_mixture_has_the_teachers_of_its_parts(teacher: Path) -> None:
    world = {"name": "openenv", "url": URL, "teacher": f"{teacher}:say"}
    recipe = {
        "team": {"agents": 2},
        "environment": {"name": "mixture", "parts": {"one": {"environment": world}}},
        "workflow": {"name": "chain"},
        "algorithm": {"name": "grpo"},
        "warmup": {"steps": 1},
    }
    before = warmup_key(resolve(recipe))
    teacher.write_text(TEACHER.replace("heard", "read"))
    assert warmup_key(resolve(recipe)) != before


def test_a_teacher_where_kapelle_runs_has_its_hash_before_and_after_it_is_asked(
    teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(teacher.parent)
    teacher.rename("stands_beside_it.py")
    environment = OpenEnv(url=URL, teacher="stands_beside_it:say")
    before = environment.teacher_hash()
    environment.check_teacher()
    assert before is not None
    assert environment.teacher_hash() == before


def test_the_hash_of_a_teacher_in_a_module_is_that_of_its_file() -> None:
    here = OpenEnv(url=URL, teacher=f"{__file__}:TaughtSums").teacher_hash()
    assert here is not None
    assert OpenEnv(url=URL, teacher="json:dumps").teacher_hash() not in (None, here)
    assert OpenEnv(url=URL, teacher="no_such_module:say").teacher_hash() is None
    assert OpenEnv(url=URL).teacher_hash() is None


async def test_what_a_teacher_says_is_no_gold(teacher: Path) -> None:
    environment = TaughtSums(teacher=f"{teacher}:say")
    findings = await gold_pays(environment, {"train": [environment.task("train", 0)], "test": []})
    assert [finding.status for finding in findings] == ["not checked"] * 2
    assert "`environment.teacher`" in findings[0].detail
