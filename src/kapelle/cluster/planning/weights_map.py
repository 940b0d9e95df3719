"""Describe the weights of a team before it is loaded: which agents use them, and which weights are trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kapelle.models.outline import Outline, adapter_parameters
from kapelle.team import Place, Rate, Team


@dataclass(frozen=True, slots=True)
class LearnerRow:
    """A policy or critic in the map of weights."""

    name: str
    kind: str
    """Kind of learner: `policy` or `critic`."""
    weights: str
    """Description of the weights, such as `LoRA r 16 on base`."""
    trained: bool
    own_parameters: int
    """Number of parameters that the learner does not share with others. The number is 0 for frozen policies and endpoints."""
    agents: tuple[str, ...]
    """Agents that use the policy, or agents that the critic evaluates."""
    rate: str = ""
    """Description of the learning rate and schedule; empty if they are those of `optimizer`."""


@dataclass(frozen=True, slots=True)
class Base:
    """A base model in memory."""

    name: str
    path: str
    """Path of the model's folder, its name on the hub, or `embedded`."""
    parameters: int
    """Number of parameters of the model, without adapters and heads."""
    place: str = ""
    """Description of the data type and device, such as `bfloat16 on cuda:1`; empty for float32 on the default device."""


@dataclass(frozen=True, slots=True)
class WeightsMap:
    """A map of all weights of a team."""

    learners: tuple[LearnerRow, ...]
    bases: tuple[Base, ...]

    def row(self) -> dict[str, Any]:
        """Return the map as a JSON object."""
        return asdict(self)


def weights_map(team: Team, models: Mapping[str, Outline], nf4: Collection[str] = ()) -> WeightsMap:
    """Return the map of the weights of a team, given the outlines of its base models.

    Base models in `nf4` are stored in four bits.
    """
    sizes = {base: model.parameters for base, model in models.items()}
    learners = []
    for name, policy in team.policies.items():
        agents = []
        for agent in team.agents_of(name):
            # If only some of an agent's turns belong to the policy, their numbers (from 1) are added.
            turns = [str(k + 1) for k, its in enumerate(team.turns_of.get(agent, ())) if its == name]
            agents.append(f"{agent} (turn {', '.join(turns)})" if turns else agent)
        own, trained, rate = 0, policy.trained, _rate(policy.rate)
        if policy.endpoint is not None:
            words, trained, rate = f"{policy.endpoint.model} at {policy.endpoint.url}", False, ""
        elif policy.lora is not None:
            own = adapter_parameters(models[policy.base], policy.lora)
            words = f"LoRA r {policy.lora.rank} on {policy.base}"
        else:
            own = sizes[policy.base] if policy.trained else 0
            words = f"all of {policy.base}"
        learners.append(LearnerRow(name, "policy", words, trained, own, tuple(agents), rate))
    for name, critic in team.critics.items():
        own, words = models[critic.base].hidden + 1, f"a value head on {critic.base}"
        if critic.lora is not None:
            own += adapter_parameters(models[critic.base], critic.lora)
            words = f"LoRA r {critic.lora.rank} and {words}"
        elif critic.whole:
            own, words = own + sizes[critic.base], f"all of {critic.base} and a value head"
        judged = tuple(agent for agent, its in team.critic_of.items() if its == name)
        learners.append(LearnerRow(name, "critic", words, critic.trained, own, judged, _rate(critic.rate)))
    bases = []
    for base, path in team.bases.items():
        place = team.places.get(base, Place())
        kind = "nf4" if base in nf4 else "" if place.dtype == "float32" else place.dtype
        words = " ".join(word for word in (kind, place.device and f"on {place.device}") if word)
        bases.append(Base(base, path, sizes[base], words))
    return WeightsMap(tuple(learners), tuple(bases))


def _rate(rate: Rate) -> str:
    lr = "" if rate.lr is None else f"lr {rate.lr:g}"
    warmup = "" if rate.warmup_steps is None else f"{rate.warmup_steps} steps of warm-up"
    return ", ".join(word for word in (lr, rate.schedule or "", warmup) if word)


def describe(found: WeightsMap) -> list[str]:
    """Return the map as the lines of a table."""
    rows = [("", "weights", "parameters", "", "agents")]
    rows += [
        (
            learner.name,
            learner.weights,
            amount(learner.own_parameters) if learner.own_parameters else "",
            f"trains{learner.rate and f', {learner.rate}'}" if learner.trained else "frozen",
            ", ".join(learner.agents),
        )
        for learner in found.learners
    ]
    rows += [
        (base.name, base.path, amount(base.parameters), base.place or "in memory", "") for base in found.bases
    ]
    widths = [max(len(row[k]) for row in rows) for k in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]


def amount(number: int) -> str:
    """Format a number of parameters, as in `0.82 M`."""
    for least, unit, name in ((5 * 10**8, 10**9, "B"), (5 * 10**5, 10**6, "M"), (10**3, 10**3, "k")):
        if number >= least:
            return f"{number / unit:.2f} {name}" if number < 10 * unit else f"{number / unit:.0f} {name}"
    return str(number)


def size(count: int) -> str:
    """Format a number of bytes, as in `13 MB`."""
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}" if count < 10 * unit else f"{count / unit:.0f} {name}"
    return f"{count / 1000:.0f} kB"
