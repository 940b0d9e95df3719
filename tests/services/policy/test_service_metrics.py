"""Metrics for Prometheus."""

from __future__ import annotations

import re

import httpx

from kapelle.rollout.setup import RolloutSetup
from kapelle.services.binding import Binding
from kapelle.services.policy.service import ServingLimits, serve_policy
from kapelle.services.policy.service_metrics import ServiceMetrics

SAMPLE = re.compile(r"[a-z_]+(\{[a-z]+=\"[^\"]*\"(,[a-z]+=\"[^\"]*\")*\})? [0-9.e+-]+")


def read(text: str) -> dict[str, float]:
    """Return all samples; fails for a line in another form than Prometheus'."""
    samples = {}
    for line in text.splitlines():
        if not line.startswith("# "):
            assert SAMPLE.fullmatch(line), line
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    return samples


def test_metrics_count_calls_and_tokens_without_texts(setup: RolloutSetup, web: httpx.Client) -> None:
    with serve_policy(setup, "duo", Binding(), ServingLimits()) as server:
        query = {"model": "first", "messages": [{"role": "user", "content": "swordfish"}], "max_tokens": 4}
        usage = web.post(f"{server.url}/v1/chat/completions", json=query).json()["usage"]
        web.post(f"{server.url}/sessions/swordfish/v1/responses", json={"model": "first"})
        web.request("SWORDFISH", f"{server.url}/swordfish")
        web.get(f"{server.url}/health", headers={"host": "swordfish"})
        team = web.post(f"{server.url}/v1/chat/completions", json={**query, "model": "duo"}).json()
        reply = web.get(f"{server.url}/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "swordfish" not in reply.text.lower()
    samples = read(reply.text)
    calls = 'kapelle_calls_total{method="%s",route="%s",status="%d"}'
    assert samples[calls % ("POST", "/v1/chat/completions", 200)] == 2
    assert samples[calls % ("POST", "/v1/responses", 400)] == 1
    assert samples[calls % ("", "", 404)] == 1
    assert samples[calls % ("GET", "/health", 421)] == 1
    turns = team["choices"][0]["kapelle"]["turns"]
    for agent, own in (("first", usage["completion_tokens"]), ("second", 0)):
        answer = own + sum(turn["tokens"] for turn in turns if turn["agent"] == agent)
        assert samples[f'kapelle_tokens_written_total{{agent="{agent}"}}'] == answer
    read_first = samples['kapelle_tokens_read_total{agent="first"}']
    assert usage["prompt_tokens"] < read_first <= usage["prompt_tokens"] + team["usage"]["prompt_tokens"]
    assert samples["kapelle_answers_in_flight"] == 0
    assert samples["kapelle_requests_waiting"] == 0
    assert samples['kapelle_call_seconds_count{route="/v1/chat/completions"}'] == 2


def test_a_duration_counts_in_every_bucket_that_holds_it() -> None:
    metrics = ServiceMetrics()
    for seconds in (0.005, 0.006, 3.0, 1000.0):
        metrics.called("GET", "/a", 200, seconds)
    samples = read(metrics.text({}))
    below = {bound: samples[f'kapelle_call_seconds_bucket{{route="/a",le="{bound}"}}'] for bound in
             ("0.005", "0.01", "2.5", "5.0", "600.0", "+Inf")}  # fmt: skip
    assert below == {"0.005": 1, "0.01": 2, "2.5": 2, "5.0": 3, "600.0": 3, "+Inf": 4}
    assert samples['kapelle_call_seconds_sum{route="/a"}'] == 1003.011
