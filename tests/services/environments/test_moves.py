"""A move that is sent again because its connection broke is made once, wherever it broke."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import grpc
import pytest
from tests.services.environments import slow_world
from tests.services.environments.conftest import FAR, reset, says, stub_of
from tests.services.environments.test_service import eventually, refused
from tests.support.breaking import Point, breaking

from kapelle.services.environments.service import EnvironmentServer
from kapelle.wire import environment_v1_pb2 as pb
from kapelle.wire import environment_v1_pb2_grpc as pb_grpc

POINTS: tuple[Point, ...] = get_args(Point)
MARKER = "a move that is looked for"
SOON = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 50)]


@contextmanager
def breaking_stub(server: EnvironmentServer, point: Point, marker: str = MARKER) -> Iterator[tuple[Any, Any]]:
    """Yield the relay, and a client whose connection breaks there when something with `marker` is sent or answered."""
    with (
        breaking(server.address, point, marker.encode()) as relay,
        grpc.insecure_channel(relay.address, SOON) as channel,
    ):
        yield relay, pb_grpc.EnvironmentsStub(channel)


def twice(call: Callable[..., Any], asked: Any) -> Any:
    """Send something whose connection breaks, and send it again until it is answered."""
    assert refused(call, asked)[0] == "UNAVAILABLE"
    while True:
        try:
            return call(asked, timeout=FAR, wait_for_ready=True)
        except grpc.RpcError as error:
            if (
                error.code() != grpc.StatusCode.UNAVAILABLE
            ):  # that the old connection is dead may not be known yet
                raise


@pytest.mark.parametrize("point", POINTS)
def test_a_move_is_made_once(server: EnvironmentServer, point: Point) -> None:
    with breaking_stub(server, point) as (relay, stub):
        session = stub.Reset(reset(seed=3)).session
        stub.Act(says(session, "first", number=1))
        brought = twice(stub.Act, says(session, MARKER, number=2))
        assert relay.broken.is_set()
        assert [(each.agent, each.amount) for each in brought.rewards] == [("ann", 0.5)]
        assert brought.view.shown["ben"] == f"ben sees {MARKER}", "the first answer, changes and all"
        stub.Act(says(session, "third", number=3))
    assert slow_world.heard == [(3, "first"), (3, MARKER), (3, "third")]


@pytest.mark.parametrize("point", POINTS)
def test_a_batch_is_made_once(server: EnvironmentServer, point: Point) -> None:
    with breaking_stub(server, point) as (_, stub):
        one, other = (stub.Reset(reset(seed)).session for seed in (1, 2))
        acts = [says(one, MARKER, number=1), says(other, "fail", number=1)]
        results = twice(stub.BatchAct, pb.BatchActRequest(acts=acts)).results
    assert results[0].reply.view.shown["ann"] == f"ann sees {MARKER}"
    assert results[1].error.message == "RuntimeError: it failed (slow_world.py, line 72)"
    assert sorted(slow_world.heard) == [(1, MARKER), (2, "fail")]


@pytest.mark.parametrize("point", POINTS[1:])
def test_an_outcome_is_asked_of_the_world_once(server: EnvironmentServer, point: Point) -> None:
    with breaking_stub(server, point, "seed") as (_, stub):
        session = stub.Reset(reset(seed=4)).session
        assert twice(stub.GetOutcome, pb.OutcomeRequest(session=session)).success == 1.0
        assert slow_world.heard == [(4, "outcome")]
        stub.Act(says(session, "on it goes"))
        stub.GetOutcome(pb.OutcomeRequest(session=session))
    assert slow_world.heard[1:] == [(4, "on it goes"), (4, "outcome")]


def test_one_that_breaks_off_at_work_ends_its_session(server: EnvironmentServer, stub: Any) -> None:
    session = stub.Reset(reset(seed=5)).session
    with stub_of(server) as gone:
        first = gone.Act.future(says(session, "wait", number=1), timeout=FAR)
        assert slow_world.began.wait(FAR)
        assert not first.done()
    eventually(lambda: slow_world.closed == [5])
    assert refused(stub.Act, says(session, "wait", number=1))[0] == "NOT_FOUND"
    assert slow_world.heard == [(5, "wait")]


def test_one_that_is_sent_again_before_the_first_is_answered_waits_for_it(
    server: EnvironmentServer, stub: Any
) -> None:
    session = stub.Reset(reset(seed=6)).session
    again: list[Any] = []
    with stub_of(server) as gone:
        first = gone.Act.future(says(session, "wait", number=1), timeout=FAR)
        assert slow_world.began.wait(FAR)
        assert not first.done()
        sending = threading.Thread(
            target=lambda: again.append(stub.Act(says(session, "wait", number=1), timeout=FAR))
        )
        sending.start()
        eventually(lambda: server.grpc._guard._under_way["calls"] == 2)
    eventually(lambda: server.grpc._guard._under_way["calls"] == 1)
    slow_world.go_on.set()
    sending.join()
    assert again[0].view.shown["ann"] == "ann sees wait", "the first caller went away, the second waits on"
    assert slow_world.heard == [(6, "wait")]
    assert slow_world.closed == []


def test_numbers_that_are_neither_the_last_nor_the_next(stub: Any) -> None:
    session = stub.Reset(reset(seed=7)).session
    assert refused(stub.Act, says(session, "x", number=2))[0] == "FAILED_PRECONDITION"
    assert refused(stub.Act, says(session, "x", number=0))[0] == "FAILED_PRECONDITION"
    stub.Act(says(session, "x", number=1))
    stub.Act(says(session, "without"))
    assert refused(stub.Act, says(session, "without", number=2))[0] == "FAILED_PRECONDITION"
    stub.Act(says(session, "y", number=3))
    assert refused(stub.Act, says(session, "z", number=3)) == (
        "INVALID_ARGUMENT",
        "Move 3 was made already, and was another one.",
    )
    assert refused(stub.Act, says(session, "x", number=1))[0] == "FAILED_PRECONDITION"
    assert slow_world.heard == [(7, "x"), (7, "without"), (7, "y")]


def test_what_failed_fails_again_without_the_world(stub: Any) -> None:
    session = stub.Reset(reset(seed=8)).session
    failed = says(session, "fail", number=1)
    assert (
        refused(stub.Act, failed)
        == refused(stub.Act, failed)
        == ("ABORTED", "RuntimeError: it failed (slow_world.py, line 72)")
    )
    assert slow_world.heard == [(8, "fail")]
