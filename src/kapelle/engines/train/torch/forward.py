"""Forward passes: log-probs and values of target tokens, and embeddings of the tokens before them.

Shapes: N flat tokens, K target tokens, D hidden size, T targets of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kapelle.engines.train.batch import Batch, Part, pack
from kapelle.engines.train.bundles import breakable, passes
from kapelle.engines.train.torch.head import Entropy, token_statistics
from kapelle.engines.train.torch.learners import Learners
from kapelle.functional.divergences import TokenStatistics
from kapelle.rows import Sample

Even = Callable[[Mapping[str, Sequence[tuple[list[int], Batch]]]], list[tuple[list[int], Batch]]]
"""Takes the passes over every base, by the name of a learner on it; returns those to take, in order."""


class Forward:
    """All learners that share a base in one pass."""

    def __init__(self, learners: Learners, microbatch_tokens: int, *, recompute: bool = False) -> None:
        """Evaluate these learners, with at most `microbatch_tokens` tokens in one pass.

        With `recompute` a backward pass computes each decoder block again.
        """
        self._homes = learners.homes
        self._microbatch_tokens = microbatch_tokens
        self._recompute = recompute
        self.even: Even | None = None
        self._tie: Tensor | None = None

    def ties(self) -> list[Tensor]:
        """Return a loss of zero that depends on the last pass, where every process has to go back through it."""
        return [] if self._tie is None else [self._tie]

    @torch.no_grad()
    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the mean last hidden state `_D` (float32) over the tokens before each sample's targets."""
        answers: dict[int, Tensor] = {}
        for chosen, batch in self.batches(samples):
            home = self._homes[batch.owners[0][0]]
            with home.model.computing([(None, first, last) for _, first, last in batch.owners]):
                hidden_ND = home.model.hidden(batch.tokens_N, batch.positions_N, batch.plan)
            hidden_KD = hidden_ND.index_select(0, batch.source_K).float().cpu()
            for part in batch.parts.values():
                rows = hidden_KD[part.place].split(_counts(part))
                for k, rows_TD in zip(part.samples, rows, strict=True):
                    answers[chosen[k]] = rows_TD.mean(0)
        return [answers[k] for k in range(len(samples))]

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-probs or values `_T` (float32) of each sample's targets, without dropout."""
        return self._rows(samples, Entropy.LEFT_OUT, lambda found: found.logp_K)

    def examine(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-prob and entropy `_T2` (float32, nats) of each policy sample's targets, without dropout."""
        return self._rows(
            samples, Entropy.MEASURED, lambda found: torch.stack([found.logp_K, found.entropy_K], 1)
        )

    @torch.no_grad()
    def _rows(
        self, samples: Sequence[Sample], entropy: Entropy, rows: Callable[[TokenStatistics], Tensor]
    ) -> list[Tensor]:
        answers: dict[int, Tensor] = {}
        for chosen, batch in self.batches(samples):
            for _learner, part, output in self.outputs(batch, entropy):
                values_K = rows(output) if isinstance(output, TokenStatistics) else output
                for k, column in zip(part.samples, values_K.split(_counts(part)), strict=True):
                    answers[chosen[k]] = column.float().cpu()
        return [answers[k] for k in range(len(samples))]

    def outputs(
        self, batch: Batch, entropy: Entropy, keys_N: Tensor | None = None
    ) -> list[tuple[str, Part, TokenStatistics | Tensor]]:
        """Run one forward pass and return each learner's statistics or values `_K` of its targets.

        `keys_N` are the tokens' keys of dropout, where it is on.
        """
        home = self._homes[batch.owners[0][0]]
        route = [(self._homes[name].adapter, first, last) for name, first, last in batch.owners]
        recompute = self._recompute and torch.is_grad_enabled()
        with home.model.computing(route, keys_N):
            hidden_ND = home.model.hidden(batch.tokens_N, batch.positions_N, batch.plan, recompute=recompute)
            if self.even is not None and torch.is_grad_enabled():
                self._tie = hidden_ND.sum() * 0
            hidden_KD = hidden_ND.index_select(0, batch.source_K)
            return [
                (
                    name,
                    part,
                    home.model.values(name, hidden_KD[part.place])
                    if self._homes[name].critic
                    else token_statistics(home.model, hidden_KD, batch, part, entropy),
                )
                for name, part in batch.parts.items()
            ]

    def batches(self, samples: Sequence[Sample]) -> Iterator[tuple[list[int], Batch]]:
        """Pack samples base by base; each batch comes with the indices of the samples it was packed from."""
        bases: dict[int, list[int]] = {id(self._homes[name].model): [] for name in self._homes}
        for k, sample in enumerate(samples):
            bases.setdefault(id(self._homes[sample.learner].model), []).append(k)
        names = {id(home.model): name for name, home in self._homes.items()}
        found: dict[str, list[tuple[list[int], Batch]]] = {name: [] for name in names.values()}
        for base, chosen in bases.items():
            model = self._homes[names[base]].model
            for members, room in passes(chosen, samples, self._microbatch_tokens):
                own = [samples[k] for k in members]
                packed = pack(own, room, model.device, share=model.flat is not None)
                found[names[base]].extend((members, batch) for batch in packed)
        return breakable(
            [each for own in found.values() for each in own] if self.even is None else self.even(found)
        )


def _counts(part: Part) -> list[int]:
    """Return how many targets each of a part's samples has."""
    counts: list[int] = part.targets.segment_K.bincount(minlength=part.targets.segments).tolist()
    return counts
