"""A run calls its servers before models load: one that is unreachable or rejects the key ends the command with one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import TINY, Kapelle, call
from tests.support.plain_server import answering

RUN = ("demo", *TINY, "team.agents.actor.weights.model=big")


def endpoint(url: str) -> str:
    return f"team.agents.actor.weights.endpoint={url}"


@pytest.fixture
def kapelle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kapelle:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "some-secret")
    return call


@pytest.mark.parametrize("command", [["validate"], ["train", "--run-dir", "new"]])
def test_a_dead_endpoint_ends_in_one_line_before_models_load(
    command: list[str], kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("kapelle.setup.model_loading.load_models", loaded)
    said = kapelle(command[0], *RUN, endpoint(f"http://127.0.0.1:{unused_tcp_port}/v1"), *command[1:])
    assert said.code == 2
    (line,) = said.err.splitlines()
    assert (
        f"The endpoint of policy 'actor' at http://127.0.0.1:{unused_tcp_port}/v1 does not respond:" in line
    )


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (200, ""),
        (401, "rejects the key in $OPENAI_API_KEY: HTTP 401"),
        (503, "returns HTTP 503"),
    ],
)
def test_what_a_server_answers(status: int, told: str, kapelle: Kapelle) -> None:
    with answering(status) as server:
        said = kapelle("validate", *RUN, endpoint(f"{server.url}/v1"))
    assert said.code == (2 if told else 0), said
    assert told in said.err
    assert "some-secret" not in said.err + said.out


def test_a_judge_and_a_reward_server_are_tried_too(kapelle: Kapelle, unused_tcp_port: int) -> None:
    away = f"http://127.0.0.1:{unused_tcp_port}"
    asks = "{name: reward_server, questions: {name: arithmetic}, address: '" + away + "'}"
    said = kapelle("validate", "demo", *TINY, f"environment={asks}", "warmup=null")
    assert (said.code, "The reward server at http" in said.err) == (2, True), said
