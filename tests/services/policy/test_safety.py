"""Access to the policy server: every route, with every credential."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kapelle.errors import ConfigError
from kapelle.rollout.setup import RolloutSetup
from kapelle.services.binding import Binding
from kapelle.services.policy.service import PolicyServer, ServingLimits, serve_policy
from kapelle.workflow import Scene

TOKEN = "the-right-token-0123456789"  # noqa: S105


@pytest.fixture(scope="module")
def guarded(setup: RolloutSetup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyServer]:
    folder = tmp_path_factory.mktemp("guarded")
    with serve_policy(
        setup, "duo", Binding(token=TOKEN, names=("trainer.example",)), ServingLimits(), folder
    ) as served:
        yield served


def basic(password: str) -> str:
    return f"Basic {base64.b64encode(f'me:{password}'.encode()).decode()}"


CREDENTIALS: Mapping[str, tuple[dict[str, str], int | None]] = {
    "none": ({}, 401),
    "wrong": ({"authorization": f"Bearer {TOKEN[:-1]}x"}, 401),
    "beginning": ({"authorization": f"Bearer {TOKEN[:-1]}"}, 401),
    "longer": ({"authorization": f"Bearer {TOKEN}x"}, 401),
    "other scheme": ({"authorization": f"Digest {TOKEN}"}, 401),
    "bare": ({"authorization": TOKEN}, 401),
    "as a cookie": ({"cookie": f"token={TOKEN}"}, 401),
    "wrong password": ({"authorization": basic("x")}, 401),
    "other name": ({"authorization": f"Bearer {TOKEN}", "host": "evil.example"}, 421),
    "no name": ({"authorization": f"Bearer {TOKEN}", "host": ""}, 421),
    "other page": ({"authorization": f"Bearer {TOKEN}", "origin": "https://evil.example"}, 403),
    "page of no address": ({"authorization": f"Bearer {TOKEN}", "origin": "http://["}, 403),
    "right": ({"authorization": f"Bearer {TOKEN}"}, None),
    "right password": ({"authorization": basic(TOKEN)}, None),
    "added name": ({"authorization": f"Bearer {TOKEN}", "host": "trainer.example:8000"}, None),
}
"""Headers, and the status of the error; None if they are accepted."""


def test_every_route_is_behind_the_same_check(guarded: PolicyServer) -> None:
    """All routes that exist, and paths that do not, with every credential."""
    paths = [
        (method, route.path.replace("{name:path}", ""))
        for route in guarded.service.routes()
        for method in route.methods or ()
    ]
    assert ("POST", "/v1/chat/completions") in paths
    assert ("GET", "/health") in paths
    assert ("GET", "/metrics") in paths
    assert ("DELETE", "/v1/responses/") in paths
    assert ("POST", "/v1/reward") in paths
    elsewhere = [("GET", "/none"), ("POST", "/none"), ("DELETE", "/v1/models"), ("HEAD", "/health")]
    with httpx.Client(base_url=guarded.url) as client:
        for method, path in [
            *paths,
            *(("POST", f"/sessions/s{p}") for m, p in paths if m == "POST"),
            *elsewhere,
        ]:
            for name, (headers, raised) in CREDENTIALS.items():
                answer = client.request(method, path, headers=headers, json={} if method == "POST" else None)
                # Reading changes nothing, and the browser shows no other page what was read.
                if raised is None or (raised == 403 and method in ("GET", "HEAD")):
                    assert answer.status_code not in (401, 403, 421), (method, path, name)
                else:
                    assert answer.status_code == raised, (method, path, name)
                    assert TOKEN not in answer.text
                    if method != "HEAD":
                        of_anthropic = path.split("/v1/")[-1].startswith("messages")
                        fields = {"details"} if of_anthropic else {"param", "code"}
                        assert set(answer.json()["error"]) == {"message", "type", *fields}


@pytest.mark.parametrize("session", ["", "a b", "x" * 129])
def test_a_session_without_a_name_is_an_error(server: PolicyServer, web: httpx.Client, session: str) -> None:
    for path, headers in [(f"/sessions/{session}", {}), ("", {"x-kapelle-session": session})]:
        answer = web.post(f"{server.url}{path}/v1/chat/completions", json={}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-kapelle-session")


def test_a_form_of_another_page_is_rejected(server: PolicyServer, web: httpx.Client) -> None:
    """Requests that browsers send without a preflight are rejected, also without `Origin`."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = web.post(f"{server.url}/v1/chat/completions", content=b"{}", headers={"content-type": kind})
        assert answer.status_code == 415, kind


@pytest.mark.parametrize("declared", [True, False])
def test_too_long_a_body_is_not_read(server: PolicyServer, web: httpx.Client, *, declared: bool) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(5):
            yield b"[" * (1 << 20)

    content = b"[" * (5 << 20) if declared else pieces()
    answer = web.post(
        f"{server.url}/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413


def test_invalid_tls_files_are_errors_before_anything_is_served(setup: RolloutSetup, tmp_path: Path) -> None:
    files: dict[str, Any] = {"certificate": tmp_path / "cert.pem", "key": tmp_path / "key.pem"}
    for file in files.values():
        file.write_text("no certificate")
    with (
        pytest.raises(ConfigError, match=r"cert\.pem and .*key\.pem cannot be used"),
        serve_policy(setup, "duo", Binding(**files), ServingLimits()),
    ):
        pytest.fail("it serves")


QUESTION = "my password is swordfish"


class Quoting:
    """A workflow that fails with the question in its message, before or after a turn."""

    name = "quoting"

    def __init__(self, *, first: bool) -> None:
        self.first = first

    def check(self, agents: object, environment: object) -> None:
        """Accept all."""

    async def run(self, scene: Scene) -> None:
        if not self.first:
            await scene[scene.names[0]].say(scene.observe(scene.names[0]))
        raise ValueError(f"cannot play {scene.observe(scene.names[0])!r}")


@pytest.mark.parametrize("first", [True, False])
def test_nothing_of_a_question_is_logged_when_a_workflow_fails(
    setup: RolloutSetup, web: httpx.Client, caplog: pytest.LogCaptureFixture, *, first: bool
) -> None:
    failing = replace(setup, workflow=Quoting(first=first))
    body = {"model": "duo", "messages": [{"role": "user", "content": QUESTION}]}
    with serve_policy(failing, "duo", Binding(), ServingLimits()) as server:
        for more in ({}, {"stream": True}):
            reply = web.post(f"{server.url}/v1/chat/completions", json={**body, **more})
            assert "see the service's log" in reply.text
            assert "swordfish" not in reply.text
    assert "its workflow failed with ValueError" in caplog.text
    assert "swordfish" not in caplog.text
