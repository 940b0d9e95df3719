from __future__ import annotations

from pathlib import Path

from tests.support.tiny import tiny_model

from kapelle.models.weights import save_model
from kapelle.rollout.evaluation.evaluate import evaluate_shared
from kapelle.rollout.evaluation.playing import model_config, open_rollout_setup
from kapelle.settings.weights import EndpointConfig


def test_an_environment_is_played_by_one_agent_alone() -> None:
    config = model_config("some/model", "arithmetic", ("environment.digits=3", "team.sampling.max_tokens=9"))
    assert (config.model.path, config.team.sharing, config.team.agents) == ("some/model", "frozen", 1)
    assert config.workflow.model_dump()["name"] == "solo"
    assert config.environment.model_dump()["digits"] == 3
    assert config.team.sampling.max_tokens == 9


def test_a_game_is_played_in_parallel() -> None:
    config = model_config("m", "matrix", ("team.agents=2",))
    assert config.workflow.model_dump()["name"] == "parallel"


def test_a_recipe_keeps_its_team_and_loses_its_own_weights(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        """
        environment: {name: arithmetic}
        workflow: {name: chain}
        algorithm: {name: mappo}
        warmup: {steps: 5}
        team:
          critic_sharing: shared
          agents:
            - {name: a, weights: {model: other/model, train: full}, system: Add.}
            - {name: b, weights: {adapter: x}, share_critic_with: a}
            - {name: c, weights: {endpoint: "http://host/v1", model: far}}
        """
    )
    config = model_config("some/model", str(recipe))
    assert not isinstance(config.team.agents, int)
    assert [agent.name for agent in config.team.agents] == ["a", "b", "c"]
    assert [agent.weights for agent in config.team.agents[:2]] == [None, None]
    assert isinstance(config.team.agents[2].weights, EndpointConfig)
    assert config.team.agents[0].system == "Add."
    assert (config.model.path, config.team.sharing, config.warmup) == ("some/model", "frozen", None)


def test_a_model_folder_plays_as_it_is(tmp_path: Path) -> None:
    model = tiny_model()
    save_model(tmp_path / "model", model)
    setup = open_rollout_setup(
        model_config(str(tmp_path / "model"), "arithmetic", ("team.sampling.max_tokens=4",))
    )
    tasks = [setup.environment.task("test", k) for k in range(3)]
    result = evaluate_shared(setup, tasks, seed=0)
    assert result.problems == 3
    assert result.failed == 0
    assert not any(turn.trained for group in result.groups for turn in group.episodes[0].turns)
