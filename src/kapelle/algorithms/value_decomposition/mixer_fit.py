"""Fitting Q_tot to what teams earned: targets, target networks, the optimiser, and their state.

- `monte_carlo`: Q_tot of a round is fitted to the discounted rewards that followed it. An episode cut by a limit of
  turns counts with what it was paid.
- `td`: to r + γ·Q̄_tot of the next round's own actions (SARSA: nothing is maximised), mixed over more steps by λ. The
  last round of a cut episode has no next actions: it is no row of the fit, and the one before it uses Q̄ there.

Q̄ is the target network: a copy at the start, of utilities and mixer both, that follows softly or by period.

Shapes: B rounds, N episodes, K rounds of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kapelle.algorithms.value_decomposition.replay import Fitted, Replay, Rounds
from kapelle.algorithms.value_decomposition.settings import FitConfig, Soft
from kapelle.algorithms.value_decomposition.utilities import TeamEstimate, TeamValue
from kapelle.errors import NumericsError
from kapelle.functional.masking import keep_masked, masked_mean, pack, segment_mean, unpack
from kapelle.functional.mixing import copied, periodic_update, soft_update
from kapelle.functional.returns import lambda_return, return_to_go
from kapelle.models.finite import learned, poisoned
from kapelle.runtime.interrupts import stop_if_asked
from kapelle.runtime.randomness import derive_seed

GRADIENT_NORM = 10.0
"""Norm to which the gradient of a fit is clipped, as in QMIX's code."""

FADING = 0.8
"""Factor by which the measured worth of a fit fades from step to step: about the last five count."""


class Foresight:
    """How much of the returns Q_tot explains in episodes that it was not fitted on.

    R² = 1 − Σ (R − Q_tot)² / Σ R² with both taken above their means over the episodes of a task (only what differs
    there is credited), each step before it is fitted. The sums are kept over steps, the older ones fading by `FADING`.
    """

    def __init__(self) -> None:
        """Start with empty sums."""
        self._error = self._spread = 0.0

    @property
    def weight(self) -> float:
        """R² over the steps seen so far, clipped to [0, 1]; 0 before there were any."""
        return max(0.0, 1.0 - self._error / self._spread) if self._spread > 0 else 0.0

    def see(self, return_B: Tensor, total_B: Tensor, set_B: Tensor, sets: int) -> float | None:
        """Add a step's returns and predictions; return its own R², None if no task's returns vary."""
        over_B, foreseen_B = (group_above_mean(x_B, set_B, sets) for x_B in (return_B, total_B))
        error, spread = float((over_B - foreseen_B).square().sum()), float(over_B.square().sum())
        self._error, self._spread = FADING * self._error + error, FADING * self._spread + spread
        return 1.0 - error / spread if spread > 0 else None

    def state(self) -> dict[str, float]:
        """Return the sums."""
        return {"error": self._error, "spread": self._spread}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore what `state` returned."""
        self._error, self._spread = state["error"], state["spread"]


def group_above_mean(x_B: Tensor, set_B: Tensor, sets: int) -> Tensor:
    """Return each entry less its set's mean; a set of one gives 0."""
    return x_B - segment_mean(x_B, torch.ones_like(x_B), set_B, sets)[set_B]


class Target(NamedTuple):
    """The target of Q_tot, and the rounds that have one."""

    value_NK: Tensor
    mask_NK: Tensor


