"""The exact versions in constraints.txt, the bounds in pyproject.toml, and what pages say of both."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
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


def test_no_test_skips_for_want_of_an_extra() -> None:
    """Tests skip if an extra is missing, as in `make test-core`; here all of them are installed."""
    missing = []
    for requirement in map(Requirement, PROJECT["optional-dependencies"]["test"]):
        try:
            version(requirement.name)
        except PackageNotFoundError:
            missing.append(requirement.name)
    assert missing == []
