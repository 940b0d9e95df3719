"""Trains adapters through the published client package `tinker`: `python tinker_client.py URL TOKENS`, with a JSON result.

The argument TOKENS lists the token ids of the ten digits, which are all that the agents need.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import tinker
from tinker import types

DIGITS: list[int] = json.loads(sys.argv[2])
SUMS = [([DIGITS[a], DIGITS[b]], DIGITS[a + b]) for a in range(2) for b in range(3)]
"""Pairs of numbers, and their sums."""


def adam(rate: float) -> types.AdamParams:
    """Return the settings of an optimiser step."""
    return types.AdamParams(learning_rate=rate, beta1=0.8, beta2=0.9, eps=1e-8, grad_clip_norm=50.0)


def one_token(seed: int) -> types.SamplingParams:
    """Return the settings of samples of one token."""
    return types.SamplingParams(max_tokens=1, seed=seed)


def datum(text: Sequence[int], **inputs: Any) -> types.Datum:
    """Return an example whose last token counts."""
    zeros = [0.0] * (len(text) - 2)
    columns = {name: [*zeros, value] for name, value in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(text[:-1])),
        loss_fn_inputs={"target_tokens": list(text[1:]), **columns},
    )


def supervise(client: Any, texts: Sequence[list[int]], steps: int) -> list[float]:
    """Teach a model the last token of each text, and return the losses per text."""
    losses = []
    data = [datum(text, weights=1.0) for text in texts]
    for _ in range(steps):
        passes = client.forward_backward(data, "cross_entropy")
        step = client.optim_step(adam(0.03))
        losses.append(passes.result().metrics["loss:sum"] / len(data))
        step.result()
    return losses


def reinforce(client: Any, samples: Sequence[tuple[list[int], Any, float]]) -> None:
    """Take one step on samples with their advantages."""
    data = [
        datum([*prompt, each.tokens[0]], logprobs=each.logprobs[0], advantages=advantage)
        for prompt, each, advantage in samples
    ]
    passes = client.forward_backward(data, "importance_sampling")
    step = client.optim_step(adam(0.01))
    passes.result()
    step.result()


def arithmetic(client: Any, steps: int) -> list[float]:
    """Train a model to add two numbers, and return the mean rewards."""
    rewards = []
    for number in range(steps):
        sampler = client.save_weights_and_get_sampling_client().result()
        begun = [
            sampler.sample(
                types.ModelInput.from_ints(prompt), num_samples=16, sampling_params=one_token(number)
            )
            for prompt, _ in SUMS
        ]
        samples, total = [], 0.0
        for (prompt, answer), future in zip(SUMS, begun, strict=True):
            group = future.result().sequences
            correct = [float(each.tokens[0] == answer) for each in group]
            mean = sum(correct) / len(group)
            total += mean
            samples += [
                (prompt, each, each_correct - mean) for each, each_correct in zip(group, correct, strict=True)
            ]
        rewards.append(total / len(SUMS))
        reinforce(client, samples)
    return rewards


def self_play(clients: Sequence[Any], steps: int) -> list[float]:
    """Train two agents that bid against each other, of whom the higher bid wins, and return the mean bids."""
    prompt, bids = [DIGITS[0], DIGITS[9]], []
    for number in range(steps):
        samplers = [
            each.result() for each in [client.save_weights_and_get_sampling_client() for client in clients]
        ]
        begun = [
            sampler.sample(
                types.ModelInput.from_ints(prompt), num_samples=48, sampling_params=one_token(number)
            )
            for sampler in samplers
        ]
        groups = [future.result().sequences for future in begun]
        values = [
            [DIGITS.index(each.tokens[0]) if each.tokens[0] in DIGITS else -1 for each in group]
            for group in groups
        ]
        bids.append(sum(map(sum, values)) / 96)
        for client, group, own, other in zip(clients, groups, values, reversed(values), strict=True):
            won = [float(a > b) - float(a < b) for a, b in zip(own, other, strict=True)]
            mean = sum(won) / len(won)
            reinforce(client, [(prompt, each, w - mean) for each, w in zip(group, won, strict=True)])
    return bids


def main() -> None:
    """Train three models of two sessions, save and load a state, and print what happened."""
    service = tinker.ServiceClient(base_url=sys.argv[1])
    capabilities = tinker.RestClient(base_url=sys.argv[1]).get_server_capabilities().result()
    base = capabilities.supported_models[0].model_name
    one, two, adder = [
        each.result()
        for each in [service.create_lora_training_client(base_model=base, rank=8, seed=k) for k in range(3)]
    ]
    found: dict[str, Any] = {"rank": adder.get_info().lora_rank}
    found["losses"] = supervise(adder, [[*prompt, answer] for prompt, answer in SUMS], 3)
    found["rewards"] = arithmetic(adder, 16)
    for client in (one, two):
        supervise(client, [[DIGITS[0], DIGITS[9], DIGITS[bid]] for bid in (1, 2)], 8)
    found["bids"] = self_play((one, two), 8)
    # A state continues exactly, with the moments of the optimiser.
    state = one.save_state("end").result()
    copy = service.create_training_client_from_state_with_optimizer(state.path).result()
    found["continued"] = []
    for client in (one, copy):
        data = [datum([DIGITS[0], DIGITS[9], DIGITS[3]], weights=1.0)]
        passes = client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.01)).result()
        passes.result()
        output = client.forward(data, "cross_entropy").result()
        found["continued"].append([float(each) for each in output.loss_fn_outputs[0]["logprobs"].data])
    # The student learns from samples of the teacher.
    teacher = adder.save_weights_and_get_sampling_client().result()
    begun = [
        (prompt, teacher.sample(types.ModelInput.from_ints(prompt), 8, one_token(number)))
        for number, (prompt, _) in enumerate(SUMS)
    ]
    texts = [[*prompt, each.tokens[0]] for prompt, future in begun for each in future.result().sequences]
    found["distances"] = supervise(one, texts, 4)
    try:
        one.forward_backward([datum([1, 2, 3], weights=1.0)], "ppo").result()
    except tinker.APIStatusError as error:
        found["error"] = str(error)
    service.close("success").result()
    sys.stdout.write(json.dumps(found) + "\n")


main()
