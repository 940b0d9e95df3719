"""Implements `kapelle new`, which creates a folder with a working component, its test, and a recipe that trains with the component."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from kapelle.cli.arguments import FRAMEWORKS, KINDS
from kapelle.errors import ConfigError, OutputError, did_you_mean
from kapelle.runtime.console import say

PROGRAMS: Mapping[str, tuple[str, str]] = {
    "openai": ("openai", "openai"),
    "openai_agents": ("openai-agents", "agents"),
    "langgraph": ("langgraph langchain-openai openai", "langgraph"),
    "pydantic_ai": ("'pydantic-ai-slim[openai]'", "pydantic_ai"),
    "autogen": ("autogen-agentchat 'autogen-ext[openai]'", "autogen_agentchat"),
    "smolagents": ("'smolagents[openai]'", "smolagents"),
    "crewai": ("crewai", "crewai"),
}
"""Mapping from a framework to the package to install, and the module that the package provides."""

WARMUPS: Mapping[str, str] = dict.fromkeys(("pydantic_ai", "smolagents"), "steps: 200, batch: 24")
"""Mapping from a framework to its warm-up settings, if they differ from those in `examples/apps/recipe.yaml`."""


def _template(name: str, **names: str) -> str:
    """Return the content of a file in the folder `programs`. The placeholders in the file are replaced by the given names."""
    text = (resources.files("kapelle.cli") / "programs" / f"{name}.txt").read_text("utf-8")
    for placeholder, value in names.items():
        text = text.replace(placeholder, value)
    return text


def _templates(kind: str, framework: str) -> Mapping[str, str]:
    """Return the files of a kind of component as a mapping from path to content.

    A component of the kind `app` is one of the programs in `examples/apps`.
    """
    if kind == "app":
        packages, module = PROGRAMS[framework]
        return {
            "NAME_.py": _template(framework),
            "teacher.py": _template("teacher"),
            "test_NAME_.py": _template("app_test", MODULE_=module, PACKAGES_=packages.replace("'", "")),
            "NAME_.yaml": _template("app_recipe", WARMUP_=WARMUPS.get(framework, "steps: 100")),
        }
    if kind == "project":
        piece, module = "NAME_/environment.py", "NAME_.environment"
        return {
            "README.md": _template("project_readme"),
            "pyproject.toml": _template("project_metadata"),
            "NAME_/__init__.py": "",
            piece: _template("environment", PIECE_=piece),
            "tests/test_environment.py": _template("environment_test", IMPORT_=module),
            "NAME_.yaml": _template("environment_recipe", PIECE_=piece),
        }
    return {
        "NAME_.py": _template(kind, PIECE_="NAME_.py"),
        "test_NAME_.py": _template(f"{kind}_test", IMPORT_="NAME_"),
        "NAME_.yaml": _template(f"{kind}_recipe", PIECE_="NAME_.py"),
    }


_WORD = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def run(arguments: argparse.Namespace) -> int:
    """Write the files of the component and print the next commands."""
    kind, name = arguments.kind, arguments.name
    if kind not in KINDS:
        raise ConfigError(f"`kapelle new` cannot create '{kind}'.{did_you_mean(kind, KINDS)}")
    framework = arguments.framework
    if framework is not None and kind != "app":
        raise ConfigError("--framework is for `kapelle new app`. Remove it.")
    if framework is not None and framework not in FRAMEWORKS:
        raise ConfigError(
            f"Unknown framework '{framework}' of `kapelle new app`.{did_you_mean(framework, FRAMEWORKS)}"
        )
    framework = framework or FRAMEWORKS[0]
    files = skeleton(kind, name, framework)
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
    if kind == "app":
        say(f"pip install {PROGRAMS[framework][0]} 'kapelle[serve]'")
    say(
        f"python -m pytest                       # its test passes{' after about a minute' if kind == 'app' else ''}"
    )
    if kind in piece:
        say(f"kapelle validate {piece[kind]}     # is it fit for training?")
    say(f"kapelle validate {name}.yaml")
    say(f"kapelle train {name}.yaml")
    return 0


def skeleton(kind: str, name: str, framework: str = FRAMEWORKS[0]) -> Mapping[str, str]:
    """Return the files of a kind of component as a mapping from path to content. Raises ConfigError for a name that cannot be used."""
    made = class_name(name) if _WORD.fullmatch(name) else ""
    if not made:
        proposed = "_".join(re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)).lower()
        hint = f" '{proposed}' is a valid name." if _WORD.fullmatch(proposed) else ""
        raise ConfigError(
            f"'{name}' is not a valid module name. Use lower-case letters, digits and _, and begin with a letter.{hint}"
        )
    files = _templates(kind, framework)
    words = set(re.findall(r"\w+", " ".join(files.values())))
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or made in words or _taken(name):
        raise ConfigError(
            f"'{name}' is already a name in Python, kapelle or an installed package. Choose another one."
        )
    return {_named(file, name, made): _named(text, name, made) for file, text in files.items()}


def _taken(name: str) -> bool:
    found = importlib.util.find_spec(name)
    return name == "tests" or (found is not None and (found.origin is not None or name == "kapelle"))


def class_name(name: str) -> str:
    """Return the name of the class for a component; for example, `word_count` becomes `WordCount`."""
    return "".join(part.capitalize() for part in name.split("_"))


def _named(text: str, name: str, made: str) -> str:
    return text.replace("NAME_", name).replace("CLASS_", made)


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files into a new folder. Raises OutputError if the folder exists already or cannot be written."""
    try:
        folder.mkdir()
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise OutputError(f"'{folder}' already exists here. Choose another name or folder.") from None
    except OSError as error:
        raise OutputError(f"'{folder}' cannot be written: {error.strerror}.") from error
