"""The environment server: the protocol, limits, shutdown, who may call, invalid messages."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from tests.services.environments import slow_world
from tests.services.environments.conftest import FAR, Caller, calling, eventually, served
from tests.services.grpc.test_server import TOKEN
from tests.support.hostile_bodies import bodies
from websockets.exceptions import ConnectionClosed, InvalidStatus

from kapelle.runtime.wire.worlds import LARGEST
from kapelle.services.binding import Binding
from kapelle.services.environments.host import SessionLimits
from kapelle.services.environments.service import EnvironmentServer

PLAYED: dict[str, Any] = {"agents": ["a"], "session": 1, "seed": 0}


def test_an_episode_by_the_protocol_alone(caller: Caller, server: EnvironmentServer) -> None:
    assert [each["name"] for each in caller.ask("list")["environments"]] == ["it"]
    began = caller.reset(seed=7)
    assert began["view"]["movers"] == {"value": ["ann", "ben"]}
    assert began["view"]["shown"]["ben"] == {"value": "ben sees hello"}
    moved = caller.says("over")
    assert moved["rewards"] == {"ann": 0.5}
    assert moved["view"]["movers"] == {"value": []}
    assert caller.ask("observe", session=1)["shown"]["ann"] == {"value": "ann sees over"}
    outcome = caller.ask("outcome", session=1)
    assert outcome["info"] == {"seed": 7, "tuple": {"$tuple": [1, "a"]}}
    caller.ask("close", session=1)
    assert slow_world.closed == [7]
    assert server.host.sessions == []


def test_an_error_has_a_status_and_a_message(caller: Caller) -> None:
    caller.reset()
    number = caller.send("act", session=1, actions={"ann": "fail"})
    assert caller.answer(number) == {"error": ["RuntimeError", "it failed (slow_world.py, line 72)"]}
    unknown = (404, "This server has no environment 'x'. Known: it.")
    assert caller.refused("describe", environment="x") == unknown
    for call, fields, status, why in (
        ("task", {"split": "dev", "index": 0}, 400, "`split`"),
        ("task", {"split": "test", "index": -1}, 400, "`index`"),
        ("reset", {**PLAYED, "session": 2, "agents": ["a", "a"], "index": 0}, 400, "twice"),
        ("reset", {**PLAYED, "session": 2}, 400, "either"),
        ("reset", {**PLAYED, "index": 0}, 400, "is already open"),
        ("extract", {"text": "x"}, 400, "no comparable answers"),
        ("script", {"agent": "a", "task": {"id": "x"}, "messages": [], "seed": 0}, 400, "no script"),
        ("score", {"session": 1, "agent": "a", "text": "x"}, 400, "cannot score"),
        ("act", {"session": 9, "actions": {}}, 404, "no such session"),
        ("act", {"session": 1, "actions": {"ann": 3}}, 400, "`actions.ann`"),
        ("dance", {}, 400, "`call` must be one of"),
    ):
        found, message = caller.refused(call, **fields)
        assert (found, why in message) == (status, True), (call, found, message)
    hidden = caller.says("hide")["view"]["shown"]
    assert hidden["ann"] == {"error": ["RuntimeError", "nothing to see (slow_world.py, line 62)"]}


def test_sessions_have_a_limit(caller: Caller, server: EnvironmentServer) -> None:
    for number in range(3):
        caller.reset(number)
    with calling(server) as other:
        full = other.refused("reset", session=1, seed=0, agents=["a"], index=0)
        assert full[0] == 429
        caller.ask("close", session=0)
        other.reset()


def test_connections_have_a_limit() -> None:
    with (
        served(limits=SessionLimits(connections=3)) as server,
        calling(server),
        calling(server),
        calling(server),
    ):
        with pytest.raises(InvalidStatus) as raised, calling(server):
            pass
        assert raised.value.response.status_code == 429
        assert httpx.get(f"http://{server.address}/health").json()["status"] == "healthy"


def test_a_connection_ends_its_sessions(server: EnvironmentServer) -> None:
    with calling(server) as caller:
        caller.reset(1, seed=1)
        caller.reset(2, seed=2)
        waits = caller.send("act", session=1, actions={"ann": "wait"})
        assert slow_world.began.wait(FAR)
        assert caller.says("over", 2)["rewards"] == {"ann": 0.5}, "sessions run at the same time"
        slow_world.go_on.set()
        assert caller.answer(waits)["value"]["rewards"] == {"ann": 0.5}
    eventually(lambda: sorted(slow_world.closed) == [1, 2])
    assert server.host.sessions == []


def test_the_sessions_of_a_lost_caller_are_closed(server: EnvironmentServer) -> None:
    with calling(server) as caller:
        caller.reset(seed=1)
        caller.send("act", session=1, actions={"ann": "wait"})
        assert slow_world.began.wait(FAR)
        caller.socket.socket.shutdown(socket.SHUT_RDWR)
        eventually(lambda: slow_world.closed == [1])
        assert server.host.sessions == []


def test_closing_cancels_a_call(caller: Caller, server: EnvironmentServer) -> None:
    caller.reset(seed=6)
    waits = caller.send("act", session=1, actions={"ann": "wait"})
    assert slow_world.began.wait(FAR)
    caller.ask("close", session=1)
    assert caller.answer(waits)["refused"][0] == 404
    assert slow_world.closed == [6]
    assert server.host.sessions == []


def test_draining_lets_episodes_finish(server: EnvironmentServer) -> None:
    with calling(server) as caller:
        caller.reset(seed=1)
        ended: list[bool] = []
        ending = threading.Thread(target=lambda: ended.append(server.drain(2 * FAR)))
        ending.start()
        eventually(lambda: server.host.draining)
        assert caller.refused("reset", session=2, seed=0, agents=["a"], index=0)[0] == 503
        assert httpx.get(f"http://{server.address}/health").status_code == 503
        assert caller.says("over")["rewards"] == {"ann": 0.5}
        caller.ask("close", session=1)
        with pytest.raises(ConnectionClosed):
            caller.socket.recv(timeout=FAR)
        ending.join()
        assert ended == [True]


def test_draining_answers_accepted_requests(server: EnvironmentServer) -> None:
    with calling(server) as caller:
        caller.reset(seed=1)
        waits = caller.send("act", session=1, actions={"ann": "wait"})
        assert slow_world.began.wait(FAR)
        ended: list[bool] = []
        ending = threading.Thread(target=lambda: ended.append(server.drain(0.4 + FAR / 100)))
        ending.start()
        eventually(lambda: server.host.ended)
        assert caller.refused("observe", session=1)[0] == 503
        slow_world.go_on.set()
        assert caller.answer(waits)["value"]["rewards"] == {"ann": 0.5}
        ending.join()
        assert ended == [True]


def test_every_connection_is_checked() -> None:
    with served(Binding(token=TOKEN)) as server:
        for token in (None, "", "another-token-0123456789", TOKEN[:-1]):
            for headers in ({}, {"Origin": "http://evil.example"}):
                with pytest.raises(InvalidStatus) as raised, calling(server, token, **headers):
                    pass
                assert raised.value.response.status_code == 401
                assert TOKEN.encode() not in (raised.value.response.body or b"")
        for headers, status in (({"Origin": "http://evil.example"}, 403), ({"Host": "evil.example"}, 421)):
            with pytest.raises(InvalidStatus) as raised, calling(server, TOKEN, **headers):
                pass
            assert raised.value.response.status_code in (status, 400)
        assert httpx.get(f"http://{server.address}/health").status_code == 401
        with calling(server, TOKEN) as caller:
            assert caller.ask("describe")["name"] == "it"


def test_a_server_without_a_token_cannot_be_changed(caller: Caller, server: EnvironmentServer) -> None:
    status, why = caller.refused("register", name="new", settings={"name": "arithmetic"})
    assert (status, "token" in why) == (403, True)
    assert list(server.host.registry.current) == ["it"]


def test_sessions_keep_the_version_of_a_replaced_environment() -> None:
    with served(Binding(token=TOKEN)) as server, calling(server, TOKEN) as caller:
        assert caller.reset(1)["version"] == 1
        greets = {"name": slow_world.Waiting().name, "greeting": "good day"}
        assert caller.ask("register", name="it", settings=greets)["version"] == 2
        assert caller.ask("observe", session=1)["shown"]["ann"] == {"value": "ann sees hello"}
        began = caller.reset(2)
        assert (began["version"], began["view"]["shown"]["ann"]) == (2, {"value": "ann sees good day"})
        caller.ask("register", name="sums", settings={"name": "arithmetic"})
        plays = caller.refused("register", name="it", settings={"name": "arithmetic"})
        assert (plays[0], "another name" in plays[1]) == (400, True)
        for settings in ("{", {}, {"name": "arithmetic", "digits": 99}, {"name": "arithmetik"}):
            assert caller.refused("register", name="it", settings=settings)[0] == 400
        names = caller.ask("list")["environments"]
        assert [(each["name"], each["version"]) for each in names] == [("it", 2), ("sums", 1)]


GOOD: list[dict[str, Any]] = [
    {"id": 1, "call": "reset", "session": 1, "agents": ["ann", "ben"], "seed": 3, "split": "test", "index": 1},
    {"id": 2, "call": "reset", "session": 2, "agents": ["a"], "seed": 3, "task": {"id": "x", "data": {"a": [1]}}},
    {"id": 3, "call": "act", "session": 1, "actions": {"ann": "x"}, "final": None},
    {"id": 4, "call": "task", "environment": "it", "split": "test", "index": 3},
    {"id": 5, "call": "register", "name": "new", "settings": {"name": "arithmetic"}},
]  # fmt: skip


def hostile() -> Iterator[str]:
    """Yield invalid messages, some nearly valid."""
    yield from ('{"id": 1, "call": {"$items": [[[1], 2]]}}', '{"id": 1, "$x": 2}', '{"$float": "x"}')
    yield from (
        "[" * 100_000,
        '{"id": 1, "a": ' + "[" * 900 + "]" * 900 + "}",
        '{"id": true, "call": "list"}',
    )
    for good in GOOD:
        for body in bodies(good, 40):
            yield body.decode("utf-8", "replace")


def test_invalid_messages_are_rejected(server: EnvironmentServer) -> None:
    with calling(server) as caller:
        refused = 0
        for text in hostile():
            caller.socket.send(text)
            answer = json.loads(caller.socket.recv(timeout=FAR))
            assert "id" in answer
            assert "Traceback" not in json.dumps(answer)
            if "refused" in answer:
                refused += 1
                assert 400 <= answer["refused"][0] < 500, (answer, text[:300])
        assert refused > 100
    with calling(server) as caller:
        assert caller.ask("describe")["name"] == "it"


def test_a_message_beyond_the_limit_ends_its_connection(caller: Caller, server: EnvironmentServer) -> None:
    with calling(server) as other:
        with suppress(ConnectionClosed):  # the server may disconnect during the send
            other.socket.send("x" * (LARGEST + 1))
        with pytest.raises(ConnectionClosed):
            other.socket.recv(timeout=FAR)
    assert caller.ask("describe")["name"] == "it"


def test_too_many_unanswered_requests_end_the_connection() -> None:
    with served(limits=SessionLimits(unanswered=5)) as server, calling(server) as caller:
        caller.reset(seed=1)
        for _ in range(5):
            caller.send("act", session=1, actions={"ann": "wait"})
        with pytest.raises(ConnectionClosed, match="still unanswered"):
            caller.socket.recv(timeout=FAR)
    eventually(lambda: slow_world.closed == [1])


def test_requests_wait_while_too_many_bytes_are_unanswered() -> None:
    with served(limits=SessionLimits(held_bytes=1000)) as server, calling(server) as caller:
        caller.reset(seed=1)
        waits = caller.send("act", session=1, actions={"ann": "wait", "ben": "x" * 2000})
        assert slow_world.began.wait(FAR)
        describe = caller.send("describe")
        with pytest.raises(TimeoutError):
            caller.socket.recv(timeout=0.1)
        slow_world.go_on.set()
        assert "value" in caller.answer(waits)
        assert caller.answer(describe)["value"]["name"] == "it"


def test_a_caller_that_reads_nothing_is_disconnected(
    server: EnvironmentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kapelle.services import sockets

    monkeypatch.setattr(sockets, "STALL_SECONDS", 0.2)
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        peer.connect(("127.0.0.1", server.http.port))
        peer.sendall(
            f"GET /v1/worlds HTTP/1.1\r\nHost: {server.address}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        assert b" 101 " in peer.recv(1 << 12)
        begin = {"id": 1, "call": "reset", "session": 1, "seed": 1, "agents": ["ann", "ben"], "index": 0}
        peer.sendall(frame(json.dumps(begin)))
        eventually(lambda: len(server.host.sessions) == 1)
        peer.settimeout(FAR)
        peer.sendall(
            frame(json.dumps({"id": 2, "call": "act", "session": 1, "actions": {"ann": "x" * 200_000}}))
        )
        for _ in range(50):
            peer.sendall(frame(json.dumps({"id": 3, "call": "observe", "session": 1})))
        eventually(lambda: slow_world.closed == [1])
    assert server.host.sessions == []


def frame(text: str) -> bytes:
    """Return a text frame of a client with a mask of zeros."""
    body = text.encode()
    size = len(body)
    length = bytes([0x80 | size]) if size < 126 else (
        b"\xfe" + size.to_bytes(2, "big") if size < 1 << 16 else b"\xff" + size.to_bytes(8, "big")
    )  # fmt: skip
    return b"\x81" + length + bytes(4) + body


def test_the_server_limits_the_time_of_calls() -> None:
    with served(limits=SessionLimits(call_seconds=0.2)) as server, calling(server) as caller:
        caller.reset(call_seconds=FAR)
        number = caller.send("act", session=1, actions={"ann": "wait"})
        assert caller.answer(number)["error"][0] == "DeadlineExceeded"


def test_a_session_belongs_to_one_connection(caller: Caller, server: EnvironmentServer) -> None:
    caller.reset(1, seed=1)
    with calling(server) as other:
        assert other.refused("observe", session=1)[0] == 404
        other.reset(1, seed=2)
        other.ask("close", session=1)
    assert slow_world.closed == [2]
    caller.says("over")
