"""Published weights as files: adapters under names of their own, and whole models as folders.

vLLM knows an adapter by its name and number and keeps what it has read once, so that new weights under an old name are not
used. Every publish therefore makes a new name, and the old files go as soon as the new ones are in place.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import cast

from torch import Tensor

from kapelle.engines.rollout.vllm.sampler import AdapterFile, BaseModel
from kapelle.errors import EngineError, ModelError
from kapelle.models.language_model import DTYPES, LanguageModel
from kapelle.models.lora_bank import layers_of
from kapelle.models.targets import named
from kapelle.models.weights import save_adapter, weights_hash
from kapelle.team import Policy


@dataclass(slots=True)
class Held:
    """One policy: which model it stands on, and the weights that answer for it now."""

    policy: Policy
    model: LanguageModel
    shapes: Mapping[str, tuple[int, ...]]
    """Of its weights by name."""
    hash: str
    version: int = 0
    adapter: AdapterFile | None = None


class Shelf:
    """A folder of published weights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count(1)
        self._own = secrets.token_hex(4)
        """Part of every name: several processes may publish to one server."""

    def begin(self, policy: Policy, model: LanguageModel) -> Held:
        """Return a policy as it is in the trainer's memory; its adapter is written here."""
        weights = model.bank.parameters(policy.name) if policy.lora else model.base_parameters()
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        held = Held(policy, model, shapes, weights_hash(weights))
        if policy.lora is not None:
            held.adapter = self.adapter(held, weights, 0)
        return held

    def adapter(self, held: Held, weights: Mapping[str, Tensor], version: int) -> AdapterFile:
        """Write a policy's adapter under a name that was never used."""
        assert held.policy.lora is not None
        number = next(self._numbers)
        name = f"{re.sub(r'[^A-Za-z0-9_-]', '_', held.policy.name)}-{version}-{number}-{self._own}"
        with _writing(f"the adapter of policy '{held.policy.name}'", self._folder):
            save_adapter(
                self._folder / name, weights, named(layers_of(held.model.model), held.policy.lora), "base"
            )
        return AdapterFile(name, number, self._folder / name)

    def model(self, model: LanguageModel, weights: Mapping[str, Tensor]) -> Path:
        """Write a base with these weights as a folder of `transformers`, tokeniser included."""
        from safetensors.torch import save_file

        folder = self._folder / f"model-{next(self._numbers)}"
        with _writing("a base model", self._folder):
            folder.mkdir(parents=True)
            config = deepcopy(model.model.config)
            config.architectures = [type(model.model).__name__]
            config.save_pretrained(folder)
            model.tokenizer.save_pretrained(folder)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    def drop(self, folder: Path) -> None:
        """Delete files of this shelf; others stay where they are."""
        if folder.is_relative_to(self._folder):
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Delete everything that was written."""
        shutil.rmtree(self._folder, ignore_errors=True)


def fitting(held: Held, weights: Mapping[str, object]) -> Mapping[str, Tensor]:
    """Return weights for a policy; EngineError when names or shapes are not those of the policy."""
    given = cast("Mapping[str, Tensor]", weights)
    if held.shapes.keys() != given.keys():
        odd = min(held.shapes.keys() ^ given.keys())
        raise EngineError(
            f"The weights of policy '{held.policy.name}' do not fit: '{odd}' is on one side only."
        )
    for name, shape in held.shapes.items():
        if tuple(given[name].shape) != shape:
            raise EngineError(
                f"The weights of policy '{held.policy.name}' do not fit: '{name}' is {tuple(given[name].shape)}, and "
                f"{shape} here."
            )
    return given


def base_model(model: LanguageModel, path: str, policies: list[Policy]) -> BaseModel:
    """Return what vLLM is told of a base that these policies stand on."""
    loras = [policy.lora for policy in policies if policy.lora is not None]
    return BaseModel(
        path,
        next(name for name, dtype in DTYPES.items() if dtype == model.dtype),
        model.renderer.context,
        tuple(sorted(model.end_ids)),
        len(loras),
        max((lora.rank for lora in loras), default=0),
    )


@contextmanager
def _writing(what: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except OSError as error:
        raise EngineError(
            f"The files with which vLLM gets {what} cannot be written to {folder}: {error.strerror}. Free room there, or set "
            "TMPDIR to a folder that has some."
        ) from error
