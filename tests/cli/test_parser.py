from __future__ import annotations

import importlib

import pytest
from tests.cli.conftest import Kapelle

from kapelle.cli.arguments import COMMANDS
from kapelle.cli.parser import parse, split_words
from kapelle.errors import ConfigError


def test_help_lists_every_command(kapelle: Kapelle) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        said = kapelle(*words)
        assert said.code == 0
        assert all(f"  {name}" in said.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself_and_exists(kapelle: Kapelle, name: str) -> None:
    said = kapelle(name, "--help")
    assert said.code == 0
    assert said.out.startswith(f"usage: kapelle {name}")
    assert callable(importlib.import_module(f"kapelle.cli.{name}").run)


def test_options_may_stand_between_words() -> None:
    parsed = parse(["train", "demo", "--run-dir", "runs/x", "over.yaml", "--json", "training.steps=3"])
    assert not isinstance(parsed, str)
    assert parsed[1].words == ["demo", "over.yaml", "training.steps=3"]
    assert (parsed[1].run_dir, parsed[1].json, parsed[1].resume) == ("runs/x", True, False)


def test_a_word_is_a_setting_only_if_it_starts_as_a_key() -> None:
    files, settings = split_words(["demo", "a.b=1", "runs/x=1.yaml", "team.agents.0.name=solver", "./k=v"])
    assert files == ("demo", "runs/x=1.yaml", "./k=v")
    assert settings == ("a.b=1", "team.agents.0.name=solver")


def test_options_are_never_guessed_from_their_beginning() -> None:
    with pytest.raises(ConfigError, match="--dry-run"):
        parse(["train", "demo", "--dry"])
