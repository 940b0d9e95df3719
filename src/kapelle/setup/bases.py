"""Keeps track of the base models of a team while the team is built."""

from __future__ import annotations

from kapelle.errors import noting
from kapelle.models.devices import check_device
from kapelle.settings.schema import ModelConfig, TeamConfig
from kapelle.team import Place, Policy

BASE = "base"


class Bases:
    """The path, data type and device of each base model of a team while the team is built."""

    def __init__(self, model: ModelConfig, team: TeamConfig, absent: list[str] | None = None) -> None:
        """Create the collection and add the base model of the run.

        If the device is missing, ConfigError is raised, or the device is added to `absent`.
        """
        self.paths: dict[str, str] = {}
        self.places: dict[str, Place] = {}
        self._model, self._team, self._absent = model, team, absent
        self.add(BASE, model.path, None, None, "model.device")

    def add(
        self, base: str, path: str, dtype: str | None, device: str | None, setting: str, like: str = BASE
    ) -> None:
        """Add a base model. By default, its data type and device are those of the base model `like`.

        Raises ConfigError for a device that cannot be used; the error names the `setting`.
        """
        other = self.places.get(like, Place(self._model.dtype, self._model.device))
        self.paths[base], self.places[base] = path, Place(dtype or other.dtype, device or other.device)
        with noting(self._absent):
            check_device(self.places[base].device, setting)

    def frozen(self, base: str) -> str:
        """Return the name of a frozen base model for critics.

        The name is `base`, or that of a copy if `team.critic_model`, `critic_dtype` or `critic_device` is set.
        """
        own = (self._team.critic_model, self._team.critic_dtype, self._team.critic_device)
        return base if own == (None, None, None) else self._copy(base)

    def untrained(self, policy: Policy) -> str:
        """Return the name of a base model that no policy trains, for use by critics.

        For an adapter or an untrained policy, the result is the policy's base model (see `frozen`). For all other
        policies, the result is a copy.
        """
        if policy.endpoint is not None or policy.lora is not None or not policy.trained:
            return self.frozen(policy.base or BASE)
        return self._copy(policy.base)

    def moving(self, policy: Policy, critic: str) -> str:
        """Return the name of a base model for one critic of which all weights are trained.

        The base model is a copy of the model of the critics, if one is set, or of the model of the policy.
        """
        return self._copy(policy.base or BASE, f"{critic}@model")

    def _copy(self, base: str, name: str | None = None) -> str:
        copy, team = name or f"{base}@critic", self._team
        path = team.critic_model or self.paths[base]
        self.add(copy, path, team.critic_dtype, team.critic_device, "team.critic_device", like=base)
        return copy
