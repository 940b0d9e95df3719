from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from tests.services.environments import slow_world
from tests.services.environments.conftest import FAR, reset, says, served, stub_of
from tests.services.grpc.test_server import CREDENTIALS, TOKEN

from kapelle.services.binding import Binding
from kapelle.services.environments.service import EnvironmentServer
from kapelle.services.environments.sessions import SessionLimits
from kapelle.wire import environment_v1_pb2 as pb
from kapelle.wire import environment_v1_pb2_grpc as pb_grpc

SERVICES = list(pb.DESCRIPTOR.services_by_name.values())


def refused(call: Callable[..., Any], *asked: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call(*asked, timeout=FAR)
    return raised.value.code().name, raised.value.details()


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + FAR
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_an_episode_by_the_contract_alone(stub: Any, server: EnvironmentServer) -> None:
    assert [each.name for each in stub.List(pb.ListRequest()).environments] == ["it"]
    began = stub.Reset(reset(seed=7))
    assert list(began.view.movers) == ["ann", "ben"]
    assert began.view.shown["ben"] == "ben sees hello"
    moved = stub.Act(says(began.session, "over"))
    assert [(each.agent, each.amount) for each in moved.rewards] == [("ann", 0.5)]
    assert list(moved.view.movers) == []
    assert stub.Observe(pb.ObserveRequest(session=began.session)).shown["ann"] == "ann sees over"
    outcome = stub.GetOutcome(pb.OutcomeRequest(session=began.session))
    assert outcome.info.entries[0].value.integer == 7
    stub.Close(pb.CloseRequest(session=began.session))
    assert slow_world.closed == [7]
    assert len(server.sessions) == 0


def test_what_goes_wrong_is_a_status_and_a_sentence(stub: Any) -> None:
    began = stub.Reset(reset())
    expected = {
        ("ABORTED", "RuntimeError: it failed (slow_world.py, line 72)"): (
            stub.Act,
            says(began.session, "fail"),
        ),
        ("NOT_FOUND", "This server has no environment 'x'. Known: it."): (
            stub.Describe,
            pb.DescribeRequest(environment="x"),
        ),
        ("OUT_OF_RANGE", "Split 'test' has 4 tasks, and none 4."): (
            stub.GetTask,
            pb.GetTaskRequest(split="test", index=4),
        ),
        ("INVALID_ARGUMENT", "There is no split 'dev', but train and test."): (
            stub.GetTask,
            pb.GetTaskRequest(split="dev"),
        ),
        ("INVALID_ARGUMENT", "Name the agents in seat order: 1 to 256 names, each once."): (
            stub.Reset,
            pb.ResetRequest(agents=["a", "a"], pick=pb.Pick(split="train")),
        ),
        ("INVALID_ARGUMENT", "Name what is played: a `task`, or a `pick` of split and index."): (
            stub.Reset,
            pb.ResetRequest(agents=["a"]),
        ),
        ("FAILED_PRECONDITION", "This environment has no script."): (stub.Script, pb.ScriptRequest()),
        ("FAILED_PRECONDITION", "This world cannot score a text before the episode is over."): (
            stub.Score,
            pb.ScoreRequest(session=began.session),
        ),
    }
    assert {refused(call, asked) for call, asked in expected.values()} == set(expected)
    assert refused(stub.Act, says("nobody", "x"))[0] == "NOT_FOUND"
    hidden = stub.Act(says(began.session, "hide")).view
    assert dict(hidden.shown_errors) == dict.fromkeys(
        ("ann", "ben"), "RuntimeError: nothing to see (slow_world.py, line 62)"
    )


def test_in_a_batch_one_that_fails_fails_alone(stub: Any) -> None:
    one, other = (stub.Reset(reset(seed)).session for seed in (1, 2))
    acts = [says(one, "fail"), says(other, "fine"), says("nobody", "x")]
    results = stub.BatchAct(pb.BatchActRequest(acts=acts)).results
    assert [result.error.code for result in results] == ["ABORTED", "", "NOT_FOUND"]
    assert results[1].reply.view.shown["ann"] == "ann sees fine"


def test_sessions_have_a_largest_number(stub: Any) -> None:
    sessions = [stub.Reset(reset(seed)).session for seed in range(3)]
    assert refused(stub.Reset, reset()) == (
        "RESOURCE_EXHAUSTED",
        "3 sessions are open, the most there may be. Reset again later.",
    )
    stub.Close(pb.CloseRequest(session=sessions[0]))
    assert stub.Reset(reset()).session not in sessions


def test_a_session_that_nobody_asks_about_is_closed() -> None:
    with served(limits=SessionLimits(idle_seconds=0.2)) as server, stub_of(server) as stub:
        stub.Reset(reset(seed=5))
        eventually(lambda: slow_world.closed == [5])
        assert len(server.sessions) == 0


def test_a_call_that_is_given_up_frees_its_session(stub: Any, server: EnvironmentServer) -> None:
    began = stub.Reset(reset(seed=6))
    acting = stub.Act.future(says(began.session, "wait"), timeout=FAR)
    assert slow_world.began.wait(FAR)
    acting.cancel()
    eventually(lambda: slow_world.closed == [6])
    assert len(server.sessions) == 0


class Asking:
    """The questions of one stream."""

    def __init__(self, stub: Any) -> None:
        self._questions: SimpleQueue[pb.StreamQuestion | None] = SimpleQueue()
        self.answers = stub.Stream(iter(self._questions.get, None), timeout=FAR)

    def ask(self, number: int, **question: Any) -> None:
        self._questions.put(pb.StreamQuestion(number=number, **question))

    def end(self) -> None:
        self._questions.put(None)


def test_a_stream_holds_its_sessions_and_ends_them(stub: Any, server: EnvironmentServer) -> None:
    asking = Asking(stub)
    asking.ask(1, reset=reset(seed=1))
    asking.ask(2, reset=reset(seed=2))
    first, second = sorted((next(asking.answers) for _ in range(2)), key=lambda answer: answer.number)
    asking.ask(3, act=says(first.reset.session, "wait"))
    assert slow_world.began.wait(FAR)
    asking.ask(4, act=says(second.reset.session, "over"))
    asking.ask(5, observe=pb.ObserveRequest(session="nobody"))
    asking.ask(6)
    others = {answer.number: answer for answer in (next(asking.answers) for _ in range(3))}
    assert others[4].act.rewards[0].amount == 0.5, "no session waits for another one"
    assert [others[number].error.code for number in (5, 6)] == ["NOT_FOUND", "INVALID_ARGUMENT"]
    slow_world.go_on.set()
    assert next(asking.answers).number == 3
    asking.end()
    assert list(asking.answers) == []
    eventually(lambda: sorted(slow_world.closed) == [1, 2])
    assert len(server.sessions) == 0


def test_a_caller_that_vanishes_leaves_nothing_behind(stub: Any, server: EnvironmentServer) -> None:
    asking = Asking(stub)
    asking.ask(1, reset=reset(seed=1))
    asking.ask(2, act=says(next(asking.answers).reset.session, "wait"))
    assert slow_world.began.wait(FAR)
    asking.answers.cancel()
    eventually(lambda: slow_world.closed == [1])
    assert len(server.sessions) == 0


def test_the_end_lets_episodes_end(server: EnvironmentServer, stub: Any) -> None:
    asking = Asking(stub)
    asking.ask(1, reset=reset(seed=1))
    session = next(asking.answers).reset.session
    ended: list[bool] = []
    ending = threading.Thread(target=lambda: ended.append(server.drain(2 * FAR)))
    ending.start()
    eventually(lambda: server.sessions.leaving)
    assert refused(stub.Reset, reset())[0] == "UNAVAILABLE"
    asking.ask(2, act=says(session, "over"))
    assert next(asking.answers).act.rewards[0].amount == 0.5
    asking.ask(3, close=pb.CloseRequest(session=session))
    assert next(asking.answers).WhichOneof("answer") == "close"
    with pytest.raises(grpc.RpcError, match="about to end"):
        next(asking.answers)
    ending.join()
    assert ended == [True]


def calls(channel: grpc.Channel) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield every method of the contract, as something that takes an empty body."""
    for service in SERVICES:
        for method in service.methods:
            path = f"/{service.full_name}/{method.name}"
            if method.client_streaming:
                yield (
                    path,
                    lambda body, p=path, **more: list(
                        channel.stream_stream(p)(iter([body]), timeout=FAR, **more)
                    ),
                )
            else:
                yield path, lambda body, p=path, **more: channel.unary_unary(p)(body, timeout=FAR, **more)


def said(call: Callable[..., Any], body: bytes, **more: Any) -> tuple[str, str]:
    try:
        call(body, **more)
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def test_every_method_is_behind_the_same_check() -> None:
    """Every method of the contract with every credential."""
    with served(Binding(token=TOKEN)) as server, grpc.insecure_channel(server.address) as channel:
        asked = dict(calls(channel))
        assert len(asked) == 16
        for path, call in asked.items():
            for name, (metadata, admitted) in CREDENTIALS.items():
                code, why = said(call, b"", metadata=metadata)
                assert TOKEN not in why
                assert (code == "UNAUTHENTICATED") is not admitted, (path, name, code)


def test_nobody_changes_what_a_server_without_a_token_runs(server: EnvironmentServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        control = pb_grpc.EnvironmentControlStub(channel)
        asked = pb.RegisterRequest(name="new", settings='{"name": "arithmetic"}')
        code, why = refused(control.Register, asked)
        assert code == "FAILED_PRECONDITION"
        assert "asks for no token" in why
        assert list(server.shelf.held) == ["it"]


def test_an_environment_is_replaced_while_its_sessions_go_on() -> None:
    metadata = [("authorization", f"Bearer {TOKEN}")]
    with served(Binding(token=TOKEN)) as server, grpc.insecure_channel(server.address) as channel:
        stub, control = pb_grpc.EnvironmentsStub(channel), pb_grpc.EnvironmentControlStub(channel)
        old = stub.Reset(reset(), metadata=metadata)

        def put(settings: str, name: str = "it") -> Any:
            return control.Register(pb.RegisterRequest(name=name, settings=settings), metadata=metadata)

        new = put(f'{{"name": "{slow_world.Waiting().name}", "greeting": "good day"}}')
        assert (old.version, new.version) == (1, 2)
        assert (
            stub.Observe(pb.ObserveRequest(session=old.session), metadata=metadata).shown["ann"]
            == "ann sees hello"
        )
        began = stub.Reset(reset(), metadata=metadata)
        assert (began.version, began.view.shown["ann"]) == (2, "ann sees good day")
        put('{"name": "arithmetic"}', "sums")
        with pytest.raises(grpc.RpcError, match="plays games of moves"):
            put('{"name": "arithmetic"}')
        for wrong in ("{", "[1]", '{"name": "arithmetic", "digits": 99}', '{"name": "arithmetik"}'):
            with pytest.raises(grpc.RpcError) as raised:
                put(wrong)
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        names = stub.List(pb.ListRequest(), metadata=metadata).environments
        assert [(each.name, each.version) for each in names] == [("it", 2), ("sums", 1)]


def hostile(count: int, seed: int) -> Iterator[bytes]:
    """Yield bodies that are no message, or nearly one."""
    draw = random.Random(seed)
    whole = [
        reset().SerializeToString(),
        says("0" * 16, "text").SerializeToString(),
        pb.StreamQuestion(number=1, reset=reset()).SerializeToString(),
        b"\x1a" * 5_000,
        b"\x0a\xff\xff\xff\xff\x0f",
    ]
    for _ in range(count):
        body = bytearray(draw.choice(whole))
        for _ in range(draw.randrange(1, 8)):
            place = draw.randrange(len(body) + 1)
            body[place : place + draw.randrange(3)] = draw.randbytes(draw.randrange(4))
        yield bytes(body) if draw.random() < 0.8 else draw.randbytes(draw.randrange(300))


def test_bodies_that_are_no_messages_are_refused(server: EnvironmentServer, stub: Any) -> None:
    """A few hundred; `python -m benchmarks.environment_server --hostile 20000` sends the rest."""
    with grpc.insecure_channel(server.address) as channel:
        asked = [call for _, call in calls(channel)]
        for number, body in enumerate(hostile(300, 1)):
            code, why = said(asked[number % len(asked)], body)
            assert code not in ("UNKNOWN", "INTERNAL"), (code, why, body)
            assert "Traceback" not in why
    assert stub.Describe(pb.DescribeRequest()).name == "it"
