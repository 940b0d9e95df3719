from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from tests.cli.conftest import Kapelle, Said

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


def test_the_version_is_the_package_s(kapelle: Kapelle) -> None:
    from kapelle import __version__

    assert kapelle("--version").out == f"kapelle {__version__}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian"], "kapelle: Unknown command 'trian'. Did you mean 'train'? `kapelle --help` lists all; recipes are trained with `kapelle train RECIPE`.\n"),
        (["train", "--resum"], "kapelle: `kapelle train` does not know '--resum'. Did you mean '--resume'?\n"),
        (["eval", "--no-baseline"], "kapelle: `kapelle eval` does not know '--no-baseline'. Did you mean '--no-baselines'?\n"),
        (["collect", "run", "--min-reward", "1"], "kapelle: `kapelle collect` writes a file. Name it with --out FILE.\n"),
        (["collect", "run", "--out", "x", "--min-reward", "1", "--tasks", "0"], "kapelle: argument --tasks: 0 is less than 1. See `kapelle collect --help`.\n"),
        (["recipes", "list"], "kapelle: Unknown action 'list' of `kapelle recipes`. Did you mean 'ls'?\n"),
        (["recipes", "cp", "dmo"], "kapelle: Unknown recipe 'dmo'. Did you mean 'demo'?\n"),
        (["train", "dmeo"], "kapelle: Unknown recipe 'dmeo'. Did you mean 'demo'?\n"),
        (["train"], "kapelle: Name a recipe: one that comes with kapelle (`kapelle recipes ls` lists them), or a YAML file of yours.\n"),
        (["train", "demo", "--steps", "5"], "kapelle: `kapelle train` does not know '--steps'. Settings are written without dashes: training.steps=VALUE\n"),
        (["train", "demo", "--group-size=5"], "kapelle: `kapelle train` does not know '--group-size=5'. Settings are written without dashes: algorithm.group_size=VALUE\n"),
        (["train", "demo", "--algorithm", "rloo"], "kapelle: `kapelle train` does not know '--algorithm'. Settings are written without dashes: algorithm.name=VALUE\n"),
        (["train", "demo", "--seed"], "kapelle: `kapelle train` does not know '--seed'. Settings are written without dashes: seed=VALUE\n"),
        (["compare", "demo", "--algorithms", "grpo", "--seeds", "x"], "kapelle: argument --seeds: 'x' is not a whole number. See `kapelle compare --help`.\n"),
        (["train", "training.steps"], "kapelle: Unknown recipe 'training.steps'. Did you mean the setting training.steps=VALUE? `kapelle recipes ls` lists recipes; a recipe of your own is a YAML file.\n"),
        (["demo", "gsm8k"], "kapelle: `kapelle demo` takes only settings such as training.steps=20, not 'gsm8k'. Train a recipe with `kapelle train`.\n"),
        (["eval"], "kapelle: Name one run directory, or --model PATH and --environment NAME.\n"),
        (["eval", "--model", "x"], "kapelle: --model needs --environment NAME, and takes the place of a run directory.\n"),
    ],
)  # fmt: skip
def test_words_that_mean_nothing_are_one_line_and_exit_code_2(
    kapelle: Kapelle, words: list[str], line: str
) -> None:
    said = kapelle(*words)
    assert (said.code, said.err) == (2, line)


def test_a_folder_and_a_run_are_told_from_a_recipe(kapelle: Kapelle, finished: tuple[Path, Said]) -> None:
    run, _ = finished
    said = kapelle("train", run)
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        f"kapelle: '{run}' is a run. Continue it with `kapelle train --resume {run}`; its settings alone are "
        f"{run / 'config.yaml'}.\n"
    )
    assert "is a folder. Name the YAML file in it" in kapelle("train", run.parent).err


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
