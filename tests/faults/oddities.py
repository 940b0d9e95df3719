"""Episode states, endpoints and judges that misbehave: each costs its own episodes and never the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tests.faults import servers, worlds
from tests.faults.forks import command, fork
from tests.faults.judging import Outcome, Verdict, defect_of, last_line
from tests.faults.world import Trial, World
from tests.support.episode_lines import lines_in

_RECIPE: Mapping[str, Any] = {
    "name": "odd",
    "model": {
        "embedded": {
            "hidden": 16,
            "layers": 1,
            "heads": 2,
            "kv_heads": 1,
            "intermediate": 32,
            "context": 2048,
        }
    },
    "team": {
        "lora": {"rank": 2, "alpha": 4.0},
        "sampling": {"max_tokens": 3},
        "agents": [{"name": "ada"}, {"name": "ben"}],
    },
    "workflow": {"name": "debate"},
    "algorithm": {"name": "grpo", "group_size": 2, "loss": {"entropy_coefficient": 0.05}},
    "training": {"steps": 2, "tasks_per_step": 4, "max_failed_share": 1.0},
    "optimizer": {"lr": 1e-2},
    "evaluation": {"problems": 4},
    "checkpoint": {"every": 1},
}


def environments(world: World, seed: int) -> Iterator[Trial]:
    """Yield a run for each way to misbehave and each place."""
    del seed
    ways = [(place, how) for place in worlds.PLACES for how in (*worlds.ACTS, *worlds.HANGS)]
    tables = {
        "reward": worlds.REWARDS,
        "success": worlds.SUCCESSES,
        "info": worlds.INFOS,
        "sight": worlds.SIGHTS,
    }
    ways += [(what, how) for what, table in tables.items() for how in table]
    for number, (what, how) in enumerate(ways):
        if how == "waits for ever" and what not in {"step", "score", "close"}:
            continue
        environment = {"name": "tests.faults.worlds:Odd", "what": what, "how": how}
        yield Trial(f"{what}: {how}", partial(_odd_world, world, environment, f"odd-{number}"))


def endpoints(world: World, seed: int) -> Iterator[Trial]:
    """Yield a run with a frozen agent, and one with a judge, for each answer of a server."""
    del seed
    answers = {**servers.ANSWERS, **servers.SLOW}
    for number, (name, answer) in enumerate(answers.items()):
        for whom in ("agent", "judge"):
            place = f"server-{whom}-{number}"
            yield Trial(
                f"the {whom}'s server answers {name}", partial(_odd_server, world, whom, answer, place)
            )


def _recipe(world: World, place: str, over: Mapping[str, Any]) -> Path:
    from tests.faults.recipes import merged

    timeouts = {"environment": 2.0, "episode": 4.0, "engine": 1.0, "grader": 1.0}
    tree = merged(merged(_RECIPE, over), {section: {"timeout": s} for section, s in timeouts.items()})
    file = world.scratch / f"{place}.yaml"
    file.write_text(yaml.safe_dump(tree), "utf-8")
    return file


def _odd_world(world: World, environment: Mapping[str, Any], place: str) -> Verdict:
    recipe, run = _recipe(world, place, {"environment": environment}), world.scratch / place
    ended = fork(command("train", recipe, "--run-dir", run, "--no-rich"), run.with_suffix(".log"))
    try:
        verdict = defect_of(ended)
        if verdict is not None:
            return Verdict(*verdict)
        if ended.code != 0:
            return Verdict(Outcome.LOST, f"the run ended for its odd episodes: {last_line(ended.said)}")
        return _judge_shares(run)
    finally:
        shutil.rmtree(run, ignore_errors=True)


def _judge_shares(run: Path) -> Verdict:
    """Judge which episodes failed: all odd ones or none of them, and no other."""
    failed = {True: 0, False: 0}
    total = dict(failed)
    for lines in lines_in(run).values():
        for row in map(json.loads, lines.splitlines()):
            odd = int(row["task"]["id"].partition("-")[2]) % 3 == 0
            total[odd] += 1
            failed[odd] += row.get("error") is not None
    if failed[False] or failed[True] not in (0, total[True]) or not total[False]:
        return Verdict(
            Outcome.LOST, f"failed: {failed[True]} of {total[True]} odd episodes, {failed[False]} others"
        )
    return Verdict(Outcome.RECOVERED, f"{failed[True]} of {total[True]} odd episodes failed")


def _odd_server(world: World, whom: str, answer: servers.Answer, place: str) -> Verdict:
    run = world.scratch / place
    with servers.serving(answer) as url:
        served = {"endpoint": url, "model": "odd"}
        if whom == "agent":
            agents = [{"name": "ada"}, {"name": "ben", "weights": served}]
            over: dict[str, Any] = {
                "team": {"agents": agents},
                "environment": {"name": "tests.support.plugins:Digest"},
            }
        else:
            over = {
                "environment": {"name": "debate_topics", "rounds": 1, "judge": served},
                "workflow": {"name": "play"},
            }
        ended = fork(
            command("train", _recipe(world, place, over), "--run-dir", run, "--no-rich"),
            run.with_suffix(".log"),
        )
    shutil.rmtree(run, ignore_errors=True)
    broken = defect_of(ended)
    if broken is not None:
        return Verdict(*broken)
    # All its episodes failed: the run continues, or says so and ends.
    return Verdict(Outcome.RECOVERED if ended.code == 0 else Outcome.CLEAR, last_line(ended.said))
