"""Who may call the reward server over HTTP, and what it makes of bodies that are none."""

from __future__ import annotations

from typing import Any

import httpx
from tests.services.policy.test_safety import CREDENTIALS, TOKEN
from tests.support.hostile_bodies import answered, bodies, check_refused

from kapelle.services.binding import Binding
from kapelle.services.http import Application
from kapelle.services.reward.scores import Scorer
from kapelle.services.reward.service import RewardLimits, RunningRewardServer, serve_reward

GOOD: dict[str, Any] = {
    "items": [
        {"question": "abc", "answer": "abc"},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "answer": "z"},
    ]
}


def test_every_route_is_behind_the_same_check(scorer: Scorer) -> None:
    binding = Binding(token=TOKEN, names=("trainer.example",))
    with serve_reward(scorer, binding, RewardLimits()) as served, httpx.Client(base_url=served.url) as client:
        paths = [(method, route.path) for route in served.service.routes() for method in route.methods or ()]
        assert {("GET", "/health"), ("GET", "/v1/model"), ("POST", "/v1/score")} <= set(paths)
        assert {path for _, path in paths} == {"/health", "/v1/model", "/v1/score"}
        for method, path in [*paths, ("GET", "/none"), ("POST", "/none"), ("DELETE", "/v1/model")]:
            for name, (headers, refused) in CREDENTIALS.items():
                said = client.request(method, path, headers=headers, json={} if method == "POST" else None)
                # Reading changes nothing, and the browser shows no other page what was read.
                if refused is None or (refused == 403 and method in ("GET", "HEAD")):
                    assert said.status_code not in (401, 403, 421), (method, path, name)
                else:
                    assert said.status_code == refused, (method, path, name)
                    assert TOKEN not in said.text


async def test_every_broken_body_is_refused_in_one_form(server: RunningRewardServer) -> None:
    application = Application(Binding(), server.service.routes())
    refused = 0
    for body in bodies(GOOD, 400):
        status, said = await answered(application, "/v1/score", body)
        if status != 200:  # what was changed says something
            refused += 1
            check_refused(status, said, body)
    assert refused > 300
