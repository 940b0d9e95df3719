"""The exact versions in constraints.txt, the bounds in pyproject.toml, and what pages say of both."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OWN_ENVIRONMENT = {"vllm", "verifiers", "inspect"}
"""Extras whose packages disagree with the others: constraints.txt says so, and each goes into an environment of its own."""
LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = {
    canonicalize_name(name): version
    for name, _, version in (line.partition("==") for line in LINES if re.match(r"[\w.\-]+==", line))
}


def test_every_package_of_every_extra_is_pinned_within_its_bounds() -> None:
    wrong = []
    extras = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    for extra, requirements in extras.items():
        for requirement in map(Requirement, requirements if extra not in OWN_ENVIRONMENT else ()):
            name = canonicalize_name(requirement.name)
            if name == "kapelle":
                continue
            pin = PINS.get(name)
            if pin is None or not requirement.specifier.contains(pin, prereleases=True):
                wrong.append((extra, str(requirement), pin))
    assert wrong == []


def test_no_package_is_pinned_twice() -> None:
    names = [canonicalize_name(line.partition("==")[0]) for line in LINES if re.match(r"[\w.\-]+==", line)]
    assert sorted(names) == sorted(set(names))


def test_the_page_on_vllm_says_what_the_project_asks_for() -> None:
    page = " ".join((ROOT / "docs" / "vllm.md").read_text(encoding="utf-8").split())
    bounds = {
        Requirement(each).name: str(Requirement(each).specifier).removeprefix(">=")
        for each in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["vllm"])
    }
    assert f"kapelle runs with transformers {bounds['transformers']} and later" in page
    measured = re.findall(r"vLLM (\d+\.\d+)\.\d+", page)
    assert measured
    assert set(measured) == {bounds["vllm"]}
