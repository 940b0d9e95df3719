"""What ranks compare before a run begins."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.support.tiny import sections
from torch import Tensor

from kapelle.errors import ConfigError
from kapelle.runtime.ranks import ALONE, Peers, Ranks
from kapelle.setup.preparation import prepare
from kapelle.setup.recipe import resolve
from kapelle.training.observer import Silent
from kapelle.training.records import open_records
from kapelle.training.starting import check_same_run, join_ranks


class Second(Ranks):
    """Rank 1 of 2; rank 0 shares the same, with one value changed."""

    rank, size = 1, 2

    def __init__(self, **changed: object) -> None:
        self.changed = changed

    def all_gather(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        own = work()
        return [json.dumps({**json.loads(own or b"{}"), **self.changed}).encode(), own]

    def store_barrier(self) -> Peers:
        raise AssertionError("nothing meets aside here")

    def add(self, tensors: Sequence[Tensor]) -> None:
        raise AssertionError(tensors)


def test_settings_and_versions_are_those_of_the_first() -> None:
    config = resolve(sections())
    team = prepare(config).team
    check_same_run(ALONE, config, team, {})
    check_same_run(Second(), config, team, {})
    for changed in ("`optimizer.lr`", "version of torch"):
        with pytest.raises(ConfigError, match=f"Rank 1 does not run what rank 0 runs: {changed} is"):
            check_same_run(Second(**{changed: "another"}), config, team, {})


def test_without_a_launcher_a_run_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert join_ranks(resolve(sections())) == ALONE


def test_only_the_first_opens_records(tmp_path: Path) -> None:
    config = resolve(sections())
    assert open_records(tmp_path / "second", config, {}, Silent(), resume=False, ranks=Second()).run is None
    assert not (tmp_path / "second").exists()
    first = open_records(tmp_path / "first", config, {}, Silent(), resume=False)
    first.close()
    assert (tmp_path / "first" / "config.yaml").is_file()
