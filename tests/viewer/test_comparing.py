"""Runs grouped by any setting, how many of them are drawn, and the table of what differs."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from tests.support.viewed_runs import client_of, write_run


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a viewer of 30 runs: three rates, five seeds each, of two algorithms."""
    folder = tmp_path_factory.mktemp("many")
    for algorithm in ("grpo", "mappo"):
        for lr in (0.001, 0.01, 0.1):
            for seed in range(5):
                write_run(folder / f"{algorithm}-{lr}-{seed}", steps=1, algorithm=algorithm, lr=lr, seed=seed)
    with client_of(folder) as made:
        yield made


@pytest.fixture(scope="module")
def runs(web: httpx.Client) -> str:
    keys = [f"{a}-{lr}-{seed}" for a in ("grpo", "mappo") for lr in (0.1, 0.001, 0.01) for seed in range(5)]
    return "&".join(f"run={key}" for key in keys)


def labels(web: httpx.Client, query: str) -> list[str]:
    """Return the names of the curves that a query draws."""
    return [source["label"] for source in web.get(f"/curves.json?{query}").json()["sources"]]


def test_five_runs_or_more_are_grouped_by_what_varies(web: httpx.Client, runs: str) -> None:
    page = web.get(f"/compare?{runs}").text
    assert "30 runs in 6 groups; all 6 groups are drawn" in page
    assert "grpo, lr 0.001, mean of 5" in labels(web, runs)
    assert labels(web, "&".join(f"run=grpo-0.1-{seed}" for seed in range(5))) == ["pair, grpo, mean of 5"]
    assert len(labels(web, "&".join(f"run=grpo-0.1-{seed}" for seed in range(4)))) == 4


def test_the_number_of_curves_can_be_chosen(web: httpx.Client, runs: str) -> None:
    runs = f"{runs}&by="
    assert "24 of 30 curves are drawn" in web.get(f"/compare?{runs}").text
    assert len(labels(web, runs)) == 24
    assert "all 30 runs are drawn" in web.get(f"/compare?{runs}&most=48").text
    assert len(labels(web, f"{runs}&most=48")) == 30
    assert "24 of 30" in web.get(f"/compare?{runs}&most=1000000").text, "an unknown number has the default"


def test_runs_are_grouped_by_any_settings_in_the_order_of_their_values(web: httpx.Client, runs: str) -> None:
    drawn = web.get(f"/curves.json?{runs}&by=optimizer.lr").json()["sources"]
    assert [source["label"] for source in drawn] == [
        f"optimizer.lr {lr}, mean of 10" for lr in (0.001, 0.01, 0.1)
    ]
    drawn = web.get(f"/curves.json?{runs}&by=algorithm.name&by=optimizer.lr&spread=median").json()["sources"]
    assert [source["label"] for source in drawn][:2] == [
        "grpo, lr 0.001, median of 5",
        "grpo, lr 0.01, median of 5",
    ]
    assert len(drawn) == 6
    page = web.get(f"/compare?{runs}&by=algorithm.name&by=optimizer.lr").text
    assert "30 runs in 6 groups; all 6 groups are drawn" in page
    assert "75.0–75.0" in page, "the interval of five seeds that all have 75 %"


def test_an_unknown_setting_is_one_group_and_is_escaped(web: httpx.Client, runs: str) -> None:
    answer = web.get("/compare?" + runs + "&by=%3Cscript%3Ealert(1)%3C/script%3E")
    assert "30 runs in 1 group; the group is drawn." in answer.text
    alone = web.get("/compare?run=grpo-0.1-0&by=seed").text
    assert "1 run in 1 group; the group is drawn." in alone
    assert "1 run together" in alone
    assert "<script>alert" not in answer.text
