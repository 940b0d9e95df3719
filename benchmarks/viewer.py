"""How fast the viewer opens a large run: `python -m benchmarks run viewer`.

`python -m benchmarks.viewer 1000` is a tenth of it, `python -m benchmarks.viewer 1000 packed` one in compressed files.

The run is synthetic: 100 episodes of two turns in each of 10,000 steps, about 10 kB each, most of it token ids, as in real
runs. Timed are calls over HTTP: the first ones with no index and files that the system has just written, then while the index is
made, then with it. The run is deleted at the end.
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

from kapelle.runs.step_rows import append_step
from kapelle.services.binding import Binding
from kapelle.services.http import HttpServer
from kapelle.viewer.library import Library
from kapelle.viewer.server import viewer

STEPS, EPISODES = 10_000, 100
CONFIG = "name: large\nseed: 0\nalgorithm: {name: grpo}\nenvironment: {name: arithmetic}\ntraining: {steps: 10000}\nteam: {agents: [{name: solver}, {name: critic}]}\n"
MEANWHILE = {
    "newest": "/run/large/episodes",
    "page 20": "/run/large/episodes?page=20",
    "an episode": "/run/large/episode/train/{step}/7",
    "most reward": "/run/large/episodes?sort=most+reward",
    "curves": "/curves.json?run=large",
    "search": "/run/large/episodes?q=carry+beryl7",
}
PAGES = {
    "newest": "",
    "page 200": "?page=200",
    "most reward": "?sort=most+reward",
    "least reward of one agent": "?sort=least+reward&agent=critic",
    "greatest spread, wrong": "?sort=greatest+spread&outcome=wrong",
    "search, rare": "?q=carry+beryl7",
    "search, in every episode": "?q=carry",
    "search, in every episode, longest": "?q=carry&sort=longest",
    "search, in none": "?q=nowhere",
    "steps 100 to 200": "?from=100&to=200&sort=longest",
}


def write(run: Path, steps: int, episodes: int, *, packed: bool = False) -> int:
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
            if packed:
                append_step(run / "episodes" / "train", step, "".join(lines).encode())
            else:
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


def indexing(web: httpx.Client, steps: int) -> dict[str, Any]:
    """Ask for pages until the index is made; return the seconds that it took and the milliseconds of the pages."""
    start = time.perf_counter()
    taken: dict[str, list[float]] = {name: [] for name in MEANWHILE}
    found: dict[str, Any] = {}
    while "words" not in found:
        for name, path in MEANWHILE.items():
            began = time.perf_counter()
            text = web.get(path.format(step=steps // 2)).raise_for_status().text
            taken[name].append(1000 * (time.perf_counter() - began))
            if name == "newest" and "orders and filters" not in text:
                found.setdefault("rows", round(time.perf_counter() - start, 1))
            if name == "search" and "data-indexing" not in text:
                found.setdefault("words", round(time.perf_counter() - start, 1))
        time.sleep(5)
    return {
        "index_s": found,
        "while it is made": {
            name: {"median_ms": round(median(times), 1), "most_ms": round(max(times), 1), "calls": len(times)}
            for name, times in taken.items()
        },
    }


def run(steps: int = STEPS, episodes: int = EPISODES, packed: bool = False) -> dict[str, Any]:
    """Return sizes and times."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = f"{place}/cache"
        folder = Path(place) / "runs" / "large"
        size = write(folder, steps, episodes, packed=packed)
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
            found["episodes, no index"] = timed(web, "/run/large/episodes", 2)
            found["an episode, no index"] = timed(web, f"/run/large/episode/train/{steps // 2}/7", 2)
            found |= indexing(web, steps)
            found["index_gigabytes"] = round(
                sum(f.stat().st_size for f in (Path(place) / "cache").rglob("*") if f.is_file()) / 1e9, 2
            )
            for name, query in PAGES.items():
                found[name] = timed(web, f"/run/large/episodes{query}")
            found["an episode"] = timed(web, f"/run/large/episode/train/{steps // 2}/7")
        return found


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    print(json.dumps(run(steps, packed="packed" in sys.argv), indent=1))
