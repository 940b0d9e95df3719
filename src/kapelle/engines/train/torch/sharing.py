"""Sum the results of an update before the division by the global weight, and split the work over processes.

Every process takes some of the samples. Scored tensors are gathered from all processes. Losses, weights and gradients
are summed over all processes before the division. The optimiser step is therefore equal to that of a single process for
any split of the samples.

In tensor shapes, K is the number of target tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kapelle.algorithm import Loss, Targets
from kapelle.engines.train.batch import shard_samples
from kapelle.engines.train.torch.learner import Learner
from kapelle.functional.distributions import Histogram, added, histogram
from kapelle.functional.divergences import TokenStatistics
from kapelle.functional.policy_losses import token_log_ratio
from kapelle.rows import Column, Sample
from kapelle.runtime.ranks import Ranks
from kapelle.runtime.tensors import packed, read_together, unpacked

TAIL = 2.0
"""The factor that defines the tail: a token is in the tail if the new weights change its probability by more than this
factor."""


def add_metric(totals: dict[str, list[float]], name: str, total: float, weight: float) -> None:
    """Add to the sum and the weight of a metric."""
    entry = totals.setdefault(name, [0.0, 0.0])
    entry[0] += total
    entry[1] += weight


def means(totals: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the mean of each metric. For probability ratios ρ, also return the effective sample size (Σρ)² / (n·Σρ²).

    The effective sample size is 1 if all ratios are equal.
    """
    row = {name: total / weight if weight else 0.0 for name, (total, weight) in totals.items()}
    for name in [name for name in row if name.startswith("ratio_square/")]:
        policy = name.removeprefix("ratio_square/")
        square, mean = row.pop(name), row.pop(f"ratio_mean/{policy}")
        row[f"effective_samples/{policy}"] = mean * mean / square if square else 0.0
    return row


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gaps between the log-probs of trainer and sampler at the counted targets of some samples of one learner."""

    learner: str
    off_K: Tensor
    """The trainer's log-prob minus the sampler's log-prob in nats, concatenated over the samples."""
    samples: tuple[int, ...]
    """The indices of the samples in the step."""


@dataclass(slots=True)
class UpdateSums:
    """The sums of one optimiser step, by learner."""

    weight: dict[str, float] = field(default_factory=dict)
    sums: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    """The learners with a loss that is not finite. The gradients of these learners are dropped."""
    gaps: list[Gaps] = field(default_factory=list)
    unread_gaps: list[tuple[Gaps, Tensor]] = field(default_factory=list)
    """The gaps of all tokens, with the mask of counted tokens, which are stored until `read` is called."""
    spread: dict[str, Histogram] = field(default_factory=dict)
    """Histograms of the policies' tokens, by kind and policy (see `CountsTokens`)."""
    unread_tokens: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """The values of tokens for the histograms, with the mask of counted tokens, which are stored until `read` is
    called."""
    unread: list[tuple[str, str, Tensor, Tensor]] = field(default_factory=list)
    """Tuples of learner, metric (empty for the weight), sum and weight, which are stored until `read` is called,
    because reading waits for a GPU."""

    def add(self, learner: str, loss: Loss) -> None:
        """Store the loss and the metrics of a batch until `read` is called."""
        self.unread.append((learner, "", loss.total.detach(), loss.weight))
        for name, (total, weight) in {"loss": (loss.total.detach(), loss.weight), **loss.metrics}.items():
            self.unread.append((learner, f"{name}/{learner}", total, weight))

    def read(self) -> None:
        """Read the stored values with one synchronisation per device. Learners with a loss that is not finite are added to `bad`."""
        scalars = [each for entry in self.unread for each in entry[2:]]
        columns = [each for gaps, mask_K in self.unread_gaps for each in (gaps.off_K, mask_K)]
        tokens = [each for pairs in self.unread_tokens.values() for pair in pairs for each in pair]
        read = iter(read_together([*scalars, *columns, *tokens]))
        for learner, metric, *_ in self.unread:
            total, weight = float(next(read)), float(next(read))
            if metric:
                add_metric(self.sums.setdefault(learner, {}), metric, total, weight)
                continue
            self.weight[learner] = self.weight.get(learner, 0.0) + weight
            if not math.isfinite(total):
                self.bad.add(learner)
        for gaps, _ in self.unread_gaps:
            off_K, mask_K = next(read), next(read)
            self.gaps.append(replace(gaps, off_K=off_K[mask_K.bool()].to(gaps.off_K.dtype)))
        for name, pairs in self.unread_tokens.items():
            counted = [next(read)[next(read).bool()] for _ in pairs]
            if (made := histogram(torch.cat(counted).numpy())) is not None:
                self.spread[name] = made
        self.unread.clear()
        self.unread_gaps.clear()
        self.unread_tokens.clear()

    def merge(self, other: UpdateSums) -> None:
        """Add the sums of another process."""
        for name, weight in other.weight.items():
            self.weight[name] = self.weight.get(name, 0.0) + weight
        for name, metrics in other.sums.items():
            for metric, (total, weight) in metrics.items():
                add_metric(self.sums.setdefault(name, {}), metric, total, weight)
        self.bad |= other.bad
        self.gaps.extend(other.gaps)
        for name, counts in other.spread.items():
            self.spread[name] = added([self.spread[name], counts]) if name in self.spread else counts

    def add_gaps(self, policy: str, logp_K: Tensor, targets: Targets, samples: tuple[int, ...]) -> None:
        """Add the gaps between the log-probs of trainer and sampler for these samples, if the sampler's log-probs are known."""
        if Column.BEHAVIOUR in targets.columns:
            off_K = logp_K.detach() - targets[Column.BEHAVIOUR]
            self.unread_gaps.append((Gaps(policy, off_K, samples), targets.mask_K))

    def add_statistics(self, policy: str, statistics: TokenStatistics, targets: Targets) -> None:
        """Add the statistics of a policy: the entropy, and the probability ratios between trainer and sampler."""
        mask_K = targets.mask_K
        found = {"entropy": statistics.entropy_K.detach()}
        spread = {"update_entropy": found["entropy"]}
        if Column.BEHAVIOUR in targets.columns:
            log_ratio_K = token_log_ratio(statistics.logp_K.detach(), targets[Column.BEHAVIOUR])
            spread["update_log_ratio"] = log_ratio_K
            ratio_K = log_ratio_K.exp()
            tail_K = (ratio_K > TAIL) | (ratio_K < 1 / TAIL)
            found |= {"ratio_tail": tail_K, "ratio_mean": ratio_K, "ratio_square": ratio_K.square()}
        for kind, value_K in spread.items():
            self.unread_tokens.setdefault(f"{kind}/{policy}", []).append((value_K, mask_K))
        tokens = mask_K.sum()
        for name, value_K in found.items():
            self.unread.append((policy, f"{name}/{policy}", (value_K * mask_K).sum(), tokens))


