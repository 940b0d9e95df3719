"""Module names of before go on, as the very same modules, and say what they are called now."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from kapelle.algorithm import Algorithm, CriticSpec, Data, Loss, Order, Targets, Update
from kapelle.algorithms.cory import Exchange
from kapelle.algorithms.shared.orders import one_after_another
from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.rollout.compose import ComposedEngine
from kapelle.former_names import MODULES, NAMES, PACKAGES, install, observer_of, release_caches
from kapelle.rows import Column
from kapelle.signals.critic_values import CriticValues
from kapelle.signals.embeddings import Embeddings
from kapelle.signals.greedy import GreedyBaseline
from kapelle.signals.proximal import ProximalLogProbs
from kapelle.signals.reference import ReferenceLogProbs, RefreshReferences
from kapelle.signals.verifier import VerifierScores


def value_loss(values_K: Tensor, targets: Targets) -> Loss:
    return Loss(values_K.sum(), values_K.sum())


@pytest.mark.parametrize("old", MODULES)
def test_a_former_module_is_the_one_of_today(old: str) -> None:
    sys.modules.pop(f"kapelle.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"`kapelle.{old}` is now `kapelle.{MODULES[old]}`"):
        found = import_module(f"kapelle.{old}")
    today = import_module(f"kapelle.{MODULES[old]}")
    assert found is today
    assert today.__spec__ is not None
    assert today.__spec__.name == f"kapelle.{MODULES[old]}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_hands_over_what_the_module_of_its_name_held(package: str) -> None:
    home = import_module(f"kapelle.{PACKAGES[package]}")
    held = [name for name, value in vars(home).items() if getattr(value, "__module__", None) == home.__name__]
    assert held
    for name in held:
        if not name.startswith("__"):
            with pytest.warns(DeprecationWarning, match=f"`{home.__name__}.{name}`"):
                assert getattr(import_module(f"kapelle.{package}"), name) is getattr(home, name)


@pytest.mark.parametrize("module", NAMES)
def test_a_former_name_in_a_module_is_the_one_of_today(module: str) -> None:
    home = import_module(f"kapelle.{module}".rstrip("."))
    for old, new in NAMES[module].items():
        moved_to, _, name = new.rpartition(":")
        today = import_module(f"kapelle.{moved_to}") if moved_to else home
        with pytest.warns(DeprecationWarning, match=f"{old}` is now `{today.__name__}.{name}`"):
            assert getattr(home, old) is getattr(today, name)


class Resting:
    def __init__(self) -> None:
        self.rested = 0

    def rest(self) -> None:
        self.rested += 1


def test_an_engine_written_before_still_rests() -> None:
    engine = Resting()
    with pytest.warns(DeprecationWarning, match="`Resting.rest` is now `release_caches`"):
        release_caches(engine)
    assert engine.rested == 1


def test_an_engine_written_before_rests_beside_others_too() -> None:
    engine: Any = Resting()
    engine.policies = ()
    with pytest.warns(DeprecationWarning, match="`Resting.rest` is now `release_caches`"):
        ComposedEngine([engine]).release_caches()
    assert engine.rested == 1


def test_who_listened_before_observes() -> None:
    sections = {"listener": 5, "seed": 1}
    with pytest.warns(DeprecationWarning, match="observer="):
        assert observer_of(sections, None) == 5
    assert sections == {"seed": 1}
    assert observer_of(sections, 7) == 7


def test_an_algorithm_made_with_the_fields_of_before_is_the_one_of_today() -> None:
    critic = CriticSpec("local", value_loss, "own")
    order = Order(lambda policies, step, seed: tuple(policies))
    made: Any = Algorithm
    former = {
        "source": "demonstrations",
        "group_size": 3,
        "redraw": 2,
        "epochs": 4,
        "minibatches": 5,
        "order": order,
        "entropy": True,
        "critic": critic,
        "reference_every": 7,
        "proximal": True,
        "greedy": True,
        "embeddings": "base",
        "verifier": "folder",
        "least_auc": 0.8,
        "swap_every": 6,
    }
    with pytest.warns(
        DeprecationWarning, match=r"`Algorithm\(group_size=…\)` is now `Algorithm.data.group_size`"
    ):
        row = made("mine", lambda outputs, targets: None, None, **former)
    assert row.data == Data("demonstrations", 3, redraw=2)
    assert row.update == Update(4, 5, order, entropy=True)
    assert row.needs == (
        CriticValues(critic),
        ReferenceLogProbs(),
        ProximalLogProbs(),
        GreedyBaseline(),
        Embeddings("base"),
        VerifierScores("folder", 0.8),
    )
    assert row.after_update == (RefreshReferences(7), Exchange(6))
    with pytest.warns(DeprecationWarning, match=r"`Algorithm\.epochs` is now `Algorithm\.update\.epochs`"):
        assert row.epochs == 4
    with pytest.warns(DeprecationWarning, match="group_size"):
        assert replace(row, group_size=9).data == Data("demonstrations", 9, redraw=2)
    with pytest.raises(AttributeError, match="no attribute 'epoch'"):
        row.epoch  # noqa: B018


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_algorithm_is_changed_and_asked_by_the_fields_of_before() -> None:
    made: Any = Algorithm
    loss = SurrogateConfig().build()
    critic, other = (CriticSpec("local", value_loss, "own", coefficient=c) for c in (1.0, 0.125))
    row = made("mine", loss, critic=critic, reference_every=2, verifier="folder", least_auc=0.8, swap_every=6)
    changed = replace(row, critic=other, least_auc=0.5, swap_every=7, reference_every=0)
    assert changed.critic == other
    assert changed.needs == (CriticValues(other), ReferenceLogProbs(), VerifierScores("folder", 0.5))
    assert changed.after_update == (Exchange(7),)
    without = replace(row, critic=None, reference_every=None, verifier=None, swap_every=0)
    assert (without.critic, without.needs, without.after_update) == (None, (), ())
    asked = "reference_every", "swap_every", "verifier", "least_auc", "proximal", "greedy", "embeddings"
    assert [getattr(row, name) for name in asked] == [2, 6, "folder", 0.8, False, False, None]
    assert [getattr(without, name) for name in asked] == [None, 0, None, None, False, False, None]
    assert replace(row, reference_every=0).reference_every == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_order_of_before_moves_one_policy_after_another() -> None:
    made: Any = Order
    order = made(sequential=True, old="proximal")
    assert order.sequential
    assert order.move.func is one_after_another
    assert order.move.keywords == {"old": Column.PROXIMAL}
    assert made(sequential=False) == Order()


def test_a_loss_of_before_reads_pairs_and_what_was_heard_by_token() -> None:
    each: Any = {"segment_K": torch.tensor([0, 0, 1]), "segments": 2, "mask_K": torch.ones(3), "columns": {}}
    targets = Targets(**each, pair_S=torch.tensor([4, 7]), observed_S=torch.tensor([0.0, 1.0]))
    with pytest.warns(DeprecationWarning, match="`targets.pair_S`"):
        assert targets["pair"].tolist() == [4.0, 4.0, 7.0]
    with pytest.warns(DeprecationWarning, match="`targets.observed_S`"):
        assert targets["heard"].tolist() == [0.0, 0.0, 1.0]
    with pytest.warns(DeprecationWarning, match="`targets.observed_S`"):
        assert Targets(**each)["heard"].tolist() == [0.0, 0.0, 0.0]
    for column in ("pair", "nothing"):
        with pytest.raises(KeyError):
            Targets(**each)[column]


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ImportError, match="nothing_of_the_kind"):
        import_module("kapelle.nothing_of_the_kind")
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = import_module("kapelle.rollout").nothing_of_the_kind


def test_one_finder_is_enough() -> None:
    before = len(sys.meta_path)
    install()
    assert len(sys.meta_path) == before


def test_an_environment_written_before_still_runs() -> None:
    written = (
        "from kapelle.configured import Settings\n"
        "from kapelle.environments.openspiel import OpenSpiel\n"
        "from kapelle.rollout import Play, rollout\n"
        "import kapelle\n"
        "assert Settings is kapelle.Settings\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", written], capture_output=True, text=True, check=True
    )
    assert "`kapelle.configured` is now `kapelle.settings.base`" in done.stderr
