"""Addresses in settings hold no secret: it would be stored with the run and shown in errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import call

from kapelle.engines.rollout.endpoint import EndpointEngine
from kapelle.engines.rollout.vllm.settings import Vllm
from kapelle.environments.grading.judge import JudgeEndpoint
from kapelle.environments.tools.search import Search
from kapelle.errors import ConfigError
from kapelle.runtime.credentials import without_secrets
from kapelle.settings.base import open_address
from kapelle.settings.weights import EndpointConfig
from kapelle.team import Endpoint

WITH_SECRETS = [
    "http://me:hunter2@localhost:8000/v1",
    "https://hunter2@example.org/v1",
    "https://example.org/v1?sv=1&sig=hunter2",
    "https://example.org/v1#accessToken=hunter2",
]


@pytest.mark.parametrize("url", WITH_SECRETS)
@pytest.mark.parametrize(
    "make",
    [
        lambda url: EndpointConfig(endpoint=url, model="m"),
        lambda url: JudgeEndpoint(endpoint=url, model="m"),
        lambda url: Vllm(server=url),
        lambda url: Search(url=f"{url}{'&' if '?' in url else '?'}q={{query}}"),
        lambda url: EndpointEngine({"a": Endpoint(url, "m")}),
    ],
    ids=["agent", "judge", "vllm", "search", "engine"],
)
def test_an_address_with_a_secret_is_an_error_in_every_setting(make: Any, url: str) -> None:
    with pytest.raises((ValueError, ConfigError), match="which would be stored with the run"):
        make(url)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://example.org", "http://", "http://[::1", "http://a b/"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match="not an http"):
        open_address(url)


@pytest.mark.parametrize(
    "url", ["http://localhost:8000/v1", "https://[::1]:9/", "https://example.org/v1?version=2&keyword=monkey"]
)
def test_addresses_without_secrets_stay_as_they_are(url: str) -> None:
    assert open_address(url) == url
    assert without_secrets(f"see {url}.") == f"see {url}."


@pytest.mark.parametrize("url", WITH_SECRETS)
def test_the_error_of_a_command_shows_no_secret(url: str, tmp_path: Path) -> None:
    agents = f"team.agents=[{{name: a, weights: {{endpoint: '{url}', model: m}}}}]"
    said = call("train", "demo", agents, "--run-dir", str(tmp_path / "run"))
    assert said.code == 2
    assert "hunter2" not in said.err + said.out
    assert not (tmp_path / "run").exists()
    assert "hunter2" not in without_secrets(f"no answer from {url}: 401")


def test_the_error_of_a_command_moves_no_cursor() -> None:
    said = call("train", "no\x1b[2Jthing\x9b1A\u202e", "--dry-run")
    assert said.code == 2
    assert "no\\x1b[2Jthing\\x9b1A\\u202e" in said.err
    assert not {"\x1b", "\x9b", "\u202e"} & set(said.err + said.out)
