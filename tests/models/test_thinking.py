"""Models that think: arguments of their chat templates, and what becomes of thoughts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.thinking import thinking_folder, thinking_tokenizer

from kapelle.cli import main
from kapelle.errors import ConfigError
from kapelle.models.renderer import ChatRenderer, light_renderer, load_renderer
from kapelle.runs.reader import read_episodes
from kapelle.settings.schema import ModelConfig
from kapelle.setup.recipe import load_recipe
from kapelle.types import Message

U = Message("user", "2+2?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinking_folder(tmp_path_factory.mktemp("model"))


class TestArguments:
    def test_they_reach_the_template(self) -> None:
        renderer = ChatRenderer(thinking_tokenizer(), 512)
        quiet = renderer.with_arguments({"enable_thinking": False})
        assert renderer.decode(renderer.start([U])).endswith("<|im_start|>assistant\n")
        assert quiet.decode(quiet.start([U])).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")

    def test_a_light_tokeniser_gives_the_same_ids(self, folder: Path) -> None:
        light, whole = (
            read(str(folder), ModelConfig()).with_arguments({"enable_thinking": False})
            for read in (light_renderer, load_renderer)
        )
        assert light.start([U]) == whole.start([U])

    def test_one_that_the_template_does_not_read_is_refused(self) -> None:
        renderer = ChatRenderer(thinking_tokenizer(), 512)
        with pytest.raises(ConfigError, match=r"does not read\. Did you mean 'enable_thinking'\?"):
            renderer.with_arguments({"enable_thinkin": False})


DEMO = ["demo", "warmup=null", "training.steps=1", "training.tasks_per_step=1", "algorithm.group_size=2"]
SMALL = ["evaluation.problems=1", "evaluation.problems_while_training=1", "team.sampling.max_tokens=4"]


@pytest.mark.parametrize(
    "word",
    [
        "enable_thinking=false",
        "chat_template_kwargs={enable_thinking: false}",
        "chat_template_kwargs.enable_thinking=false",
        "data.apply_chat_template_kwargs.enable_thinking=false",
    ],
)
def test_the_names_of_other_libraries_set_them(word: str) -> None:
    config = load_recipe("demo", (), [word]).config
    assert config.model.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.slow
def test_a_run_reads_them_by_agent(folder: Path, tmp_path: Path) -> None:
    given = [
        "model.chat_template_kwargs.enable_thinking=false",
        "team.agents.reasoner.chat_template_kwargs={enable_thinking: true}",
    ]
    words = [
        "train",
        *DEMO,
        *SMALL,
        f"model.path={folder}",
        *given,
        "--run-dir",
        str(tmp_path / "run"),
        "--no-rich",
    ]
    assert main(words) == 0
    turns = [turn for episode in read_episodes(tmp_path / "run", 1) for turn in episode.turns]
    block = load_renderer(str(folder), ModelConfig()).completion("<think>\n\n</think>\n\n")[:-1]
    assert {(turn.agent, turn.prompt_ids[-len(block) :] == block) for turn in turns} == {
        ("actor", True),
        ("reasoner", False),
    }


def test_validate_refuses_one_that_is_not_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["validate", *DEMO, f"model.path={folder}", "model.chat_template_kwargs.enable_thinkin=false"])
        == 2
    )
    assert "Did you mean 'enable_thinking'?" in capsys.readouterr().err