Accumulate = Callable[[Sequence[Sample]], UpdateSums]
"""A function that accumulates the gradients of samples in the learners and returns the sums."""


class AmongRanks:
    """The ranks of a run, among which the samples of a step are divided so that each has about the same number of tokens."""

    def __init__(self, ranks: Ranks, *, in_lockstep: bool = False, together: int = 1) -> None:
        """Share work with these ranks. With `in_lockstep`, ranks work together and are not interrupted during a share.

        If `together` is greater than 1, this number of consecutive ranks hold one model (tensor parallelism) and work
        on the same share.
        """
        self._ranks = ranks
        self._in_lockstep = in_lockstep
        self._together = together
        self._shares = ranks.size // together
        self._own = ranks.rank // together

    def _meet(self, at: str, share: Callable[[], bytes]) -> list[bytes]:
        if not self._in_lockstep:
            return self._ranks.all_gather(at, share)
        done = share()
        return self._ranks.all_gather(at, lambda: done)[:: self._together]

    def rows(
        self, samples: Sequence[Sample], work: Callable[[Sequence[Sample]], list[Tensor]]
    ) -> list[Tensor]:
        """Return the results of `work`, one tensor per sample, computed by all ranks and gathered from them."""
        if self._ranks.size == 1:
            return work(samples)
        dealt = shard_samples(samples, self._shares)

        def share() -> bytes:
            own = work([samples[k] for k in dealt[self._own]])
            return packed(None, {str(k): row for k, row in enumerate(own)})

        found: dict[int, Tensor] = {}
        for chosen, part in zip(dealt, self._meet("score", share), strict=True):
            _, rows = unpacked(part)
            found |= {k: rows[str(place)] for place, k in enumerate(chosen)}
        return [found[k] for k in range(len(samples))]

    def summed(
        self, samples: Sequence[Sample], accumulate: Accumulate, learners: Mapping[str, Learner]
    ) -> UpdateSums:
        """Accumulate the gradients of this rank's samples, and sum the results and gradients of all ranks."""
        if self._ranks.size == 1:
            return accumulate(samples)
        dealt = shard_samples(samples, self._shares)[self._own]

        def share() -> bytes:
            sums = accumulate([samples[k] for k in dealt])
            # A sharded gradient (`DTensor`) is already summed.
            numbers = {
                name: [
                    k
                    for k, parameter in enumerate(learner.parameters.values())
                    if parameter.grad is not None and not isinstance(parameter.grad, DTensor)
                ]
                for name, learner in learners.items()
            }
            plain = {
                "weight": sums.weight,
                "sums": sums.sums,
                "bad": sorted(sums.bad),
                "spread": {name: each.row() for name, each in sums.spread.items()},
                "gaps": [(each.learner, [dealt[k] for k in each.samples]) for each in sums.gaps],
                "gradients": numbers,
            }
            return packed(plain, {str(k): each.off_K for k, each in enumerate(sums.gaps)})

        with_gradient = {name: set[int]() for name in learners}
        joined = UpdateSums()
        for plain, tensors in [unpacked(part) for part in self._meet("update", share)]:
            gaps = [
                Gaps(name, tensors[str(k)], tuple(members)) for k, (name, members) in enumerate(plain["gaps"])
            ]
            spread = {
                name: Histogram(e, k, tuple(counts)) for name, (e, k, counts) in plain["spread"].items()
            }
            joined.merge(UpdateSums(plain["weight"], plain["sums"], set(plain["bad"]), gaps, spread=spread))
            for name, numbers in plain["gradients"].items():
                with_gradient[name] |= set(numbers)
        # A parameter without a gradient in any rank stays without one, so the optimiser skips it.
        gradients: list[Tensor] = []
        for name, learner in learners.items():
            parameters = list(learner.parameters.values())
            for parameter in (parameters[number] for number in sorted(with_gradient[name])):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        self._ranks.add(gradients)
        if self._together > 1 and gradients:  # each share was added once per rank that holds it
            torch._foreach_div_(gradients, float(self._together))
        return joined

    def agreed(self, wrong: str | None) -> str | None:
        """Return, in all ranks, the fault of a learner's step in the first rank that has one, or None.

        Ranks that hold shards of the weights exchange their faults. Ranks that hold complete weights detect the same
        fault by themselves.
        """
        if not self._in_lockstep:
            return wrong
        faults = self._ranks.all_gather("step", (wrong or "").encode)
        return next((each.decode() for each in faults if each), None)
