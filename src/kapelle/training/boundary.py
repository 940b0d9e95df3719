"""Check the results of an algorithm's own code: signals, credit, losses and hooks.

Error messages name the algorithm, and for credit also the agent and the turn. Other modules rely on these checks.

Shapes: T completion tokens of one turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from kapelle.algorithm import Algorithm, Credit, CreditFunction, Loss
from kapelle.errors import AlgorithmError, KapelleError, NumericsError
from kapelle.rows import NAMED, Learners, Sampled, Signals, TurnKey
from kapelle.runtime.foreign_code import place_of, words_of
from kapelle.types import Group, Turn

P = ParamSpec("P")
R = TypeVar("R")


def gather_signals(algorithm: Algorithm, step: Sampled, engine: Learners) -> Signals:
    """Return the results that the algorithm's signals compute for a step.

    Raises:
        AlgorithmError: A signal raises an error, or its result is not a mapping of mappings with tensors of the correct shape.
    """
    rows: dict[str, Any] = {}
    for signal in algorithm.needs:
        who = f"the signal `{type(signal).__name__}`"
        found: object = _called(algorithm, who, signal.gather, step, engine)
        if not isinstance(found, Mapping) or not all(isinstance(own, Mapping) for own in found.values()):
            raise AlgorithmError(
                f"Algorithm '{algorithm.name}': `gather` of {who} returned {_described(found)}. Return a dict from the name "
                "of a result, such as 'values', to a dict from `TurnKey` to the result of that turn."
            )
        for name in found:
            if not isinstance(name, str) or name in ("step", "more"):
                raise AlgorithmError(
                    f"Algorithm '{algorithm.name}': `gather` of {who} returned a result named {name!r:.60}. Rename it, because `step` and `more` are "
                    "fields of `Signals`."
                )
        rows |= found
    for field in ("reference", "proximal"):
        own = rows.get(field, {})
        for key, turn in step.turns:
            if key in own:
                _need_floats(
                    algorithm, f"`Signals.{field}`", own[key], (len(turn.completion_ids),), key, turn
                )
    named = {name: rows.pop(name) for name in NAMED & rows.keys()}
    return Signals(**named, step=step.number, more=rows)


def give_credit(
    algorithm: Algorithm,
    give: CreditFunction,
    step: Sampled,
    groups: Sequence[Group],
    signals: Signals,
    stop: bool,
) -> Mapping[TurnKey, Credit]:
    """Return the credit of every turn that is trained on. The argument `groups` contains the groups of the step with all rewards.

    If `stop` is true, advantages and returns must be finite. If `stop` is false, the engine skips updates that are not
    finite.

    Raises:
        AlgorithmError: The function `give` raises an error, omits or adds a turn, or returns an invalid type or shape.
        NumericsError: An advantage or return is not finite, and `stop` is true.
    """
    credit: object = _called(algorithm, "`credit`", give, groups, signals, step=step)
    if not isinstance(credit, Mapping):
        raise AlgorithmError(
            f"Algorithm '{algorithm.name}': `credit` returned {_described(credit)}. Return a dict from `TurnKey` to `Credit`."
        )
    critic = algorithm.critic
    for key, turn in step.turns:
        if key not in credit:
            if turn.trained or (critic is not None and critic.everyone):
                raise AlgorithmError(
                    f"Algorithm '{algorithm.name}' gave no credit to {_name(key, turn)}. Return one `Credit` for every turn of "
                    "`kapelle.rows.turns_of(groups)`, with `weight=0.0` to exclude it from the loss."
                )
            continue
        given: object = credit[key]
        if not isinstance(given, Credit):
            raise AlgorithmError(
                f"Algorithm '{algorithm.name}' gave {_name(key, turn)} {_described(given)}. Give it a `kapelle.Credit`."
            )
        tokens = len(turn.completion_ids)
        advantage_T: object = given.advantage_T
        if isinstance(advantage_T, Tensor) and not (turn.trained and given.weight):
            tokens = advantage_T.numel()  # no policy learns from it
        shaped: list[tuple[str, Tensor, tuple[int, ...]]] = [("advantage_T", given.advantage_T, (tokens,))]
        if given.return_T is not None and key in signals.values:
            shaped.append(("return_T", given.return_T, tuple(signals.values[key].shape)))
        if given.after is not None:
            shaped.append(("after", given.after, ()))
        for name, tensor, shape in shaped:
            _need_floats(algorithm, f"`{name}`", tensor, shape, key, turn)
        weight: object = given.weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise AlgorithmError(
                f"Algorithm '{algorithm.name}' gave {_name(key, turn)} the weight {_described(weight)}. Give a number of at least 0.0."
            )
        pair: object = given.pair
        if pair is not None and (isinstance(pair, bool) or not isinstance(pair, int)):
            raise AlgorithmError(
                f"Algorithm '{algorithm.name}' gave {_name(key, turn)} the pair {_described(pair)}. Give a whole number, or None."
            )
        if stop and weight > 0:
            for name, tensor, _ in shaped:
                if not bool(torch.isfinite(tensor).all()):
                    raise NumericsError(
                        f"Algorithm '{algorithm.name}' gave {_name(key, turn)} a `{name}` that is not finite. Check the episode's "
                        "rewards, lower `optimizer.lr`, or set `training.non_finite: skip`."
                    )
    known = {key for key, _ in step.turns}
    if invented := [key for key in credit if key not in known]:
        raise AlgorithmError(
            f"Algorithm '{algorithm.name}' gave credit to {_described(invented[0])}, which is not a turn of a valid episode of this step. Use the "
            "keys of `kapelle.rows.turns_of(groups)`."
        )
    return credit


def checked_loss(algorithm: str, kind: str, loss: Callable[P, Loss]) -> Callable[P, Loss]:
    """Return a loss function (`policy_loss` or `critic_loss`) with checks that raise AlgorithmError if its result is invalid."""
    who = f"Algorithm '{algorithm}': `{kind}`"

    def checked(*given: P.args, **named: P.kwargs) -> Loss:
        try:
            found: object = loss(*given, **named)
        except Exception as error:
            _raise_named(who, error)
            raise
        if not isinstance(found, Loss):
            raise AlgorithmError(
                f"{who} returned {_described(found)}. Return `kapelle.algorithm.Loss(total, weight)`."
            )
        for name, value in (("total", found.total), ("weight", found.weight)):
            scalar: object = value
            if not isinstance(scalar, Tensor) or scalar.ndim:
                raise AlgorithmError(
                    f"{who} returned a `{name}` that is {_described(scalar)}. Return a scalar tensor: the sum over the batch."
                )
        if not found.total.requires_grad:
            raise AlgorithmError(
                f"{who} returned a `total` without a gradient. Compute it from `outputs` without `detach`."
            )
        return found

    return checked


def after_update(algorithm: Algorithm, step: Sampled, engine: Learners) -> None:
    """Run the hooks of the algorithm in order. Raises AlgorithmError if a hook raises an error."""
    for hook in algorithm.after_update:
        _called(algorithm, f"the hook `{type(hook).__name__}`", hook, step.number, step.team, engine)


def _need_floats(
    algorithm: Algorithm, what: str, value: object, shape: tuple[int, ...], key: TurnKey, turn: Turn
) -> None:
    if isinstance(value, Tensor) and tuple(value.shape) == shape and value.is_floating_point():
        return
    wanted = (
        f"one value for each of the completion's {shape[0]} tokens, shape [{shape[0]}]"
        if shape == (len(turn.completion_ids),)
        else f"shape {list(shape)}"
    )
    raise AlgorithmError(
        f"Algorithm '{algorithm.name}' gave {_name(key, turn)} {_described(value)} as {what}. Give a tensor of floats with {wanted}."
    )


def _name(key: TurnKey, turn: Turn) -> str:
    """Return a description of a turn for error messages."""
    return f"agent '{turn.agent}' for turn {key.turn} of episode {key.episode} of group {key.group}"


def _described(value: object) -> str:
    """Return a short description of a value for error messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and type {value.dtype}".replace("torch.", "")
    if value is None or isinstance(value, bool | int | float | TurnKey):
        return repr(value)
    try:
        shown = repr(value)
    except Exception:  # noqa: BLE001 - the user's own code
        shown = ""
    return f"{shown} (a {type(value).__name__})" if 0 < len(shown) <= 60 else f"a {type(value).__name__}"


