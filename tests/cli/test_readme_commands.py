"""The README's commands with the packages that the README installs, and no others."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.cli.conftest import TINY

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SERVERS = ("serve", "view")
ABSENT = """import json, os, sys
for name in json.loads(os.environ["ABSENT"]):
    sys.modules[name] = None  # importing it raises ModuleNotFoundError, and find_spec returns None
"""
ONE_AFTER_ANOTHER = """import contextlib, io, json, os, signal, sys
from kapelle.cli import main

class Output(io.StringIO):
    def write(self, text):
        if self.server and "http://" in text:
            signal.raise_signal(signal.SIGINT)  # Ctrl-C when a server has printed its address
        return super().write(text)

for words in json.loads(sys.argv[1]):
    output = Output()
    output.server = words[0] in ("serve", "view")
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main(words)
    print(json.dumps([code, output.getvalue()]), flush=True)
"""


def readme_commands() -> list[str]:
    """Return the `kapelle` commands of the README's shell blocks, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("kapelle ")]
    assert len(lines) > 8
    return [line.partition("#")[0].strip() for line in lines]


def modules_outside(extras: set[str]) -> list[str]:
    """Return the installed top-level modules that kapelle with these extras does not depend on."""
    installed = {canonicalize_name(each.metadata["Name"]): each for each in distributions()}
    needed: set[tuple[str, frozenset[str]]] = set()
    queue = [(str(canonicalize_name("kapelle")), frozenset(extras))]
    while queue:
        name, own = each = queue.pop()
        if each in needed or name not in installed:
            continue
        needed.add(each)
        for requirement in map(Requirement, installed[canonicalize_name(name)].requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *own)):
                queue.append((str(canonicalize_name(requirement.name)), frozenset(requirement.extras)))
    names = {name for name, _ in needed}
    return sorted(
        module
        for module, owners in packages_distributions().items()
        if module.isidentifier() and not names & {str(canonicalize_name(owner)) for owner in owners}
    )


def installed(extras: set[str], folder: Path) -> dict[str, str]:
    """Return environment variables of processes that find only the packages of kapelle with these extras."""
    absent = modules_outside(extras)
    assert {"ray", "pytest", "llguidance"} <= set(absent)
    (folder / "sitecustomize.py").write_text(ABSENT)
    return {
        **os.environ,
        "ABSENT": json.dumps(absent),
        "PYTHONPATH": str(folder),
        "KAPELLE_CACHE": str(folder / "cache"),
    }


def words_of(command: str) -> list[str]:
    """Return what follows `kapelle` in a command, with settings that make it small."""
    _, *words = shlex.split(command)
    if words[0] in SERVERS:
        words += ["--port", "0"]
    elif words[0] in ("train", "compare", "demo") and "--dry-run" not in words:
        words = [word for word in words if word != "5"] + list(TINY)  # `--seeds 5` is long
        words = [word if word != "--seeds" else "--seeds=1" for word in words]
        words = [
            word.partition(",")[0] if previous == "--algorithms" else word
            for previous, word in zip(["", *words], words, strict=False)
        ]
    return words


def run_commands(commands: list[str], environment: dict[str, str], folder: Path) -> None:
    """Run commands in one process, which imports once; each must succeed."""
    asked = json.dumps([words_of(command) for command in commands])
    ended = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER, asked],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    said = [json.loads(line) for line in ended.stdout.splitlines()]
    for command, (code, output) in zip(commands, said, strict=False):
        assert "Traceback" not in output, f"{command}\n{output}"
        assert code in ((0, 130) if command.split()[1] in SERVERS else (0,)), f"{command}\n{output}"
    assert len(said) == len(commands), f"{commands[len(said)]}\n{ended.stderr}"


@pytest.mark.slow
def test_every_command_of_the_readme(tmp_path: Path) -> None:
    extras = re.search(r"pip install -c constraints.txt '\.\[(.*?)\]'", README)
    assert extras is not None
    run_commands(readme_commands(), installed(set(extras[1].split(",")), tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "kapelle arena nash random scripted --environment kuhn_poker --games 4",
        pytest.param(
            "kapelle train leduc_psro league.population.by=alpha_rank league.enter.every=1",
            marks=pytest.mark.long,
        ),
    ],
)
def test_games_need_only_the_extra_games(command: str, tmp_path: Path) -> None:
    run_commands([command], installed({"games"}, tmp_path), tmp_path)
