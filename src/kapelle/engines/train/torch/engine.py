"""The train engine on one device: all learners that share a base in one forward and one backward pass.

An update accumulates the sums of losses and their gradients, compares trainer and sampler, divides each learner's gradient by its
global weight, and steps. `learner.py` holds the weights, `sharing.py` shares a step among processes.

Shapes: N flat tokens, K target tokens, D hidden size, T targets of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kapelle.algorithm import Outputs
from kapelle.engines.rollout.protocol import WritingRenderer
from kapelle.engines.train.batch import Batch, MicroBatch, minibatches, pack, passes
from kapelle.engines.train.parity import PARITY, check_parity, judge_in_float64
from kapelle.engines.train.protocol import Examines, Objective, Published, TrainSetup, UpdateLimits
from kapelle.engines.train.sums import UpdateSums, add_metric, means
from kapelle.engines.train.torch.large_head import Entropy, token_statistics
from kapelle.engines.train.torch.learner import Learner, LearnerBank, Placement
from kapelle.engines.train.torch.sharing import AmongRanks
from kapelle.errors import ContextError, NumericsError
from kapelle.functional.divergences import TokenStatistics
from kapelle.models.language_model import LanguageModel
from kapelle.rows import Column, Sample
from kapelle.runtime.interrupts import stop_if_asked
from kapelle.runtime.randomness import derive_seed

EqualisePasses = Callable[[Mapping[str, Sequence[tuple[list[int], Batch]]]], list[tuple[list[int], Batch]]]
"""Takes the passes over every base, by the name of a learner on it; returns those to take, in order."""


class TorchTrainEngine(Examines):
    """Policies and critics on models in this process's memory."""

    def __init__(
        self, setup: TrainSetup, *, in_lockstep: bool = False, equalise: EqualisePasses | None = None
    ) -> None:
        """Add adapters and heads to the models and make one learner for each policy that is trained.

        The processes of `setup.ranks` share every step. Where they have to take the same passes, they do so `in_lockstep`, and
        `equalise` decides which passes are taken.
        """
        self._limits, self._seed = setup.limits, setup.seed
        self._learners = LearnerBank(setup)
        self._forward = ForwardPass(self._learners.placements, setup.limits, equalise)
        self._sharing = AmongRanks(setup.ranks, in_lockstep=in_lockstep)

    @property
    def versions(self) -> Mapping[str, int]:
        """Number of changes behind the weights of each trained policy."""
        return {name: learner.version for name, learner in self._learners.policies.items()}

    @property
    def learners(self) -> Mapping[str, Learner]:
        """Learners by name: trained policies, then critics."""
        return self._learners.by_name

    def model_of(self, name: str) -> LanguageModel:
        """Return the base model of a learner, reference or embedder."""
        return self._learners.placements[name].model

    def renderer(self, learner: str) -> WritingRenderer:
        """Return how text becomes the tokens of the model of a policy or critic."""
        return self._learners.placements[learner].model.renderer

    def weights(self, name: str) -> Mapping[str, Tensor]:
        """Return the weights of a policy, critic or reference, by name; the tensors themselves, not copies."""
        return self._learners.weights(name)

    def load_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of a policy, critic or reference; ModelError when names or shapes do not fit."""
        self._learners.load_weights(name, weights)

    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the mean last hidden state `_D` (float32) over the tokens before each sample's targets."""
        return self._sharing.rows(samples, self._forward.embed)

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-probs or values `_T` (float32) of each sample's targets, without dropout."""
        self._check_critics_context(samples)
        return self._sharing.rows(samples, self._forward.score)

    def examine(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-prob and entropy `_T2` (float32, nats) of each policy sample's targets, without dropout."""
        return self._sharing.rows(samples, partial(self._forward.score, entropy=True))

    def _check_critics_context(self, samples: Sequence[Sample]) -> None:
        """Raise ContextError where a critic would read more than its model's context; its input is never cut."""
        for sample in samples:
            placement, tokens = self._learners.placements[sample.learner], sample.targets[-1]
            if placement.critic and tokens > placement.model.renderer.context:
                raise ContextError(
                    f"'{sample.learner}' has {tokens} tokens to read; its model reads {placement.model.renderer.context}. A central "
                    "critic reads what all agents read and wrote: use a model with a longer context "
                    "(`model.embedded.context` for the embedded one), shorter prompts, fewer rounds, a lower "
                    "`sampling.max_tokens`, or `algorithm.name: ippo`, whose critics read what their own agent did."
                )

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Take the optimiser steps of one update; every learner on its own samples.

        Raises ParityError before anything changes when trainer and sampler disagree, NumericsError when a loss
        or gradient is not finite.
        """
        self._check_critics_context(samples)
        assert samples, "an update needs samples"
        totals: dict[str, list[float]] = {}
        # With dropout the log-probs of the update's own passes are not the sampler's: a pass without it is compared first.
        dropout = self._learners.has_dropout()
        if objective.parity and dropout:
            self._compare(self._gaps(samples), samples, totals)
        for epoch in range(objective.epochs):
            seeds = {
                name: derive_seed(self._seed, name, learner.steps, epoch)
                for name, learner in self._learners.by_name.items()
            }
            for number, chosen in enumerate(minibatches(samples, objective.minibatches, seeds)):
                fresh = objective.parity and not dropout and epoch == number == 0
                self._step([samples[k] for k in chosen], objective, totals, fresh)
        return means(totals)

    def _step(
        self, samples: Sequence[Sample], objective: Objective, totals: dict[str, list[float]], fresh: bool
    ) -> None:
        """Take one optimiser step of every learner of these samples; `fresh` compares with the sampler before."""
        learners = self._learners.by_name
        try:
            sums = self._sharing.summed(samples, partial(self._accumulate, objective), learners)
            for name in sorted(sums.bad):
                if self._limits.non_finite == "stop":
                    raise NumericsError(
                        f"The loss of '{name}' is not finite at its update {learners[name].steps}. Look at "
                        "this step's rewards, lower `optimizer.lr`, or set `training.non_finite: skip`."
                    )
            if fresh:
                self._compare(sums.gaps, samples, totals)
            for name, learner in learners.items():
                if name not in sums.weight and name not in sums.bad:
                    continue
                weight = sums.weight.get(name, 0.0)
                if name in sums.bad or weight == 0:
                    learner.forget_gradient()
                    add_metric(totals, f"skipped/{name}", 1.0, 1.0)
                    continue
                taken = learner.step(weight, self._limits.non_finite, self._sharing.agreed)
                for metric, value in taken.items():
                    add_metric(totals, f"{metric}/{name}", value, 1.0)
                for metric, (total, share) in sums.sums[name].items():
                    add_metric(totals, metric, total, share)
        except BaseException:
            for learner in learners.values():
                learner.forget_gradient()  # or the next update would include it
            raise

    def _accumulate(self, objective: Objective, samples: Sequence[Sample]) -> UpdateSums:
        """Add the gradients of the samples' losses to those of their learners, and return the sums to divide by."""
        sums = UpdateSums()
        entropy = Entropy.LEARNED if objective.entropy else Entropy.MEASURED
        with self._learners.dropout() as keys_of:
            for _, batch in self._forward.batches(samples):
                losses = []
                for name, part, output in self._forward.outputs(batch, entropy, keys_of(batch)):
                    if isinstance(output, Tensor):
                        assert objective.critic_loss is not None, "critic samples need a critic loss"
                        loss = objective.critic_loss(output, part.targets)
                    else:
                        entropy_K = output.entropy_K if objective.entropy else None
                        loss = objective.policy_loss(Outputs(output.logp_K, entropy_K), part.targets)
                    learner = self._learners.by_name[name]
                    if not bool(torch.isfinite(loss.total)):
                        sums.bad.add(name)
                        continue
                    sums.add(name, loss)
                    if isinstance(output, TokenStatistics):
                        sums.add_statistics(name, output, part.targets)
                        if Column.BEHAVIOUR in part.targets.columns:
                            gap_K = (output.logp_K.detach() - part.targets[Column.BEHAVIOUR]).abs()
                            sums.gaps.append((name, gap_K[part.targets.mask_K.bool()]))
                    factor = objective.critic_coefficient if isinstance(output, Tensor) else 1.0
                    losses.append(learner.scaled(loss.total * factor))
                if self._forward.anchor is not None:
                    losses.append(self._forward.anchor)
                if losses:
                    torch.autograd.backward(losses)
        return sums

    def parity(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return |trainer − sampler| log-prob of every target of every policy sample."""
        return [gap_T for _, gap_T in self._gaps(samples)]

    def check_parity(
        self, samples: Sequence[Sample], weights: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> dict[str, float]:
        """Compare the samples' `behaviour` with the log-probs of the current or of other weights; see the protocol."""
        totals: dict[str, list[float]] = {}
        with self._learners.temporary_weights(weights or {}):
            self._compare(self._gaps(samples), samples, totals)
        return means(totals)

    def _gaps(self, samples: Sequence[Sample]) -> list[tuple[str, Tensor]]:
        policy = [sample for sample in samples if Column.BEHAVIOUR in sample.columns]
        scored = self._sharing.rows(policy, self._forward.score)
        return [
            (sample.learner, (s - sample.columns[Column.BEHAVIOUR]).abs())
            for s, sample in zip(scored, policy, strict=True)
        ]

    def _compare(
        self, gaps: Sequence[tuple[str, Tensor]], samples: Sequence[Sample], totals: dict[str, list[float]]
    ) -> None:
        """Judge each compute type by its own bound: one model in half precision excuses no other."""
        models = {
            name: (placement.model, placement.adapter)
            for name, placement in self._learners.placements.items()
        }
        score = partial(self._sharing.rows, work=self._forward.score)
        for kind in dict.fromkeys(models[name][0].dtype for name, _ in gaps):
            own = [gap for name, gap in gaps if models[name][0].dtype == kind]
            judged = [sample for sample in samples if models[sample.learner][0].dtype == kind]
            bound = self._limits.parity_tolerance or PARITY[kind]
            check_parity(own, bound, totals, partial(judge_in_float64, judged, score, models))

    def publish(self) -> Mapping[str, Published]:
        """Return the weights of the policies that changed since the last call, with their version."""
        changed = {name: learner for name, learner in self._learners.policies.items() if learner.changed}
        for learner in changed.values():
            learner.changed = False
        return {name: Published(learner.parameters, learner.version) for name, learner in changed.items()}

    def exchange(self, one: str, other: str) -> None:
        """Swap two policies: weights, optimiser state and references, bit for bit."""
        self._learners.exchange(one, other)

    def refresh_references(self) -> None:
        """Make every reference policy a frozen copy of its trained policy as it is now."""
        self._learners.refresh_references()

    def state(self, *, parts: bool = False) -> dict[str, object]:
        """Return everything that an exact resume needs, as a tree of tensors and plain values; see `Learner.state`."""
        return self._learners.state(parts=parts)

    def load_state(self, state: Mapping[str, object]) -> None:
        """Restore what `state` returned, bit for bit."""
        self._learners.load_state(state)

    def close(self) -> None:
        """Do nothing: the engine holds nothing but memory."""


class ForwardPass:
    """All learners that share a base in one pass."""

    def __init__(
        self,
        placements: Mapping[str, Placement],
        limits: UpdateLimits,
        equalise: EqualisePasses | None = None,
    ) -> None:
        """Evaluate learners, references and embedders by name, with at most `limits.microbatch_tokens` tokens in one pass.

        With `limits.gradient_checkpointing` a backward pass computes each decoder block again.
        """
        self._placements = placements
        self._limits = limits
        self._equalise = equalise
        self.anchor: Tensor | None = None
        """A loss of zero that depends on the last pass, where every process has to go back through it; else None."""

    @torch.no_grad()
    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the mean last hidden state `_D` (float32) over the tokens before each sample's targets."""
        answers: dict[int, Tensor] = {}
        for chosen, batch in self.batches(samples):
            placement = self._placements[batch.owners[0][0]]
            with placement.model.computing([(None, first, last) for _, first, last in batch.owners]):
                hidden_ND = placement.model.hidden(batch.tokens_N, batch.positions_N, batch.plan)
            hidden_KD = hidden_ND.index_select(0, batch.source_K).float().cpu()
            for part in batch.parts.values():
                rows = hidden_KD[part.place].split(_counts(part))
                for k, rows_TD in zip(part.samples, rows, strict=True):
                    answers[chosen[k]] = rows_TD.mean(0)
        return [answers[k] for k in range(len(samples))]

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], *, entropy: bool = False) -> list[Tensor]:
        """Return log-probs or values `_T` (float32) of each sample's targets, without dropout.

        With `entropy`, return log-probs and entropies `_T2` instead; then all samples are policies'.
        """
        answers: dict[int, Tensor] = {}
        for chosen, batch in self.batches(samples):
            found = self.outputs(batch, Entropy.MEASURED if entropy else Entropy.LEFT_OUT)
            for _learner, part, output in found:
                values_K = output.logp_K if isinstance(output, TokenStatistics) else output
                if entropy and isinstance(output, TokenStatistics):
                    values_K = torch.stack([output.logp_K, output.entropy_K], 1)
                for k, column in zip(part.samples, values_K.split(_counts(part)), strict=True):
                    answers[chosen[k]] = column.float().cpu()
        return [answers[k] for k in range(len(samples))]

    def outputs(
        self, batch: Batch, entropy: Entropy, keys_N: Tensor | None = None
    ) -> list[tuple[str, MicroBatch, TokenStatistics | Tensor]]:
        """Run one forward pass and return each learner's statistics or values `_K` of its targets.

        `keys_N` are the tokens' keys of dropout, where it is on.
        """
        placement = self._placements[batch.owners[0][0]]
        route = [(self._placements[name].adapter, first, last) for name, first, last in batch.owners]
        recompute = self._limits.gradient_checkpointing and torch.is_grad_enabled()
        with placement.model.computing(route, keys_N):
            hidden_ND = placement.model.hidden(
                batch.tokens_N, batch.positions_N, batch.plan, recompute=recompute
            )
            if self._equalise is not None and torch.is_grad_enabled():
                self.anchor = hidden_ND.sum() * 0
            hidden_KD = hidden_ND.index_select(0, batch.source_K)
            return [
                (
                    name,
                    part,
                    placement.model.values(name, hidden_KD[part.place])
                    if self._placements[name].critic
                    else token_statistics(placement.model, hidden_KD, batch, part, entropy),
                )
                for name, part in batch.parts.items()
            ]

    def batches(self, samples: Sequence[Sample]) -> Iterator[tuple[list[int], Batch]]:
        """Pack samples base by base and yield each batch with the indices of the samples it was packed from.

        Raises StopRequested before a batch if the run should stop.
        """
        bases: dict[int, list[int]] = {id(self._placements[name].model): [] for name in self._placements}
        for k, sample in enumerate(samples):
            bases.setdefault(id(self._placements[sample.learner].model), []).append(k)
        names = {id(placement.model): name for name, placement in self._placements.items()}
        found: dict[str, list[tuple[list[int], Batch]]] = {name: [] for name in names.values()}
        for base, chosen in bases.items():
            model = self._placements[names[base]].model
            for members, room in passes(chosen, samples, self._limits.microbatch_tokens):
                own = [samples[k] for k in members]
                packed = pack(own, room, model.device, share=model.flat is not None)
                found[names[base]].extend((members, batch) for batch in packed)
        taken = [each for own in found.values() for each in own]
        if self._equalise is not None:
            taken = self._equalise(found)
        for each in taken:
            stop_if_asked()
            yield each


def _counts(part: MicroBatch) -> list[int]:
    """Return how many targets each of a part's samples has."""
    counts: list[int] = part.targets.segment_K.bincount(minlength=part.targets.segments).tolist()
    return counts
