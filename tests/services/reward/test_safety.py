"""Who may call the reward server over HTTP, and what it makes of bodies that are none."""

from __future__ import annotations

from typing import Any

import httpx
from tests.services.policy.test_safety import CREDENTIALS, TOKEN
from tests.support.hostile_bodies import answered, bodies, check_refused

from kapelle.services.binding import Binding
from kapelle.services.http.application import Application
from kapelle.services.reward.serving import RewardLimits, RewardServer, serve_reward
from kapelle.training.served import VerifierScorer

GOOD: dict[str, Any] = {
    "items": [
        {"question": "abc", "answer": "abc"},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "answer": "z"},
    ]
}


def test_every_route_is_behind_the_same_check(scorer: VerifierScorer) -> None:
    binding = Binding(token=TOKEN, names=("trainer.example",))
    with serve_reward(scorer, binding, RewardLimits()) as served, httpx.Client(base_url=served.url) as client:
        paths = [(route.method, route.path) for route in served.service.routes()]
        assert set(paths) == {("GET", "/health"), ("GET", "/v1/model"), ("POST", "/v1/score")}
        for method, path in [*paths, ("GET", "/none"), ("POST", "/none"), ("DELETE", "/v1/model")]:
            for name, (headers, refused) in CREDENTIALS.items():
                said = client.request(method, path, headers=headers, json={} if method == "POST" else None)
                # Reading changes nothing, and the browser shows no other page what was read.
                if refused is None or (refused == 403 and method == "GET"):
                    assert said.status_code not in (401, 403, 421), (method, path, name)
                else:
                    assert said.status_code == refused, (method, path, name)
                    assert TOKEN not in said.text


async def test_every_broken_body_is_refused_in_one_form(server: RewardServer) -> None:
    application = Application(Binding(), server.service.routes())
    refused = 0
    for body in bodies(GOOD, 400):
        status, said = await answered(application, "/v1/score", body)
        if status != 200:  # what was changed says something
            refused += 1
            check_refused(status, said, body)
    assert refused > 300
