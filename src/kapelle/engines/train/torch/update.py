"""The optimiser steps of an update: accumulate sums, compare with the sampler, divide, step.

Shapes: K target tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kapelle.algorithm import Loss, Outputs
from kapelle.engines.train.arbitration import arbitrate
from kapelle.engines.train.batch import Part
from kapelle.engines.train.bundles import minibatches
from kapelle.engines.train.parity import PARITY, check_parity
from kapelle.engines.train.protocol import Objective, UpdateLimits
from kapelle.engines.train.sums import UpdateSums, book, means
from kapelle.engines.train.torch.forward import Forward
from kapelle.engines.train.torch.head import Entropy
from kapelle.engines.train.torch.learners import Learners
from kapelle.engines.train.torch.sharing import Sharing
from kapelle.errors import NumericsError
from kapelle.functional.divergences import TokenStatistics
from kapelle.rows import Column, Sample
from kapelle.runtime.seeds import derive_seed


class Updater:
    """Updates learners on their samples."""

    def __init__(
        self, learners: Learners, forward: Forward, limits: UpdateLimits, seed: int, sharing: Sharing
    ) -> None:
        """Update these learners; `seed` draws minibatches, `sharing` connects the processes that share a step."""
        self._learners = learners
        self._forward = forward
        self._limits = limits
        self._seed = seed
        self._sharing = sharing
        self._score = partial(sharing.rows, work=forward.score)

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Take the optimiser steps of one update; every learner on its own samples.

        Raises ParityError before anything changes when trainer and sampler disagree, NumericsError when a loss
        or gradient is not finite.
        """
        assert samples, "an update needs samples"
        totals: dict[str, list[float]] = {}
        dropout = self._learners.has_dropout()
        if objective.parity and dropout:
            self._compare(self._gaps(samples), samples, totals)
        for epoch in range(objective.epochs):
            seed_of = partial(self._shuffle_seed, epoch=epoch)
            for number, chosen in enumerate(minibatches(samples, objective.minibatches, seed_of)):
                fresh = objective.parity and not dropout and epoch == number == 0
                self._step([samples[k] for k in chosen], objective, totals, fresh)
        return means(totals)

    def parity(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return |trainer − sampler| log-prob of every target of every policy sample."""
        return [gap_T for _, gap_T in self._gaps(samples)]

    def _gaps(self, samples: Sequence[Sample]) -> list[tuple[str, Tensor]]:
        policy = [sample for sample in samples if Column.BEHAVIOUR in sample.columns]
        scored = self._score(policy)
        return [
            (sample.learner, (s - sample.columns[Column.BEHAVIOUR]).abs())
            for s, sample in zip(scored, policy, strict=True)
        ]

    def check_parity(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Compare the samples' `behaviour` with the log-probs of the current weights; see the protocol."""
        totals: dict[str, list[float]] = {}
        self._compare(self._gaps(samples), samples, totals)
        return means(totals)

    def _compare(
        self, gaps: Sequence[tuple[str, Tensor]], samples: Sequence[Sample], totals: dict[str, list[float]]
    ) -> None:
        """Judge each compute type by its own bound: one model in half precision excuses no other."""
        homes = {name: (home.model, home.adapter) for name, home in self._learners.homes.items()}
        for kind in dict.fromkeys(homes[name][0].dtype for name, _ in gaps):
            own = [gap for name, gap in gaps if homes[name][0].dtype == kind]
            judged = [sample for sample in samples if homes[sample.learner][0].dtype == kind]
            bound = self._limits.parity_tolerance or PARITY[kind]
            check_parity(own, bound, totals, partial(arbitrate, judged, self._score, homes))

    def _step(
        self, samples: Sequence[Sample], objective: Objective, totals: dict[str, list[float]], fresh: bool
    ) -> None:
        learners = self._learners.by_name
        try:
            sums = self._sharing.summed(samples, partial(self._accumulate, objective), learners)
            for name in sorted(sums.bad):
                self._bad_loss(name)
            if fresh:
                self._compare(sums.gaps, samples, totals)
            for name in learners:
                if name in sums.weight or name in sums.bad:
                    self._take_step(name, sums, totals)
        except BaseException:
            for learner in learners.values():
                learner.forget_gradient()  # or the next update would include it
            raise

    def _accumulate(self, objective: Objective, samples: Sequence[Sample]) -> UpdateSums:
        sums = UpdateSums()
        entropy = Entropy.LEARNED if objective.entropy else Entropy.MEASURED
        with self._learners.dropout() as keys_of:
            for _, batch in self._forward.batches(samples):
                losses = []
                for name, part, output in self._forward.outputs(batch, entropy, keys_of(batch)):
                    loss, gap_K = self._loss(objective, part, output)
                    learner = self._learners.by_name[name]
                    if not bool(torch.isfinite(loss.total)):
                        sums.bad.add(name)
                        continue
                    sums.add(name, loss)
                    if isinstance(output, TokenStatistics):
                        sums.watch(name, output, part.targets)
                    sums.gaps.extend([] if gap_K is None else [(name, gap_K)])
                    factor = objective.critic_coefficient if isinstance(output, Tensor) else 1.0
                    losses.append(learner.scaled(loss.total * factor))
                losses += self._forward.ties()
                if losses:
                    torch.autograd.backward(losses)
        return sums

    def _take_step(self, name: str, sums: UpdateSums, totals: dict[str, list[float]]) -> None:
        learner, weight = self._learners.by_name[name], sums.weight.get(name, 0.0)
        if name in sums.bad or weight == 0:
            learner.forget_gradient()
            book(totals, f"skipped/{name}", 1.0, 1.0)
            return
        for metric, value in learner.step(weight, self._limits.non_finite, self._sharing.agreed).items():
            book(totals, f"{metric}/{name}", value, 1.0)
        for metric, (total, share) in sums.sums[name].items():
            book(totals, metric, total, share)

    def _loss(
        self, objective: Objective, part: Part, output: TokenStatistics | Tensor
    ) -> tuple[Loss, Tensor | None]:
        if isinstance(output, Tensor):
            assert objective.critic_loss is not None, "critic samples need a critic loss"
            return objective.critic_loss(output, part.targets), None
        outputs = Outputs(output.logp_K, output.entropy_K if objective.entropy else None)
        gap_K = None
        if Column.BEHAVIOUR in part.targets.columns:
            gap_K = (output.logp_K.detach() - part.targets[Column.BEHAVIOUR]).abs()[
                part.targets.mask_K.bool()
            ]
        return objective.policy_loss(outputs, part.targets), gap_K

    def _bad_loss(self, learner: str) -> None:
        if self._limits.non_finite == "stop":
            steps = self._learners.by_name[learner].steps
            raise NumericsError(
                f"The loss of '{learner}' is not finite at its update {steps}. Look at "
                "this step's rewards, lower `optimizer.lr`, or set `training.non_finite: skip`."
            )

    def _shuffle_seed(self, learner: str, epoch: int) -> int:
        return derive_seed(self._seed, learner, self._learners.by_name[learner].steps, epoch)
