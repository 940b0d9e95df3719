"""`kapelle new`: a folder with a piece that works, its test, and a recipe that trains with it."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
from collections.abc import Mapping
from pathlib import Path

from kapelle.cli.new_arguments import KINDS
from kapelle.cli.output import say
from kapelle.cli.skeletons import SKELETONS
from kapelle.errors import ConfigError, OutputError, did_you_mean

_WORD = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def run(arguments: argparse.Namespace) -> int:
    """Write the files and say what to do with them."""
    kind, name = arguments.kind, arguments.name
    if kind not in KINDS:
        raise ConfigError(f"There is no skeleton of '{kind}'.{did_you_mean(kind, KINDS)}")
    files = skeleton(kind, name)
    folder = Path(name)
    write(folder, files)
    for file in files:
        say(f"{folder / file}")
    piece = {
        "environment": f"{name}.py:{class_name(name)}",
        "project": f"{name}/environment.py:{class_name(name)}",
    }
    say("")
    say(f"cd {name}")
    if importlib.util.find_spec("pytest") is None:
        say("pip install pytest                     # for the test; it is not installed yet")
    say("python -m pytest                       # what it does is held by a test")
    if kind in piece:
        say(f"kapelle validate {piece[kind]}     # is it fit for training?")
    say(f"kapelle validate {name}.yaml")
    say(f"kapelle train {name}.yaml")
    return 0


def skeleton(kind: str, name: str) -> Mapping[str, str]:
    """Return the files of a kind of piece, path → text; ConfigError for a name that could not be used."""
    made = class_name(name) if _WORD.fullmatch(name) else ""
    if not made:
        proposed = "_".join(re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)).lower()
        hint = f" '{proposed}' would do." if _WORD.fullmatch(proposed) else ""
        raise ConfigError(
            f"'{name}' cannot be a module's name. Use small letters, digits and _, a letter first.{hint}"
        )
    files = SKELETONS[kind]
    words = set(re.findall(r"\w+", " ".join(files.values())))
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or made in words or _taken(name):
        raise ConfigError(
            f"'{name}' is taken: Python, kapelle or an installed package calls something so. Choose another name."
        )
    return {_named(file, name, made): _named(text, name, made) for file, text in files.items()}


def _taken(name: str) -> bool:
    found = importlib.util.find_spec(name)
    return name == "tests" or (found is not None and (found.origin is not None or name == "kapelle"))


def class_name(name: str) -> str:
    """Return the class of a name: `word_count` → `WordCount`."""
    return "".join(part.capitalize() for part in name.split("_"))


def _named(text: str, name: str, made: str) -> str:
    return text.replace("NAME_", name).replace("CLASS_", made)


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files into a new folder; OutputError where there is one already, or the disk refuses."""
    try:
        folder.mkdir()
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise OutputError(
            f"There is a '{folder}' here already, and nothing is overwritten. Choose another name or folder."
        ) from None
    except OSError as error:
        raise OutputError(f"'{folder}' cannot be written: {error.strerror}.") from error
