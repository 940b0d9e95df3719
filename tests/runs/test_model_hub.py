"""Sending an export to a hub that runs in this process."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kapelle.errors import ConfigError, EngineError
from kapelle.runs.model_card import check_push, push


class Hub(ThreadingHTTPServer):
    """As much of a hub as sending a folder takes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.made: list[dict[str, object]] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()
        self.refuses: dict[str, int] = {}
        """Status for what is asked under a path."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.tokens.add(self.headers["Authorization"])
        for path, code in self.server.refuses.items():
            if path in self.path:
                return self._answer({"error": "not yours"}, code)
        if self.path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            return self._answer({"url": f"{self.server.url}/me/team"})
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self._answer(
                {"commitOid": "0" * 40, "commitUrl": f"{self.server.url}/me/team/commit/{'0' * 40}"}
            )
        return self._answer({"error": f"unexpected {self.path}"}, 404)

    def do_GET(self) -> None:
        self.server.tokens.add(self.headers["Authorization"])
        if self.path == "/api/whoami-v2":
            known = self.headers["Authorization"] == "Bearer secret"
            return self._answer({"name": "me"}, 200 if known else 401)
        return self._answer({"error": "not there"}, 404)

    def _answer(self, found: object, code: int = 200) -> None:
        content = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
        server.shutdown()
        server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    (out / "ada").mkdir(parents=True)
    for name in (
        "README.md",
        "ada/adapter_config.json",
        "ada/adapter_model.safetensors",
        "ada/kapelle.json",
        ".hidden",
    ):
        (out / name).write_bytes(name.encode() * 3)
    return out


@pytest.mark.slow
def test_the_listed_files_of_a_folder_are_sent(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no token") as kept:
        push(folder, "me/team")
    assert f"The export is in {folder}; send it later with `hf upload" in str(kept.value)
    assert not hub.tokens, "nothing was asked of the hub"
    monkeypatch.setenv("HF_TOKEN", "secret")
    push(folder, "me/team")
    assert hub.tokens == {"Bearer secret"}
    (made,) = hub.made
    assert made["name"] == "team"
    assert made.get("visibility", "private" if made.get("private") else "public") == "private"
    expected = ("README.md", "ada/adapter_config.json", "ada/adapter_model.safetensors")
    assert hub.files == {name: name.encode() * 3 for name in expected}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/repos/create", 401, "rejects the token"),
        ("/preupload/", 404, "can neither see nor create"),
        ("/commit/", 403, "may not write there"),
    ],
)
def test_an_error_of_the_hub_names_its_cause_and_keeps_the_export(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, status: int, told: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.refuses = {path: status}
    with pytest.raises(EngineError, match=rf"The hub rejected 'me/team' \({status}\)") as refused:
        push(folder, "me/team")
    said = str(refused.value)
    assert told in said
    assert "not yours" in said
    assert f"`hf upload me/team {folder}`" in said
    assert "secret" not in said
    assert not hub.files


@pytest.mark.parametrize(("token", "told"), [(None, "no token"), ("other", "rejects the token")])
def test_a_missing_or_unknown_token_is_reported_before_the_export(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str | None, told: str
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError, match=told):
        check_push("me/team")
    check_push("me/team", asking=False)


def test_nothing_is_sent_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    check_push("me/team", asking=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        check_push("me/team")
