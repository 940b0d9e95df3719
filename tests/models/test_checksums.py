"""Weights that kapelle wrote are what they were, or are not taken: past selves, hand-overs, verifiers, warm-ups, models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import TINY
from tests.support.tiny import frozen_copy, same_bits, sections

from kapelle import Trainer
from kapelle.errors import ModelError
from kapelle.models.checksums import CHECKSUMS, base_of, verify_folder, write_checksums
from kapelle.training.observer import Silent


def flip(file: Path, bit: int = -3) -> None:
    """Turn one bit round, counted from the end where it is negative."""
    content = bytearray(file.read_bytes())
    content[bit // 8 if bit >= 0 else bit] ^= 1 << (bit % 8 if bit >= 0 else 0)
    file.write_bytes(content)


def agents(**first: Any) -> dict[str, Any]:
    two = [{"name": "ada", **first}, {"name": "bo"}]
    return {"agents": two, "lora": {"rank": 2, "alpha": 4.0}, "sampling": {"max_tokens": 4}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run; not to be changed."""
    run = tmp_path_factory.mktemp("made") / "run"
    with Trainer(**sections(team=agents()), run_dir=run) as trainer:
        trainer.train(1)
    return run / "checkpoints" / "00000001"


@pytest.fixture
def adapter(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "policies" / "ada", tmp_path / "ada"))


@pytest.mark.slow
def test_every_flipped_bit_of_the_list_is_rejected_or_changes_only_the_base(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    write_checksums(tmp_path, "0123456789abcdef")
    content = (tmp_path / CHECKSUMS).read_bytes()
    passed = []
    for bit in range(8 * len(content)):
        (tmp_path / CHECKSUMS).write_bytes(content)
        flip(tmp_path / CHECKSUMS, bit)
        try:
            assert verify_folder(tmp_path)
        except ModelError:
            continue
        passed.append(base_of(tmp_path))
    # What passes is another base, which a trainer compares with its own; nothing loses the list of files.
    assert len(passed) < 200
    assert "0123456789abcdef" not in passed
    assert None not in passed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", CHECKSUMS])
@pytest.mark.parametrize("how", ["past", "start_from"])
def test_an_adapter_with_a_flipped_bit_is_not_trained_with(adapter: Path, how: str, name: str) -> None:
    team = agents(weights={"past": str(adapter)}) if how == "past" else agents()
    start = {"ada": adapter} if how == "start_from" else {}
    Trainer(**sections(team=team), start_from=start).close()
    flip(adapter / name, -3 if name.endswith(".safetensors") else -6)
    with pytest.raises(ModelError, match=r"damaged|is not a PEFT adapter"):
        Trainer(**sections(team=team), start_from=start)


def test_a_file_that_is_gone_is_named(adapter: Path) -> None:
    (adapter / "more.txt").write_text("my notes")  # what was added is no one's business
    assert verify_folder(adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"adapter_config\.json was removed"):
        verify_folder(adapter)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_whole_model_with_a_flipped_bit_is_not_loaded(tmp_path: Path, name: str) -> None:
    whole = {"agents": 2, "sharing": "shared", "sampling": {"max_tokens": 4}}
    with Trainer(**sections(team=whole)) as first:
        first.save_policies(tmp_path)
    folder = tmp_path / "policies" / "shared"
    Trainer(**sections(model={"path": str(folder)})).close()
    Trainer(**sections(team=whole), start_from={"shared": folder}).close()
    flip(folder / name)
    with pytest.raises(ModelError, match=f"{name} has changed"):
        Trainer(**sections(model={"path": str(folder)}))
    with pytest.raises(ModelError, match=f"{name} has changed"):
        Trainer(**sections(team=whole), start_from={"shared": folder})


@pytest.mark.parametrize("name", ["value_head.safetensors", "adapter_model.safetensors", "verifier.json"])
def test_a_verifier_with_a_flipped_bit_does_not_judge(tmp_path: Path, name: str) -> None:
    judge = {
        "environment": {"name": "tests.support.copies:Copies", "letters": 3},
        "workflow": {"name": "solo"},
        "algorithm": {"name": "verifier", "data": "recorded", "group_size": 6},
        "team": {"sharing": "frozen", "agents": 1, "critic_lora": {"rank": 2, "alpha": 4.0}},
    }
    with Trainer(**sections(**judge)) as trainer:
        trainer.save_policies(tmp_path)
    folder = tmp_path / "verifier"
    score = {"name": "maporl", "verifier": str(folder), "least_auc": None}
    team = {"agents": 2, "critic_lora": {"rank": 2, "alpha": 4.0}, "sampling": {"max_tokens": 4}}
    paid = sections(algorithm=score, team=team)
    Trainer(**paid).close()
    flip(folder / name)
    with pytest.raises(ModelError, match=f"{name} has changed"):
        Trainer(**paid)


class Heard(Silent):
    """Remembers what was said of the run's phases."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def phase(self, name: str, detail: str) -> None:
        self.said.append((name, detail))


class TestWarmup:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("KAPELLE_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache" / "warmup"

    def warmed(self) -> tuple[Any, list[str]]:
        heard = Heard()
        with Trainer.from_recipe("demo", *TINY, observer=heard) as trainer:
            weights = frozen_copy(dict(trainer.models["base"].base_parameters()))
        return weights, [detail for name, detail in heard.said if name == "warm-up"]

    @pytest.mark.sample(5)
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", CHECKSUMS]
    )
    def test_one_with_a_flipped_bit_is_recreated_exactly(self, cache: Path, name: str) -> None:
        first, _ = self.warmed()
        (folder,) = cache.iterdir()
        sound = (folder / name).read_bytes()
        flip(folder / name)
        again, said = self.warmed()
        assert same_bits(again, first)
        assert said[1].startswith("the cached model is deleted and trained again: ")
        assert name in said[1]
        assert (folder / name).read_bytes() == sound
        assert list(cache.iterdir()) == [folder]
        assert self.warmed()[1] == ["cached"]
