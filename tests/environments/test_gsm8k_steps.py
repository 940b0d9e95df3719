from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.workflows.stage import expert, play, transcript

from kapelle.environments.gsm8k_steps import GSM8KSteps
from kapelle.errors import ConfigError, DataError
from kapelle.team import Agent
from kapelle.types import Message
from kapelle.workflows.chain import Chain

TRAIN = "April 48/2 = <<48/2=24>>24, then 7*48 = <<7*48=336.00>>336, total <<.5*8=4>>4.\n#### 4"
TEST = (
    "<<48/2=24>>24 <<85-47=38>>38 <<0.5*8=4>>4 <<2+2=5>>5 <<10/3=3.33>>3.33 <<12=12>>12 <<1/0=0>> "
    "<<what>> <<x*2=4>> <<100000+200000+3000000=3300000>> <<$20*10%=2>>2\n#### 2"
)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for name, answer in (("train", TRAIN), ("test", TEST)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": name, "answer": answer}) + "\n")
    return str(tmp_path)


def test_steps_have_a_normal_form_and_unusable_ones_are_excluded(folder: str) -> None:
    environment = GSM8KSteps(path=folder)
    environment.check(["reasoner", "actor"])
    assert (environment.size("train"), environment.size("test")) == (3, 4)
    train = [environment.task("train", k) for k in range(3)]
    assert [(task.question, task.data["answer"]) for task in train] == [
        ("48/2", "24"),
        ("7*48", "336"),
        ("0.5*8", "4"),
    ]


def test_a_test_step_reports_whether_it_occurs_in_train(folder: str) -> None:
    environment = GSM8KSteps(path=folder)
    tasks = [environment.task("test", k) for k in range(4)]
    assert [(task.question, task.data["seen"]) for task in tasks] == [
        ("48/2", True),
        ("85-47", False),
        ("0.5*8", True),
        ("20*0.1", False),
    ]


async def test_a_chain_computes_a_step(folder: str) -> None:
    environment = GSM8KSteps(path=folder)
    say = expert(environment)
    agents = [Agent("reasoner", prompt="{question}"), Agent("actor", prompt="{reasoner}")]
    [episode] = await play(
        environment, Chain(), agents, {"reasoner": say, "actor": say}, environment.task("train", 1)
    )
    assert transcript(episode) == [
        "0 seen=0 7*48 -> reasoner: 280+56",
        "1 seen=1 280+56 -> actor: 336",
    ]
    assert episode.success == 1.0
    assert (episode.info["seen"], episode.info["operation"], episode.info["final"]) == (True, "*", "336")


def test_flaws_of_the_script_have_their_share(folder: str) -> None:
    environment = GSM8KSteps(path=folder, flaws={"reasoner": 0.3, "actor": 0.5})
    task = environment.task("train", 1)
    texts = [environment.script("reasoner", task, (Message("user", "7*48"),), seed) for seed in range(1000)]
    assert set(texts) == {"280+56", "280"}
    assert texts.count("280") / 1000 == pytest.approx(0.3, abs=0.05)
    messages = (Message("user", "280+56"),)
    texts = [environment.script("actor", task, messages, seed) for seed in range(1000)]
    assert set(texts) == {"336", "236"}
    assert texts.count("236") / 1000 == pytest.approx(0.5, abs=0.05)
    assert environment.script("solver", task, messages, 0) == "336"
    assert GSM8KSteps(path=folder, flaws={"solver": 1.0}).script("solver", task, messages, 0) == "236"


def test_unfit_settings_and_files_are_errors(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'actor'"):
        GSM8KSteps(path=folder, flaws={"actr": 0.1}).check(["reasoner", "actor"])
    with pytest.raises(ValidationError, match="actor"):
        GSM8KSteps(flaws={"actor": -1})
    (tmp_path / "test.jsonl").write_text('{"question": "another", "answer": "no steps"}\n')
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "no steps"}\n')
    with pytest.raises(DataError, match="calculator steps"):
        GSM8KSteps(path=str(tmp_path), longest=19).check([])


@pytest.mark.slow
@pytest.mark.data
def test_gsm8k_has_the_published_number_of_steps(gsm8k_folder: Path) -> None:
    environment = GSM8KSteps(path=str(gsm8k_folder))
    environment.check(["reasoner", "actor"])
    assert 0.98 * 23_716 < (environment.size("train") or 0) <= 23_716
    assert 0.98 * 4_282 < (environment.size("test") or 0) <= 4_282
    tasks = [environment.task("test", k) for k in range(environment.size("test") or 0)]
    assert {character for task in tasks for character in task.question} <= set("0123456789.+-*/()")
    seen = sum(task.data["seen"] for task in tasks) / len(tasks)
    assert 0.65 < seen < 0.70


@pytest.mark.slow
@pytest.mark.data
def test_the_script_without_flaws_is_correct_on_gsm8k(gsm8k_folder: Path) -> None:
    environment = GSM8KSteps(path=str(gsm8k_folder))
    for index in range(0, environment.size("test") or 0, 5):
        task = environment.task("test", index)
        worked = environment.script("reasoner", task, (Message("user", task.question),), 0)
        answer = environment.script("actor", task, (Message("user", worked),), 0)
        assert environment.extract(answer) == environment.extract(task.data["answer"]), task
