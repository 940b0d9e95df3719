"""Settings of the built-in train engines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kapelle.engines.train.protocol import TrainEngine, TrainSetup
from kapelle.engines.train.sharding import Sharding
from kapelle.errors import ConfigError
from kapelle.runtime.ranks import launched_rank
from kapelle.settings.base import Settings
from kapelle.settings.checks import Check, RunToCheck
from kapelle.settings.environments import text_alone
from kapelle.team import Critic, Policy

if TYPE_CHECKING:
    from kapelle.engines.train.torch.engine import TorchTrainEngine


class Torch(Settings):
    """Settings of the train engine in a single process. If a launcher starts several processes, the engine `ddp` is used instead."""

    name: Literal["torch"] = "torch"

    def build(self, setup: TrainSetup) -> TorchTrainEngine:
        """Return the engine, which trains the models in place."""
        from kapelle.engines.train.torch.engine import TorchTrainEngine

        return TorchTrainEngine(setup)


class Ddp(Torch):
    """Settings of the train engine `torch` in several processes, each with all weights and a share of every step's samples."""

    name: Literal["ddp"] = "ddp"  # type: ignore[assignment]  # the tag of another class
    timeout: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    """The maximum time in seconds to wait for other processes, at the start and in every collective operation."""


class Fsdp(Sharding):
    """Settings of the train engine that shards base models with FSDP2. Every process holds complete adapters and value heads."""

    name: Literal["fsdp"] = "fsdp"
    timeout: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    """The maximum time in seconds to wait for other processes, at the start and in every collective operation."""

    def check(
        self,
        policies: Collection[Policy],
        critics: Collection[Critic],
        dtypes: Mapping[str, str],
        optimizer: str,
        ranks: int,
    ) -> None:
        """Raise ConfigError if `ranks` processes cannot shard the models of these learners.

        The mapping `dtypes` contains the compute type of each base model.
        """
        here = [policy for policy in policies if policy.endpoint is None]
        whole = [policy.name for policy in here if policy.trained and policy.lora is None]
        whole += [critic.name for critic in critics if critic.trained and critic.whole]
        adapted = [policy.name for policy in here if policy.lora is not None]
        adapted += [critic.name for critic in critics if not critic.whole]
        for base, dtype in dtypes.items():
            if self.param_dtype not in ("float32", dtype):
                raise ConfigError(
                    f"`train_engine.param_dtype: {self.param_dtype}` differs from the compute type of '{base}' ({dtype}). Set "
                    f"`model.dtype: {self.param_dtype}`, or remove `param_dtype`."
                )
        if ranks == 1:
            return  # nothing is sharded
        if ranks % self.tensor_parallel:
            raise ConfigError(
                f"`train_engine.tensor_parallel: {self.tensor_parallel}` does not divide the {ranks} processes of this "
                "run. Set a number that divides them, or start a different number of processes."
            )
        if self.tensor_parallel > 1 and adapted:
            raise ConfigError(
                f"`train_engine.tensor_parallel: {self.tensor_parallel}` needs models that train all their weights, but "
                f"'{adapted[0]}' does not. Set `team.sharing: shared` (and `team.critic_train: full`), or "
                "`tensor_parallel: 1`."
            )
        if whole and optimizer != "adamw":
            raise ConfigError(
                f"'{whole[0]}' trains all weights of its model, but `optimizer.name: {optimizer}` does not support "
                "sharded weights. Set `optimizer.name: adamw`, train an adapter, or set `train_engine.name: ddp`."
            )

    def build(self, setup: TrainSetup) -> TrainEngine:
        """Return the train engine. Raises ConfigError if the models cannot be sharded.

        With a single process, the engine `torch` is returned.
        """
        if setup.ranks.size == 1:
            return Torch().build(setup)
        from kapelle.engines.train.fsdp import FsdpTrainEngine

        dtypes = {name: str(model.dtype).removeprefix("torch.") for name, model in setup.models.items()}
        self.check(setup.policies, setup.critics, dtypes, setup.optimizer.name, setup.ranks.size)
        return FsdpTrainEngine(setup, self)


# -------- Checks of a run's train engine


def check_images(run: RunToCheck) -> Iterator[str]:
    """Yield an error message if an environment uses images and the train engine does not support images."""
    if run.config.train_engine.name == "fsdp":
        yield from text_alone(run, "`train_engine.name: fsdp`")


def check_sharding(run: RunToCheck) -> None:
    """Raise ConfigError if the processes of this run cannot shard the models of the run."""
    config, team, started = run.config, run.team, launched_rank()
    if isinstance(config.train_engine, Fsdp):
        dtypes = {base: team.places.get(base, config.model).dtype for base in team.bases}
        learners = team.policies.values(), team.critics.values()
        config.train_engine.check(*learners, dtypes, config.optimizer.name, started.size if started else 1)


CHECKS: tuple[Check, ...] = (check_images,)
TRAINING_CHECKS: tuple[Check, ...] = (check_sharding,)
