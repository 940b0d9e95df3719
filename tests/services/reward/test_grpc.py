"""The reward server over gRPC: the same scores, rejections as status codes, and who may call."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import grpc
import httpx
import pytest
from tests.services.grpc.test_server import CREDENTIALS, TOKEN

from kapelle.runtime.wire import reward_v1_pb2 as wire
from kapelle.runtime.wire import reward_v1_pb2_grpc as methods
from kapelle.services.binding import Binding
from kapelle.services.reward.scores import MOST_ITEMS, Answered, Score, Scorer
from kapelle.services.reward.service import RewardLimits, RunningRewardServer, serve_reward

METHODS = [f"/kapelle.reward.v1.Reward/{method}" for method in ("Score", "Describe", "None")]

GOOD = wire.ScoreRequest(
    items=[
        wire.Item(question="abc", answer="abc"),
        wire.Item(messages=[wire.Message(role="system", content="x"), wire.Message(role="user", content="y")], answer=""),
    ]
)  # fmt: skip


def test_scores_are_those_of_http(
    web: httpx.Client, server: RunningRewardServer, stub: methods.RewardStub
) -> None:
    asked = [("abc", "abc"), ("abc", "acb"), ("x", "a " * 400)]
    items = [{"question": question, "answer": answer} for question, answer in asked]
    there = web.post(f"{server.url}/v1/score", json={"items": items}).json()
    here = stub.Score(
        wire.ScoreRequest(items=[wire.Item(question=q, answer=a) for q, a in asked]), timeout=60
    )
    assert (here.model, here.weights) == (there["model"], there["weights"])
    assert [each.WhichOneof("result") for each in here.results] == ["score", "score", "ungraded"]
    for one, other in zip(here.results[:2], there["results"], strict=False):
        assert one.score.score == pytest.approx(other["score"], abs=1e-6)
        assert one.score.logit == pytest.approx(other["logit"], abs=1e-5)
    assert here.results[2].ungraded == there["results"][2]["reason"]
    about = stub.Describe(wire.DescribeRequest(), timeout=60)
    assert json.loads(about.about) == web.get(f"{server.url}/v1/model").json()


def refused(stub: methods.RewardStub, request: wire.ScoreRequest) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as raised:
        stub.Score(request, timeout=60)
    return raised.value.code().name, raised.value.details()


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([], "has 0 answers"),
        ([wire.Item(answer="a")] * (MOST_ITEMS + 1), "has 4097 answers"),
        ([wire.Item(answer="a")], r"`items[0]`: give either"),
        ([*GOOD.items, wire.Item(question="", messages=GOOD.items[1].messages)], "`items[2]`: give either"),
        ([wire.Item(messages=[wire.Message(role="robot", content="a")])], "`role` must be one of"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(
    stub: methods.RewardStub, items: list[wire.Item], said: str
) -> None:
    code, why = refused(stub, wire.ScoreRequest(items=items))
    assert code == "INVALID_ARGUMENT"
    assert said in why


class Held:
    """Scores nothing until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.scorer = Scorer({"name": "held", "weights": "none"}, self.score)

    def score(self, answers: Sequence[Answered]) -> list[Score]:
        self.begun.set()
        self.go.wait()
        return [Score(0.5, 0.0)] * len(answers)


def test_limits_are_refusals_that_say_whether_they_pass(web: httpx.Client) -> None:
    held = Held()
    with serve_reward(held.scorer, Binding(), RewardLimits(answers=3), 0) as served:
        assert served.grpc is not None
        with grpc.insecure_channel(served.grpc.address) as channel:
            stub = methods.RewardStub(channel)
            first = stub.Score.future(GOOD, timeout=60)
            assert held.begun.wait(60)
            assert refused(stub, GOOD) == (
                "RESOURCE_EXHAUSTED",
                "2 of at most 3 answers are waiting. Try again later.",
            )
            items = [{"question": "a", "answer": "b"}]
            said = web.post(f"{served.url}/v1/score", json={"items": items * 2})
            assert (said.status_code, said.headers["retry-after"]) == (429, "1")
            # What never fits is not a question of time.
            said = web.post(f"{served.url}/v1/score", json={"items": items * 4})
            assert (said.status_code, said.json()["error"]["param"]) == (400, "items")
            assert refused(stub, wire.ScoreRequest(items=[*GOOD.items] * 2))[0] == "INVALID_ARGUMENT"
            held.go.set()
            assert len(first.result().results) == 2


def broken(count: int) -> list[bytes]:
    """Return bodies that are no requests, or other ones: a good one with bytes changed, cut, put in or repeated."""
    good, draw = GOOD.SerializeToString(), random.Random(7)
    made = [
        b"\xff",
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x0a\x02\x0a",
        good * 50,
        b"\x0a" * 10_000,
        b"\x00",
        b"\x0b" * 5000,
    ]
    while len(made) < count:
        body = bytearray(good)
        for _ in range(draw.randint(1, 6)):
            place = draw.randrange(len(body))
            match draw.randrange(4):
                case 0:
                    body[place] = draw.randrange(256)
                case 1:
                    del body[place : place + draw.randint(1, 8)]
                case 2:
                    body[place:place] = draw.randbytes(draw.randint(1, 8))
                case _:
                    body += body[place:]
            if not body:
                break
        made.append(bytes(body[:4096]))
    return made


def test_broken_messages_are_refused_and_good_ones_answered_meanwhile(
    server: RunningRewardServer, stub: methods.RewardStub
) -> None:
    assert server.grpc is not None
    wrong = 0
    with grpc.insecure_channel(server.grpc.address) as channel:
        ask = channel.unary_unary(METHODS[0])
        under_way: list[Future[bytes]] = [ask.future(body, timeout=60) for body in broken(300)]
        for k, each in enumerate(under_way):
            if k % 50 == 0:
                assert len(stub.Score(GOOD, timeout=60).results) == 2
            error = each.exception()
            if error is None:
                continue  # what was changed says nothing
            wrong += 1
            assert isinstance(error, grpc.RpcError)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
            assert "Traceback" not in error.details()
    assert wrong > 100


def test_every_method_is_behind_the_same_check(scorer: Scorer) -> None:
    with serve_reward(scorer, Binding(token=TOKEN), RewardLimits(), 0) as served:
        assert served.grpc is not None
        with grpc.insecure_channel(served.grpc.address) as channel:
            for method in METHODS:
                for name, (metadata, admitted) in CREDENTIALS.items():
                    with pytest.raises(grpc.RpcError) as raised:
                        # Admitted, it is rejected for what it asks, or there is no such method.
                        channel.unary_unary(method)(b"\xff", timeout=60, metadata=metadata)
                    assert (raised.value.code().name == "UNAUTHENTICATED") is not admitted, (method, name)
                    assert TOKEN not in raised.value.details()
