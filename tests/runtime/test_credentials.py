"""Every sender of a token checks first that the connection is encrypted or local."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from kapelle.engines.rollout.endpoint import EndpointEngine
from kapelle.engines.rollout.vllm.settings import Vllm
from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.debate_topics import DebateTopics
from kapelle.environments.grading.judge import JudgeEndpoint
from kapelle.environments.reward_server import RewardServer
from kapelle.environments.tools.mcp import Mcp
from kapelle.environments.tools.search import Search
from kapelle.errors import ConfigError, EngineError
from kapelle.runs.model_card import check_push
from kapelle.runtime.credentials import bearer
from kapelle.runtime.hub import hub_fault
from kapelle.team import Endpoint

VARIABLE = "KAPELLE_TEST_TOKEN"


def an_endpoint(address: str) -> None:
    EndpointEngine({"far": Endpoint(address, "m", VARIABLE)})


def a_judge(address: str) -> None:
    judge = JudgeEndpoint(endpoint=address, model="m", api_key_env=VARIABLE)
    DebateTopics(judge=judge).check(["a", "b"])


def a_reward_server(address: str) -> None:
    RewardServer(questions=Arithmetic(), address=address, token_env=VARIABLE).check(["a"])


def a_search(address: str) -> None:
    Search(url=f"{address}/?q={{query}}", key_env=VARIABLE).check()


def an_mcp_server(address: str) -> None:
    assert Mcp(url=address, key_env=VARIABLE).headers == {"Authorization": "Bearer secret"}


def vllm(address: str) -> None:
    Vllm(server=address).check()


@pytest.mark.parametrize(
    "send",
    [
        an_endpoint,
        a_judge,
        a_reward_server,
        a_search,
        an_mcp_server,
        vllm,
    ],
)
def test_a_token_is_never_sent_without_tls(
    send: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (VARIABLE, "VLLM_API_KEY"):
        monkeypatch.setenv(variable, "secret")
    for address in ("https://far.example", "http://127.0.0.1:9", "http://localhost:9", "http://[::1]:9"):
        send(address)
    for address in ("http://far.example", "http://10.1.2.3:8000", "http://127.0.0.1.far.example"):
        with pytest.raises(
            ConfigError, match=r"would be sent to http://\S+ in the clear\. Use https"
        ) as raised:
            send(address)
        assert "secret" not in str(raised.value)


def test_the_hub_gets_no_token_without_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub_fault.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert "HF_TOKEN would be sent to http://hub.example in the clear" in str(hub_fault("me/team"))
    with pytest.raises(EngineError, match="in the clear"):
        check_push("me/team")
    hub_fault.cache_clear()


def test_the_header_holds_the_value_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "secret")
    assert bearer(VARIABLE, "https://far.example") == {"Authorization": "Bearer secret"}
    assert bearer(None, "http://far.example") == {}
    with pytest.raises(ConfigError) as raised:
        bearer(VARIABLE, "http://ada:pass@far.example/?key=hidden")
    assert "pass" not in str(raised.value)
    assert "hidden" not in str(raised.value)
