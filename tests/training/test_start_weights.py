"""`start_from`: from a run, one of its checkpoints, an adapter or a model, for all agents or for one."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.five_steps import settings
from tests.support.tiny import same_bits

from kapelle.cli.arguments import EVERYONE, start_words
from kapelle.errors import CheckpointError, ConfigError, ModelError
from kapelle.settings import schema
from kapelle.settings.schema import by_agent
from kapelle.settings.weights import PastAdapter
from kapelle.training.trainer import Trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("start") / "run"
    with Trainer(**{**settings(), "checkpoint": {"every": 1, "keep": 9}}, run_dir=run) as trainer:
        trainer.train(2)
    return run


def begun(start: Any, tmp_path: Path, **over: Any) -> dict[str, dict[str, Any]]:
    """The weights of each trained policy of a run that starts so and takes no step."""
    with Trainer(**{**settings(), **over, "start_from": start}, run_dir=tmp_path / "new") as trainer:
        return {
            name: {k: v.clone() for k, v in trainer.engine.weights(name).items()}
            for name in trainer.team.trained
        }


def test_what_is_named_is_found(trained: Path, tmp_path: Path) -> None:
    assert EVERYONE == schema.EVERYONE
    assert by_agent("runs/a") == {"*": "runs/a"}
    assert start_words(None) == []
    assert start_words(["runs/a", "critic=b", "./x=y/z"]) == ['start_from={"*": "./x=y/z", "critic": "b"}']
    first, second = (begun(f"{trained}@{step}", tmp_path / str(step)) for step in (1, 2))
    newest, fresh = begun(str(trained), tmp_path / "newest"), begun({}, tmp_path / "fresh")
    assert same_bits(newest, second)
    assert not same_bits(first, second)
    assert not same_bits(fresh, first)
    name = next(iter(first))
    folder = trained / "checkpoints" / "00000001" / "policies"
    alone = begun({name: str(folder / name)}, tmp_path / "alone")
    assert same_bits(alone[name], first[name])
    assert all(same_bits(alone[other], fresh[other]) for other in first if other != name)


def test_past_selves_and_teachers_are_named_by_their_run_as_well(trained: Path, tmp_path: Path) -> None:
    first, second = sorted(
        path.name for path in (trained / "checkpoints" / "00000001" / "policies").iterdir()
    )
    folder = trained / "checkpoints" / "00000001" / "policies" / first
    newest = trained / "checkpoints" / "00000002" / "policies"
    agents = [{"name": first, "weights": {"past": f"{trained}@1"}}, {"name": second}]
    with Trainer(**{**settings(), "team": {**settings()["team"], "agents": agents}}) as trainer:
        saved = trainer.config.team.agents
        assert isinstance(saved, tuple)
        assert saved[0].weights == PastAdapter(past=str(folder)), "the folder, whatever the run saves later"
        assert trainer.team.policies[first].past == str(folder)
    for named in (str(trained), {first: str(trained), second: str(trained)}):
        with Trainer(**{**settings(), "algorithm": {"name": "distill", "teacher": named}}) as trainer:
            assert trainer.config.model_dump()["algorithm"]["teacher"] == {
                first: str(newest / first),
                second: str(newest / second),
            }
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 9"):
        Trainer(**{**settings(), "algorithm": {"name": "distill", "teacher": f"{trained}@9"}})
    strangers = [{"name": "ada", "weights": {"past": str(trained)}}, {"name": second}]
    with pytest.raises(
        ConfigError, match=f"`weights.past`: .* no weights for 'ada', only for: {first}, {second}"
    ):
        Trainer(**{**settings(), "team": {**settings()["team"], "agents": strangers}})
    assert not tmp_path.joinpath("new").exists()


def test_what_cannot_be_is_refused_by_name(trained: Path, tmp_path: Path) -> None:
    policy = next((trained / "checkpoints" / "00000001" / "policies").iterdir())
    for start, error, said in (
        ({"nobody": str(policy)}, ConfigError, "`start_from` names 'nobody'"),
        (str(tmp_path), ConfigError, "not a run, checkpoint, PEFT adapter or model"),
        (f"{trained}@9", CheckpointError, "no complete checkpoint of step 9"),
    ):
        with pytest.raises(error, match=said):
            begun(start, tmp_path)
    with pytest.raises(ModelError, match="rank"):
        begun(str(policy), tmp_path, team={**settings()["team"], "lora": {"rank": 3}})
