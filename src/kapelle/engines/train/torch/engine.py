"""The train engine on one device: all learners that share a base in one forward and one backward pass.

`learners.py` holds the weights, `forward.py` evaluates them, `update.py` changes them; this module is what a run uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from kapelle.engines.rollout.protocol import WritingRenderer
from kapelle.engines.train.protocol import Objective, Published, TrainSetup
from kapelle.engines.train.torch.forward import Even, Forward
from kapelle.engines.train.torch.learner import Learner
from kapelle.engines.train.torch.learners import Learners
from kapelle.engines.train.torch.sharing import Alone, AmongRanks, Sharing
from kapelle.engines.train.torch.update import Updater
from kapelle.errors import ContextError
from kapelle.models.language_model import LanguageModel
from kapelle.rows import Sample


class TorchTrainEngine:
    """Policies and critics on models in this process's memory."""

    def __init__(self, setup: TrainSetup, sharing: Sharing | None = None) -> None:
        """Add adapters and heads to the models and make one learner for each policy that is trained.

        `sharing` connects the processes that share every step; None those of `setup.ranks`.
        """
        self._held = Learners(setup)
        self._forward = Forward(
            self._held, setup.limits.microbatch_tokens, recompute=setup.limits.gradient_checkpointing
        )
        self._sharing = sharing or (AmongRanks(setup.ranks) if setup.ranks.size > 1 else Alone())
        self._updater = Updater(self._held, self._forward, setup.limits, setup.seed, self._sharing)

    @property
    def versions(self) -> Mapping[str, int]:
        """Number of changes behind the weights of each trained policy."""
        return {name: learner.version for name, learner in self._held.policies.items()}

    @property
    def learners(self) -> Mapping[str, Learner]:
        """Learners by name: trained policies, then critics."""
        return self._held.by_name

    def model_of(self, name: str) -> LanguageModel:
        """Return the model that a learner, reference or embedder stands on."""
        return self._held.homes[name].model

    def take_passes(self, even: Even) -> None:
        """Let `even` decide which passes are taken, where processes have to take as many."""
        self._forward.even = even

    def renderer(self, learner: str) -> WritingRenderer:
        """Return how text becomes the tokens of the model of a policy or critic."""
        return self._held.homes[learner].model.renderer

    def weights(self, name: str) -> Mapping[str, Tensor]:
        """Return the weights of a policy, critic or reference, by name; the tensors themselves, not copies."""
        return self._held.weights(name)

    def load_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of a policy, critic or reference; ModelError when names or shapes do not fit."""
        self._held.load_weights(name, weights)

    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the mean last hidden state `_D` (float32) over the tokens before each sample's targets."""
        return self._sharing.rows(samples, self._forward.embed)

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-probs or values `_T` (float32) of each sample's targets, without dropout."""
        self._check_critics_context(samples)
        return self._sharing.rows(samples, self._forward.score)

    def examine(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-prob and entropy `_T2` (float32, nats) of each policy sample's targets, without dropout."""
        return self._sharing.rows(samples, self._forward.examine)

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Take the optimiser steps of one update; see the protocol."""
        self._check_critics_context(samples)
        return self._updater.update(samples, objective)

    def _check_critics_context(self, samples: Sequence[Sample]) -> None:
        """Raise ContextError where a critic would read more than its model's context: nobody cuts what it reads."""
        for sample in samples:
            home, tokens = self._held.homes[sample.learner], sample.targets[-1]
            if home.critic and tokens > home.model.renderer.context:
                raise ContextError(
                    f"'{sample.learner}' has {tokens} tokens to read; its model reads {home.model.renderer.context}. A central "
                    "critic reads what all agents read and wrote: use a model with a longer context "
                    "(`model.embedded.context` for the embedded one), shorter prompts, fewer rounds, a lower "
                    "`sampling.max_tokens`, or `algorithm.name: ippo`, whose critics read what their own agent did."
                )

    def parity(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return |trainer − sampler| log-prob of every target of every policy sample."""
        return self._updater.parity(samples)

    def check_parity(
        self, samples: Sequence[Sample], weights: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> dict[str, float]:
        """Compare the samples' `behaviour` with the log-probs of the current or of other weights; see the protocol."""
        with self._held.standing_in(weights or {}):
            return self._updater.check_parity(samples)

    def publish(self) -> Mapping[str, Published]:
        """Return the weights of the policies that changed since the last call, with their version."""
        changed = {name: learner for name, learner in self._held.policies.items() if learner.changed}
        for learner in changed.values():
            learner.changed = False
        return {name: Published(learner.parameters, learner.version) for name, learner in changed.items()}

    def exchange(self, one: str, other: str) -> None:
        """Swap two policies: weights, optimiser state and references, bit for bit."""
        self._held.exchange(one, other)

    def refresh_references(self) -> None:
        """Make every reference policy a frozen copy of its trained policy as it is now."""
        self._held.refresh_references()

    def state(self, *, parts: bool = False) -> dict[str, object]:
        """Return everything that an exact resume needs, as a tree of tensors and plain values; see `Learner.state`."""
        return self._held.state(parts=parts)

    def load_state(self, state: Mapping[str, object]) -> None:
        """Restore what `state` returned, bit for bit."""
        self._held.load_state(state)

    def close(self) -> None:
        """Do nothing: the engine holds nothing but memory."""
