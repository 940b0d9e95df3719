from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kapelle.errors import ConfigError, DataError
from kapelle.setup.team_file import read_team, vllm_commands

WRITTEN = """
format: 1
step: 3
policies:
  planner: {folder: ./planner, form: peft, rank: 12, base: Qwen/Qwen3-4B, agents: [planner, critic]}
  coder: {folder: ./coder, form: peft, rank: 4, base: Qwen/Qwen3-4B, agents: [coder]}
  judge: {folder: ./a judge, form: hf, agents: [judge]}
settings:
  name: four
  model: {path: Qwen/Qwen3-4B, dtype: bfloat16}
  team:
    agents:
      - {name: planner, weights: {adapter: planner}}
      - {name: critic, weights: {adapter: planner}}
      - {name: coder}
      - {name: judge, weights: {model: "./a judge", train: none}}
  environment: {name: arithmetic}
  workflow: {name: chain}
  algorithm: {name: grpo}
"""


def written(folder: Path, **changed: object) -> Path:
    (folder / "team.yaml").write_text(yaml.safe_dump({**yaml.safe_load(WRITTEN), **changed}, sort_keys=False))
    return folder


def test_each_base_has_a_command_in_which_adapters_have_their_agents_names(tmp_path: Path) -> None:
    adapters, whole = vllm_commands(written(tmp_path), 9000)
    assert adapters == (
        "vllm serve Qwen/Qwen3-4B --port 9000 --dtype bfloat16 --enable-lora --max-lora-rank 16 --max-loras 2 --lora-modules "
        f"planner={tmp_path}/planner critic={tmp_path}/planner coder={tmp_path}/coder"
    )
    assert whole == f"vllm serve '{tmp_path}/a judge' --port 9001 --dtype bfloat16 --served-model-name judge"
    large = {"p": {"folder": "./p", "form": "peft", "rank": 513, "base": "b", "agents": ["p"]}}
    with pytest.raises(ConfigError, match=r"up to rank 512.*513"):
        vllm_commands(written(tmp_path, policies=large))


def test_paths_are_those_beside_the_file_and_settings_are_laid_over(tmp_path: Path) -> None:
    team = read_team(written(tmp_path), ["evaluation.problems=7"])
    assert (team.step, team.config.evaluation.problems) == (3, 7)
    assert team.config.model.path == "Qwen/Qwen3-4B", "a name on the Hub stays one"
    assert team.adapters == {name: tmp_path / name for name in ("planner", "coder")}
    agents = team.config.team.agents
    assert not isinstance(agents, int)
    assert agents[3].weights.model == str(tmp_path / "a judge")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"format": 2}, "has the format 2, but this version of kapelle reads only 1"),
        ({"policies": [1]}, "is not a team file written by `kapelle export`"),
    ],
)
def test_another_file_is_no_team(tmp_path: Path, changed: dict[str, object], told: str) -> None:
    with pytest.raises(DataError, match=told):
        read_team(written(tmp_path, **changed))