class MixerFit:
    """Utilities, mixer, their target and their optimiser."""

    def __init__(self, settings: FitConfig, gamma: float, net: TeamValue, seed: int) -> None:
        """Take a fresh network; `gamma` discounts from one round to the next."""
        self.net = net.to(settings.device)
        self.target = copied(self.net.state_dict())
        self.updates = 0
        self._settings, self._gamma, self._seed = settings, gamma, seed
        self._optimizer = torch.optim.Adam(self.net.parameters(), settings.lr)
        self._targets = _TARGETS[settings.target]

    def learn(self, replay: Replay) -> float:
        """Take one step's updates on what is remembered; return their mean squared error.

        Raises NumericsError, with everything as it was before, if they broke the weights.
        """
        before = deepcopy(self.state())
        if self.updates == 0:
            self.net.standardise_by(self.placed(replay.draw(replay.capacity, self._seed)).rounds)
            self.target = copied(self.net.state_dict())
        losses: list[float] = []
        for _ in range(self._settings.updates):
            stop_if_asked()
            batch = replay.draw(self._settings.batch, derive_seed(self._seed, "replay", self.updates))
            losses.append(self._update(self.placed(batch)))
        wrong = poisoned(learned({"fit": self.state()}))
        if wrong is not None:
            self.load_state(before)
            raise NumericsError(f"The fit of utilities and mixer broke its weights: {wrong}.")
        return sum(losses) / len(losses)

    def placed(self, batch: Fitted) -> Fitted:
        """Return a batch on the networks' device."""
        where = self._settings.device
        rounds = Rounds(*(column.to(where) for column in batch.rounds))
        return Fitted(rounds, *(column.to(where) for column in batch[1:]))

    def _update(self, batch: Fitted) -> float:
        goal = self.goal(batch)
        error_B = self.net(batch.rounds).total_B - pack(goal.value_NK, batch.mask_NK)
        loss = masked_mean(error_B.square(), pack(goal.mask_NK, batch.mask_NK))
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), GRADIENT_NORM)
        self._optimizer.step()
        self.updates += 1
        self._follow()
        return float(loss.detach())

    @torch.no_grad()
    def goal(self, batch: Fitted) -> Target:
        """Return the target of Q_tot of each round."""
        return self._targets(self, batch)

    def monte_carlo(self, batch: Fitted) -> Target:
        """Return the discounted rewards from each round on."""
        return Target(return_to_go(batch.reward_NK, batch.mask_NK, self._gamma), batch.mask_NK)

    def td(self, batch: Fitted) -> Target:
        """Return r + γ·((1 − λ)·Q̄ + λ·G) of the next round."""
        estimate: TeamEstimate = torch.func.functional_call(self.net, self.target, (batch.rounds,))
        value_NK = unpack(estimate.total_B, batch.mask_NK)
        last_N = batch.mask_NK.sum(1, keepdim=True).long() - 1
        bootstrap_N = keep_masked(value_NK.gather(1, last_N).squeeze(1), batch.cut_N)
        places_NK = torch.arange(value_NK.shape[1], device=value_NK.device).expand_as(value_NK)
        unseen_NK = (places_NK == last_N) & batch.cut_N.bool().unsqueeze(1)
        mask_NK = batch.mask_NK.masked_fill(unseen_NK, 0.0)
        value_NK = lambda_return(
            batch.reward_NK, value_NK, mask_NK, bootstrap_N, gamma=self._gamma, lam=self._settings.lam
        )
        return Target(value_NK, mask_NK)

    def _follow(self) -> None:
        online, follow = self.net.state_dict(), self._settings.follow
        if isinstance(follow, Soft):
            self.target = soft_update(self.target, online, tau=follow.tau)
        else:
            self.target = periodic_update(self.target, online, step=self.updates, period=follow.every)

    def state(self) -> dict[str, object]:
        """Return networks, target, optimiser and the number of updates, which seeds the next draw."""
        moments = self._optimizer.state_dict()["state"]
        return {
            "network": copied(self.net.state_dict()),
            "target": copied(self.target),
            "optimizer": {str(k): copied(v) for k, v in moments.items()},
            "updates": self.updates,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.net.load_state_dict(state["network"])
        self.target = {name: x.clone().to(self._settings.device) for name, x in state["target"].items()}
        moments = {int(k): {n: x.clone() for n, x in v.items()} for k, v in state["optimizer"].items()}
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.updates = state["updates"]


_TARGETS: Mapping[str, Callable[[MixerFit, Fitted], Target]] = {
    "monte_carlo": MixerFit.monte_carlo,
    "td": MixerFit.td,
}
