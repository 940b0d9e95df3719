"""Run kapelle's versions of MRLM's eleven examples and check what they print."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "mrlm"
PRINTS = {
    "simple_ppo": [r"step   1  success \d\.\d\d", r"unseen sums: .*scored 20 of 20"],
    "train_code_ppo": [r"step   1  tests passed \d+%", r"it wrote: .*"],
    "train_math_ppo": [
        r"difficulty 1  step   1  chains \S+  equations \S+  sums \S+",
        r"difficulty 2  step   1  .*",
    ],
    "train_grpo_math": [r"step   1  success \S+  groups all alike \d+%"],
    "train_dpo_preferences": [r"step   1  margin \+0\.000  right 0%"],
    "train_sft_world_model": [r"behaviour alone  NLL \S+ → \S+ nats per token", r"both             NLL .*"],
    "train_tool_use_ppo": [
        r'a call is written {"name": "calculator".*',
        r"step   1  success \S+  turns \d\.\d\d",
    ],
    "train_distributed_ppo": [r"1 processes  step   1  sum of weights -?\d+\.\d{6}"],
    "train_multi_environment": [
        r"step   1  stories \S+  sums \S+|step   1  steps \S+  stories \S+  sums \S+"
    ],
    "train_hybrid_sft_ppo": [r"SFT step   1  NLL \S+ nats per token", r"PPO step   1  success \S+"],
    "train_from_config": [
        r"mrlm_ppo: \d+ of \d+ settings are not defaults",
        r"  warmup from the command line",
        "step   1  .*",
    ],
}
"""Lines that each prints, in this order."""
CONFIG = (
    "mrlm_ppo",
    "training.steps=1",
    "training.tasks_per_step=4",
    "warmup=null",
    "model.embedded.layers=1",
)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    monkeypatch.setenv("KAPELLE_CACHE", str(tmp_path))

    def lines(name: str, *given: object) -> list[str]:
        runpy.run_path(str(FOLDER / f"{name}.py"))["main"](*given)
        return capsys.readouterr().out.splitlines()

    return lines


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTS)
def test_output(name: str, run: Callable[..., list[str]]) -> None:
    printed = run(name, *(CONFIG if name == "train_from_config" else (1,)))
    places = [
        next((k for k, line in enumerate(printed) if re.fullmatch(each, line)), None) for each in PRINTS[name]
    ]
    assert None not in places, printed
    assert places == sorted(places, key=lambda place: place or 0)


@pytest.mark.long
@pytest.mark.slow
def test_examples_learn_in_few_steps(run: Callable[..., list[str]]) -> None:
    preferred = run("train_dpo_preferences", 6)[-1]
    assert preferred.endswith("right 100%")
    assert float(preferred.split("margin ")[1].split()[0]) > 0.0
    for line in run("train_sft_world_model", 10):
        first, last = map(float, re.findall(r"\d+\.\d+", line))
        assert last < first - 0.5
