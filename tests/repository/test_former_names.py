"""Module names of before go on, as the very same modules, and say what they are called now."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from kapelle.algorithm import Algorithm, CriticSpec, Data, Loss, Order, Update
from kapelle.algorithms.cory import Exchange
from kapelle.former_names import MODULES, NAMES, PACKAGES, install, observer_of, release_caches
from kapelle.signals.critic_values import CriticValues
from kapelle.signals.embeddings import Embeddings
from kapelle.signals.greedy import GreedyBaseline
from kapelle.signals.proximal import ProximalLogProbs
from kapelle.signals.reference import ReferenceLogProbs, RefreshReferences
from kapelle.signals.verifier import VerifierScores


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


def test_who_listened_before_observes() -> None:
    sections = {"listener": 5, "seed": 1}
    with pytest.warns(DeprecationWarning, match="observer="):
        assert observer_of(sections, None) == 5
    assert sections == {"seed": 1}
    assert observer_of(sections, 7) == 7


def test_an_algorithm_made_with_the_fields_of_before_is_the_one_of_today() -> None:
    critic = CriticSpec("local", lambda values_K, targets: Loss(values_K.sum(), values_K.sum()), "own")
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
