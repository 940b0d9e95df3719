"""The compose file for two machines names existing commands, files and variables."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from kapelle.cli.parser import parse
from kapelle.setup.recipe import load_recipe

FOLDER = Path(__file__).parents[2] / "examples" / "two_machines"
KEYS = {
    *("profiles", "build", "command", "environment", "volumes", "ports", "restart", "stop_grace_period"),
    "working_dir",
}
"""Keys of a service in the compose specification that the example uses."""


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    assert made.keys() == {"services"}
    return dict(made["services"])


@pytest.mark.parametrize("name", ["environments", "trainer"])
def test_service_can_start(services: dict[str, Any], name: str) -> None:
    service = services[name]
    assert service.keys() <= KEYS
    assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    for volume in service["volumes"]:
        here, there, *mode = volume.split(":")
        assert here.startswith("./")
        assert there.startswith("/")
        assert mode in ([], ["ro"])
    plain = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", service["command"])
    program, *words = shlex.split(plain)
    assert program == "kapelle"
    assert not isinstance(parse(words), str)
    assert service["environment"] == {"KAPELLE_TOKEN": "${KAPELLE_TOKEN:?set it in .env}"}


def test_trainer_finds_environments_of_server(services: dict[str, Any]) -> None:
    environment: Any = load_recipe(str(FOLDER / "recipe.yaml")).config.environment
    assert environment.address == ("environments:50051",)
    assert services["environments"]["ports"] == ["50051:50051"]
    command = services["environments"]["command"]
    assert f"--environments {environment.serves}=" in command
    assert f"--tls-cert {environment.certificate}" in command
