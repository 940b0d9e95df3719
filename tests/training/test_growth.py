"""A step leaves nothing behind: no cycle for the collector, no object, descriptor or thread more than the last one."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.patience import grown_since
from tests.support.tiny import SIZE, sections, tiny_model

from kapelle import Trainer
from kapelle.models.embedded import build_tokenizer
from kapelle.models.renderer import ChatRenderer
from kapelle.training.step_report import Step

PAID = {"name": "tests.support.plugins:Digest"}  # for noise, so that every step has something to learn from
DEBATE = {"name": "debate", "rounds": 2, "score_rounds": True}
FEW = {"agents": 2, "lora": {"rank": 2, "alpha": 4.0}, "sampling": {"max_tokens": 4}}
TWO = {"environment": PAID, "workflow": DEBATE, "team": FEW}
SOLO = {"environment": PAID, "workflow": {"name": "solo"}, "team": {**FEW, "agents": 1}}
FIT = {"target": "monte_carlo", "capacity": 8, "min_fill": 4, "updates": 1}

KINDS: dict[str, dict[str, Any]] = {
    "grpo": {**TWO, "algorithm": {"name": "grpo", "group_size": 2}},
    "failing": {
        "environment": {"name": "tests.rollout.test_bad_episodes:Odd", "way": "exits in a task"},
        "algorithm": {"name": "grpo", "group_size": 3},
        "training": {"steps": 40, "tasks_per_step": 2, "max_failed_share": 1.0},
    },
    "tree": {**TWO, "algorithm": {"name": "at_grpo", "group_size": 2, "tree": True}},
    "ppo": {**SOLO, "algorithm": {"name": "ppo"}},
    "happo": {**TWO, "algorithm": {"name": "happo"}},
    "qmix": {**TWO, "algorithm": {"name": "qmix", "group_size": 2, "credit": "difference", "fit": FIT}},
    "sft": {**TWO, "algorithm": {"name": "sft"}},
    "dpo": {**SOLO, "algorithm": {"name": "dpo", "group_size": 4}},
    "maporl": {**TWO, "algorithm": {"name": "maporl", "group_size": 2, "verifier": None}},
    "frozen": {
        **TWO,
        "team": {**FEW, "agents": [{"name": "ada"}, {"name": "ben", "weights": "frozen"}]},
        "algorithm": {"name": "grpo", "group_size": 2},
    },
    "tools": {
        "environment": {
            "name": "tools",
            "form": "hermes",
            "questions": PAID,
            "tools": [{"tool": "calculator"}],
        },
        "workflow": {"name": "tool_use"},
        "team": {**FEW, "agents": 1},
        "model": {"embedded": {**SIZE, "context": 2048}},
        "algorithm": {"name": "grpo", "group_size": 2},
    },
    "stale": {
        **TWO,
        "algorithm": {"name": "grpo", "group_size": 2, "loss": {"importance_cap": 2.0}},
        "training": {"steps": 40, "tasks_per_step": 2, "max_staleness": 2},
    },
    "evaluated": {
        **TWO,
        "algorithm": {"name": "grpo", "group_size": 2},
        "evaluation": {"problems": 2, "every": 2, "problems_while_training": 2, "before_and_after": False},
    },
}


@dataclass
class Run:
    """A run that tests let continue."""

    steps: Iterator[Step]
    taken: int = 0

    def up_to(self, number: int) -> None:
        """Take the steps that are left until that one is taken."""
        while self.taken < number:
            next(self.steps)
            self.taken += 1


@pytest.fixture(scope="module", autouse=True)
def _what_stands_already() -> Iterator[None]:
    """Leave what was imported before out of every count and collection: a million objects that stay as they are."""
    tiny_model()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=KINDS, scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    kind = {
        "training": {"steps": 40, "tasks_per_step": 2},
        "checkpoint": {"every": 4},
        "record": {"credit_episodes": 1},  # of two, DPO learns from both in some steps and from one in others
        **KINDS[request.param],
    }
    folder = tmp_path_factory.mktemp("growth") / "run"
    with Trainer(**sections(**kind), run_dir=folder) as trainer:
        yield Run(trainer.steps(40))


def alive() -> Counter[str]:
    """Return how many of kapelle's objects, tensors, descriptors and threads there are."""
    gc.collect()
    kinds = [type(o) for o in gc.get_objects()]
    held = Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("kapelle."))
    held["Tensor"] = sum(issubclass(kind, torch.Tensor) for kind in kinds)
    held["descriptors"] = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    held["threads"] = threading.active_count()
    return held


@pytest.mark.sample(12)
@pytest.mark.slow
def test_a_step_leaves_nothing_to_the_collector(run: Run) -> None:
    run.up_to(8)  # the next save, which leaves some empty pointers of safetensors, is after step 12
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        run.up_to(11)
        gc.collect()
        left = Counter(type(o).__qualname__ for o in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


@pytest.mark.sample(13)
@pytest.mark.slow
def test_later_steps_hold_no_more_than_earlier_ones(run: Run) -> None:
    run.up_to(12)
    before = alive()
    run.up_to(20)
    assert grown_since(before, alive) == Counter()


class _Heap(ctypes.Structure):
    _fields_ = tuple((f"field_{k}", ctypes.c_size_t) for k in range(10))  # struct mallinfo2 of glibc


def allocated() -> int:
    tell = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if tell is None:
        pytest.skip("only glibc tells what is allocated")
    tell.restype = _Heap
    heap = tell()
    return int(heap.field_7 + heap.field_4)  # uordblks, hblkhd


def test_a_tokeniser_that_knows_no_words_remembers_no_texts() -> None:
    renderer = ChatRenderer(build_tokenizer(256), 256)
    texts = [os.urandom(100).hex() for _ in range(1000)]
    renderer.completion("warm")
    before = allocated()
    for text in texts:
        assert len(renderer.completion(text)) == 201
    assert allocated() - before < 500_000  # 7 MB where it remembers