def _called(
    algorithm: Algorithm, who: str, call: Callable[..., R], *given: Any, step: Sampled | None = None
) -> R:
    """Call a function of an algorithm and return its result. Errors of the function are raised as AlgorithmError with their line."""
    try:
        found = call(*given)
    except Exception as error:
        _raise_named(f"Algorithm '{algorithm.name}': {who}", error, step)
        raise
    if isinstance(found, Coroutine):
        found.close()
        raise AlgorithmError(
            f"Algorithm '{algorithm.name}': {who} is async. Write `def` in place of `async def`."
        )
    return found


def _raise_named(who: str, error: Exception, step: Sampled | None = None) -> None:
    """Raise AlgorithmError from an error in an algorithm's own code, with its line.

    For errors in kapelle's code, return without raising.
    """
    where = place_of(error)
    if not where or isinstance(error, MemoryError | torch.OutOfMemoryError | KapelleError):
        return
    message = words_of(error)
    if step is not None and isinstance(error, KeyError) and error.args and isinstance(error.args[0], TurnKey):
        turns = dict(step.turns)
        key = error.args[0]
        message = f"it has no value for {_name(key, turns[key])}" if key in turns else message
    raise AlgorithmError(
        f"{who} raised {type(error).__name__} ({where}){f': {message}' if message else ''}."
    ) from error
