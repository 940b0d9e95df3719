"""How fast the viewer opens a large run: `python -m benchmarks run viewer`, or `python -m benchmarks.viewer 1000` for a tenth.

The run is synthetic: 100 episodes of two turns in each of 10,000 steps, about 10 kB each, most of it token ids, as in real
runs. Timed are calls over HTTP, the first one with no index and files that the system has just written. It is deleted
at the end.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from kapelle.services.binding import Binding
from kapelle.services.http.server import HttpServer
from kapelle.viewer.index import Index
from kapelle.viewer.library import Library
from kapelle.viewer.server import viewer

STEPS, EPISODES = 10_000, 100
CONFIG = "name: large\nseed: 0\nalgorithm: {name: grpo}\nenvironment: {name: arithmetic}\ntraining: {steps: 10000}\nteam: {agents: [{name: solver}, {name: critic}]}\n"
PAGES = {
    "newest": "",
    "page 200": "?page=200",
    "most reward": "?sort=most+reward",
    "least reward of one agent": "?sort=least+reward&agent=critic",
    "greatest spread, wrong": "?sort=greatest+spread&outcome=wrong",
    "search": "?q=carry+beryl",
    "steps 100 to 200": "?from=100&to=200&sort=longest",
}


def write(run: Path, steps: int, episodes: int) -> int:
    """Write a synthetic run and return its bytes."""
    draw = random.Random(0)
    (run / "episodes" / "train").mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    (run / "lock").write_text("")
    status = {
        "state": "finished",
        "phase": "done",
        "step": steps,
        "pid": 1,
        "host": "x",
        "started": "",
        "updated": "",
    }
    (run / "status.json").write_text(json.dumps(status))
    ids = json.dumps([draw.randrange(150_000) for _ in range(450)], separators=(",", ":"))
    said = json.dumps([draw.randrange(150_000) for _ in range(60)], separators=(",", ":"))
    logps = json.dumps([round(-draw.random(), 12) for _ in range(60)])
    names = [f"{a}{b}" for a in ("amber", "beryl", "coral", "delta") for b in range(50)]
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {f"metric_{k}/solver": draw.random() for k in range(30)} | {
                f"metric_{k}/critic": draw.random() for k in range(25)
            }
            file.write(json.dumps({"step": step, "success": draw.random(), "time/step": 1.0, **row}) + "\n")
            lines = []
            for k in range(episodes):
                reward, word = draw.random(), draw.choice(names)
                turns = ",".join(
                    f'{{"agent":"{agent}","policy":"{agent}","version":{step},"weights_hash":"h","index":{n},"seen":{n},"prompt_ids":{ids},'
                    f'"completion_ids":{said},"logprobs":{logps},"finish_reason":"stop","text":"I carry {word} over {k}","heard":[],'
                    '"reward":0.0,"score":null,"parent":null,"worth":null,"trained":true}'
                    for n, agent in enumerate(("solver", "critic"))
                )
                lines.append(
                    f'{{"step":{step},"group":{k // 8},"task":{{"id":"t{step}-{k // 8}","question":"{word}?","data":{{}},"part":""}},"seed":{k},'
                    f'"agents":["solver","critic"],"turns":[{turns}],"rewards":{{"solver":{reward},"critic":{1 - reward}}},"success":{float(reward > 0.5)},'
                    '"info":{},"truncated":false,"error":null,"branches":[],"payments":[],"continued":{},"roles":{}}\n'
                )
            (run / "episodes" / "train" / f"{step:08d}.jsonl").write_text("".join(lines))
    return sum(file.stat().st_size for file in run.rglob("*") if file.is_file())


def timed(web: httpx.Client, path: str, times: int = 5) -> dict[str, float]:
    """Return the milliseconds of a page: the first call and the median of the further ones."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        answer = web.get(path)
        answer.raise_for_status()
        taken.append(1000 * (time.perf_counter() - start))
    return {"first_ms": round(taken[0], 1), "again_ms": round(median(taken[1:]), 1)}


def run(steps: int = STEPS, episodes: int = EPISODES) -> dict[str, Any]:
    """Return sizes and times."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = f"{place}/cache"
        folder = Path(place) / "runs" / "large"
        size = write(folder, steps, episodes)
        found: dict[str, Any] = {
            "steps": steps,
            "episodes": steps * episodes,
            "gigabytes": round(size / 1e9, 2),
        }
        with (
            HttpServer(Binding(), viewer(Library([folder.parent]), Binding())) as server,
            httpx.Client(base_url=server.url, timeout=600.0) as web,
        ):
            found["list"] = timed(web, "/")
            found["curves"] = timed(web, "/curves.json?run=large")
            found["episodes, no index"] = timed(web, "/run/large/episodes")
            found["an episode, no index"] = timed(web, f"/run/large/episode/train/{steps // 2}/7")
            start = time.perf_counter()
            Index(folder, ["solver", "critic"]).finish()
            found["index_s"] = round(time.perf_counter() - start, 1)
            found["index_gigabytes"] = round(
                sum(f.stat().st_size for f in (Path(place) / "cache").rglob("*") if f.is_file()) / 1e9, 2
            )
            for name, query in PAGES.items():
                found[name] = timed(web, f"/run/large/episodes{query}")
            found["an episode"] = timed(web, f"/run/large/episode/train/{steps // 2}/7")
        return found


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]) if len(sys.argv) > 1 else STEPS), indent=1))
