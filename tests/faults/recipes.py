"""Every kind of run: the shipped recipes at a size that takes a second, and what no recipe of them does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kapelle.setup.recipe import builtin_recipes

Tree = dict[str, Any]

STEPS = 4

_MODEL = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32}
_LORA = {"rank": 2, "alpha": 4.0}
# An untrained model is paid for nothing. What does not depend on pay keeps all weights moving: else a loss of
# optimiser or generator states would change nothing that could be compared.
_MOVING = {
    "loss": {"entropy_coefficient": 0.05},
}
_NO_SURROGATE = {"sft", "dpo", "verifier"}
_WHERE = {
    "gsm8k": {"environment": {"path": "{data}/gsm8k"}},
    "gsm8k_steps": {"environment": {"path": "{data}/gsm8k"}},
    "cory_gsm8k": {"environment": {"path": "{data}/gsm8k"}},
    "marft_math_duo": {"environment": {"path": "{data}/gsm8k"}},
    "maporl_gsm8k_debate": {"environment": {"path": "{data}/gsm8k"}},
    "gsm8k_tools": {"environment": {"questions": {"path": "{data}/gsm8k"}}},
    "maporl_anli_debate": {"environment": {"path": "{data}/nli.jsonl"}},
    "mbpp": {"environment": {"path": "{data}/mbpp.jsonl"}},
    "verifier_file": {"environment": {"path": "{data}/answers.jsonl"}},
    "mrlm_multi": {
        "environment": {
            "parts": {
                "code": {"environment": {"path": "{data}/mbpp.jsonl"}},
                "math": {"environment": {"path": "{data}/gsm8k"}},
            }
        }
    },
}
SANDBOXED = {"mbpp", "mrlm_multi"}
"""Recipes that run programs, and so need a sandbox."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of run."""

    name: str
    recipe: Path
    """A recipe's file; a run is `kapelle train FILE --run-dir RUN`."""
    after: str | None = None
    """The kind whose run must have ended before: this one plays against what it saved."""


def write_recipes(folder: Path, data: Path, ended: Path) -> list[Kind]:
    """Write the recipes of all kinds of run into `folder`; `data` holds the rows, `ended` will hold ended runs."""
    folder.mkdir(parents=True)
    whole: dict[str, Tree] = {name: _shrunk(name, _shipped(name), data) for name in builtin_recipes()}
    for name, (base, change) in _FURTHER.items():
        whole[name] = change(yaml.safe_load(yaml.safe_dump(whole[base])))
    past = str(ended / "kuhn" / "checkpoints" / f"{STEPS:08d}" / "policies" / "first")
    kinds = []
    for name, tree in whole.items():
        file = folder / f"{name}.yaml"
        text = yaml.safe_dump({**tree, "name": name}, sort_keys=False)
        file.write_text(text.replace("{past}", past), "utf-8")
        kinds.append(Kind(name, file, "kuhn" if "{past}" in text else None))
    return kinds


def _shipped(name: str) -> Tree:
    import kapelle

    file = Path(kapelle.__file__).parent / "settings" / "recipes" / f"{name}.yaml"
    tree: Tree = yaml.safe_load(file.read_text("utf-8"))
    tree.pop("real", None)
    return tree


def _shrunk(name: str, tree: Tree, data: Path) -> Tree:
    tree = merged(tree, _placed(_WHERE.get(name, {}), data))
    if name == "maporl_anli_debate":  # one file: its rows are held out by their premise
        for split in ("train", "test"):
            del tree["environment"][split]
    tree.setdefault("model", {}).setdefault("embedded", {}).update(_MODEL)
    team: Tree = {"sampling": {"max_tokens": 4}, "lora": _LORA, "critic_lora": _LORA}
    tree["team"] = merged(tree["team"], team)
    if "warmup" in tree:
        tree["warmup"].update(steps=2, demonstrations=8, batch=4)
    tree["evaluation"] = {"problems": 2, "every": 2, "problems_while_training": 2}
    tree["checkpoint"] = {"every": 2, "keep": 2}
    if "league" in tree:  # a member enters after each step, one leaves, and most of them rest
        tree["league"] = merged(
            tree["league"], {"enter": {"every": 1}, "keep": 3, "slots": 2, "in_memory": 1}
        )
    for part in tree.get("stages", [tree]):
        part["training"] = {"steps": STEPS, "tasks_per_step": 2}
        part["optimizer"] = {**part.get("optimizer", {}), "lr": 1e-2}
        for section in ("evaluation", "checkpoint"):
            if part is not tree:
                part.pop(section, None)
        if "critic_lora" in part.get("team", {}):
            part["team"]["critic_lora"] = _LORA
        _shrink_algorithm(part["algorithm"])
    return tree


def _shrink_algorithm(algorithm: Tree) -> None:
    if algorithm["name"] in _NO_SURROGATE:
        algorithm.update({"group_size": 2} if algorithm["name"] != "sft" else {})
        return
    if str(algorithm.get("verifier")).startswith("stage:"):
        algorithm["verifier"] = (
            None  # one that has learned from eight answers tells none apart, and may pay nothing
        )
    base = algorithm.get("base", algorithm)
    base.update(merged(base, _MOVING))
    if base is algorithm and algorithm.get("group_size", 2) > 1:
        algorithm["group_size"] = 2
    if "fit" in algorithm:
        algorithm["fit"].update(capacity=12, min_fill=4, updates=3)


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> Tree:
    """Return a tree with another laid over it."""
    both = dict(one)
    for key, value in other.items():
        mine = both.get(key)
        both[key] = merged(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return both


def _placed(tree: Any, data: Path) -> Any:
    if isinstance(tree, Mapping):
        return {key: _placed(value, data) for key, value in tree.items()}
    return tree.replace("{data}", str(data)) if isinstance(tree, str) else tree


def _stale(tree: Tree) -> Tree:
    return merged(tree, {"training": {"max_staleness": 2}})


def _past(tree: Tree) -> Tree:
    tree["team"]["agents"][1]["weights"] = {"past": "{past}"}
    return tree


def _paid_by_verifier(tree: Tree) -> Tree:
    tree["stages"][1]["algorithm"].update(verifier="stage:judge", least_auc=None)
    return tree


def _noisy(tree: Tree) -> Tree:
    """Draw from all generators of the process, in the environment and, by dropout, in the update."""
    tree["environment"] = {"name": "tests.support.plugins:Digest", "tasks": 5, "noisy": True}
    tree.pop("warmup", None)
    return merged(tree, {"team": {"lora": {**_LORA, "dropout": 0.2}}})


def _in_line(tree: Tree) -> Tree:
    """Two learners of which one answers the other's drafts; one enters, and goes to the end, after each second step."""
    tree["league"] = {
        "population": {"name": "psro", "learners": 2, "refresh": 1},
        "enter": {"every": 2, "restart": True},
        "keep": 3,
        "slots": 3,
        "in_memory": 1,
    }
    return tree


_FURTHER: Mapping[str, tuple[str, Callable[[Tree], Tree]]] = {
    "steps played ahead": ("demo", _stale),
    "against a past self": ("kuhn", _past),
    "paid by the verifier of a stage": ("maporl_sums_debate", _paid_by_verifier),
    "an environment that draws": ("mrlm_ppo", _noisy),
    "learners in line": ("kuhn_league", _in_line),
}
