"""The Tinker protocol over plain HTTP: gradients against PEFT and torch, states, samples, and what clients may do."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import peft
import pytest
import torch
from tests.services.tinker.conftest import KEYS, Caller
from tests.support.tiny import tiny_model, with_adapters
from torch import Tensor

from kapelle.errors import ConfigError
from kapelle.models.weights import read_adapter
from kapelle.runtime.wire import tinker_v1_pb2 as wire
from kapelle.services.tinker.passes import Example, packs, score
from kapelle.services.tinker.service import TinkerServer, read_keys

Callers = Mapping[str, Caller]
Data = tuple[Sequence[int], Mapping[str, Sequence[float]]]
"""Token ids, and the inputs of the loss."""
TEXT = [10, 60, 70, 61, 71, 62, 72, 63]
OTHER = [20, 80, 90, 81, 91, 82]
ADAM = {"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1}
CLIPS = (0.5, 0.02)
"""The largest norm of the gradient in each of two steps."""


def example(text: Sequence[int], **inputs: Sequence[float]) -> Data:
    return text[:-1], {"target_tokens": text[1:], **inputs}


def supervised(text: Sequence[int]) -> Data:
    return example(text, weights=[1.0] * (len(text) - 1))


def reinforced(text: Sequence[int]) -> Data:
    count = len(text) - 1
    advantages = [(-1.0) ** k * (0.5 + k) for k in range(count)]
    return example(text, logprobs=[-4.0 - 0.5 * k for k in range(count)], advantages=advantages)


def saved(server: TinkerServer, client: str, path: str) -> dict[str, Tensor]:
    """Return the weights at a path."""
    model, kind, name = path.removeprefix("tinker://").split("/")
    folder = server.service._folder / client / model.replace(":", "-") / kind / name
    return read_adapter(folder)[0]


class Reference:
    """PEFT's adapter on a copy of the base, trained by torch."""

    def __init__(self, folder: Path) -> None:
        self.model = peft.PeftModel.from_pretrained(
            copy.deepcopy(tiny_model().model), str(folder), is_trainable=True
        )
        own = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(own, lr=0.01, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)

    def logps(self, text: Sequence[int]) -> Tensor:
        logits = self.model(input_ids=torch.tensor([text[:-1]])).logits[0]
        found: Tensor = logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]
        return found

    def weights(self) -> dict[str, Tensor]:
        return {
            key.replace(".default", ""): each for key, each in self.model.named_parameters() if "lora_" in key
        }


def folder_of(server: TinkerServer, client: str, path: str) -> Path:
    model, kind, name = path.removeprefix("tinker://").split("/")
    return server.service._folder / client / model.replace(":", "-") / kind / name


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT reads it
def test_mixed_steps_of_two_clients_equal_those_of_peft_and_torch(
    server: TinkerServer, callers: Callers
) -> None:
    """Two clients train at the same time, with different losses; after two steps each has the weights of a reference."""
    inputs = {"ann": reinforced(TEXT), "bob": supervised(OTHER)}
    losses = {"ann": "importance_sampling", "bob": "cross_entropy"}
    models = {name: each.create(seed=len(name) + k) for k, (name, each) in enumerate(callers.items())}
    starts = {name: each.save(models[name], "start")["path"] for name, each in callers.items()}
    references = {name: Reference(folder_of(server, name, path)) for name, path in starts.items()}
    mixed = server.service.training.mixed
    for clip in CLIPS:
        begun = {
            name: each.begin_passes(models[name], [inputs[name]], losses[name])
            for name, each in callers.items()
        }
        for name, each in callers.items():
            total, (logps,) = each.passes(begun[name])
            text, reference = {"ann": TEXT, "bob": OTHER}[name], references[name]
            logp = reference.logps(text)
            if name == "ann":
                given = {key: torch.tensor(values) for key, values in inputs[name][1].items()}
                loss = -((logp - given["logprobs"]).exp() * given["advantages"]).sum()
            else:
                loss = -logp.sum()
            torch.testing.assert_close(torch.tensor(logps), logp.detach(), atol=1e-5, rtol=0)
            assert math.isclose(total, float(loss.detach()), rel_tol=1e-5)
            reference.optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), clip)
            reference.optimizer.step()
            found = each.step(models[name], **ADAM, grad_clip_norm=clip)["metrics"]["grad_norm"]
            assert math.isclose(found, float(norm), rel_tol=1e-4)
            assert found > clip
    assert server.service.training.mixed >= mixed + 2, "both clients' examples share each pass"
    for name, each in callers.items():
        ours = saved(server, name, each.save(models[name], "end")["path"])
        for key, tensor in references[name].weights().items():
            torch.testing.assert_close(ours[key], tensor.detach(), atol=1e-5, rtol=0)


def test_gradients_add_up_until_the_step(server: TinkerServer, callers: Callers) -> None:
    ann = callers["ann"]
    models = [ann.create(k) for k in range(3)]
    for text in (TEXT, OTHER):  # two calls
        ann.passes(ann.begin_passes(models[0], [supervised(text)]))
    ann.passes(ann.begin_passes(models[1], [supervised(TEXT), supervised(OTHER)]))
    ann.passes(ann.begin_passes(models[2], [supervised(TEXT)]))
    ann.passes(ann.begin_passes(models[2], [supervised(OTHER)], forward_only=True))  # adds nothing
    norms = [ann.step(model, learning_rate=0.1)["metrics"]["grad_norm"] for model in models]
    assert math.isclose(norms[0], norms[1], rel_tol=1e-5)
    assert not math.isclose(norms[0], norms[2], rel_tol=1e-2)
    again = ann.step(models[0], learning_rate=0.0)
    assert again["metrics"]["grad_norm"] == 0.0, "the step has used the gradient up"


@pytest.mark.parametrize(
    ("loss", "config", "expected"),
    [
        ("cross_entropy", {}, lambda logp, q, a: -logp),
        ("importance_sampling", {}, lambda logp, q, a: -((logp - q).exp() * a)),
        (
            "ppo",
            {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5},
            lambda logp, q, a: -torch.minimum((logp - q).exp() * a, (logp - q).exp().clamp(0.9, 1.5) * a),
        ),
        ("cispo", {}, lambda logp, q, a: -(logp - q).exp().clamp(0.8, 1.2).detach() * logp * a),
        ("dro", {"beta": 0.3}, lambda logp, q, a: -(logp * a - 0.15 * (logp - q) ** 2)),
    ],
)
def test_losses_are_the_documented_sums(loss: str, config: dict[str, float], expected: Any) -> None:
    """The value and the gradient of each loss, compared with its formula written out in torch."""
    model = with_adapters("one")
    columns = {
        "logprobs": torch.linspace(-7.0, -4.0, 7)[:, None],
        # The ratios fall from 4 to 0.2; each side of the clip range has both signs.
        "advantages": torch.tensor([-1.0, 2.0, 0.5, -0.5, 1.0, -2.0, 1.5])[:, None],
    }
    weights = torch.linspace(0.0, 1.5, 7)[:, None]
    given = {"weights": weights, **({} if loss == "cross_entropy" else columns)}
    targets = torch.tensor(TEXT[1:])[:, None]
    one = Example("one", tuple(TEXT[:-1]), targets, loss, given, config, backward=True)
    (found,) = score(model, [one])
    parameters = model.bank.parameters("one")
    ours = {key: each.grad for key, each in parameters.items()}
    for each in parameters.values():
        each.grad = None
    with model.bank.routed([("one", 0, 1)]):
        logits = model.model(input_ids=torch.tensor([TEXT[:-1]])).logits[0]
    logp = logits.log_softmax(-1).gather(1, targets)[:, 0]
    each_N = expected(logp, columns["logprobs"][:, 0], columns["advantages"][:, 0])
    total = (each_N * weights[:, 0]).sum()
    total.backward()
    assert math.isclose(found.loss, float(total.detach()), rel_tol=1e-4)
    for key, each in parameters.items():
        torch.testing.assert_close(ours[key], each.grad, atol=1e-3, rtol=1e-3)


def test_passes_mix_adapters_within_the_limit() -> None:
    targets = torch.zeros(4, 1, dtype=torch.long)
    data = [
        Example(name, (1, 2, 3, 4), targets, "cross_entropy", backward=backward)
        for name, backward in (("b", True), ("a", True), (None, False), ("a", True), ("a", False))
    ]
    assert list(packs(data, 100)) == [[1, 3, 0], [2, 4]]
    assert list(packs(data, 8)) == [[1, 3], [0], [2, 4]]
    assert list(packs(data, 1)) == [[1], [3], [0], [2], [4]]


def test_a_large_vocabulary_is_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    grads = []
    for most in (1 << 22, 300):  # the second leaves one row of logits at a time
        monkeypatch.setattr("kapelle.services.tinker.passes.LOGITS", most)
        model = with_adapters("one")
        targets = torch.tensor([[60, 61]] * 7)  # two targets at each position
        data = Example("one", tuple(TEXT[:-1]), targets, "cross_entropy", backward=True)
        found = score(model, [data])
        grads.append((found[0].loss, [each.grad for each in model.bank.parameters("one").values()]))
    assert math.isclose(grads[0][0], grads[1][0], rel_tol=1e-6)
    for one, other in zip(grads[0][1], grads[1][1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_loaded_state_continues_bitwise(server: TinkerServer, callers: Callers) -> None:
    """A model created from a state, and one that loads it, take the same next step as the saved one, moments included."""
    ann = callers["ann"]
    first, other = ann.create(0), ann.create(1, seed=8)
    ann.passes(ann.begin_passes(first, [supervised(TEXT)]))
    ann.step(first, learning_rate=0.05)
    path = ann.save(first, "mid")["path"]
    load = {"path": path, "optimizer": True}
    made = ann.result(ann.post("load_weights", {**load, "session_id": ann.session, "model_seq_id": 2}))
    ann.result(ann.post("load_weights", {**load, "model_id": other, "seq_id": ann.number(other)}))
    ends = []
    for model in (first, other, made["model_id"]):
        ann.passes(ann.begin_passes(model, [supervised(OTHER)]))
        ann.step(model, learning_rate=0.05)
        ends.append(saved(server, "ann", ann.save(model, "end")["path"]))
    assert all(torch.equal(each[key], ends[0][key]) for each in ends[1:] for key in each)
    without = {"path": path, "optimizer": False, "model_id": other, "seq_id": ann.number(other)}
    ann.result(ann.post("load_weights", without))
    ann.passes(ann.begin_passes(other, [supervised(OTHER)]))
    ann.step(other, learning_rate=0.05)
    fresh = saved(server, "ann", ann.save(other, "fresh")["path"])
    assert any(not torch.equal(fresh[key], ends[0][key]) for key in fresh), "the moments began anew"
    assert "already a state" in ann.save(first, "mid")["error"]
    assert ann.save(first, "mid", overwrite=True)["path"] == path
    assert ann.post("weights_info", {"tinker_path": path})["lora_rank"] == 2


def test_samples_are_those_of_the_saved_weights(server: TinkerServer, callers: Callers) -> None:
    ann, bob = callers["ann"], callers["bob"]
    model = ann.create()
    for _ in range(3):
        ann.begin_passes(model, [supervised(TEXT)])
        ann.step(model, learning_rate=0.05)
    sampler = ann.save(model, None, "save_weights_for_sampler", sampling_session_seq_id=5, kind="snapshot")[
        "sampling_session_id"
    ]
    greedy = {"temperature": 0.0, "max_tokens": 6}
    begun = [ann.begin_samples(sampler, TEXT[:2], **greedy)]
    begun.append(bob.begin_samples(bob.sampler(None), TEXT[:2], **greedy))  # both in one batch
    found, base = ann.samples(begun[0]).sequences[0], bob.samples(begun[1]).sequences[0]
    assert base.tokens != found.tokens
    assert found.stop_reason == wire.LENGTH
    # The log-probs of samples are those of a forward pass, and of a prompt of the same tokens.
    text = [*TEXT[:2], *np.frombuffer(found.tokens, "<i4").tolist()]
    _, (logps,) = ann.passes(ann.begin_passes(model, [supervised(text)], forward_only=True))
    np.testing.assert_allclose(np.frombuffer(found.logprobs, "<f4"), logps[1:], atol=1e-4)
    scored = ann.samples(
        ann.begin_samples(sampler, text, max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=2)
    )
    prompt = np.frombuffer(scored.prompt_logprobs, "<f4")
    assert math.isnan(prompt[0])
    np.testing.assert_allclose(prompt[1:], logps, atol=1e-4)
    top = np.frombuffer(scored.topk_prompt_logprobs.token_ids, "<i4").reshape(len(text), 2)
    assert top[2:, 0].tolist() == text[2:], "greedy samples are the most likely tokens"


def test_seeds_and_stops(callers: Callers) -> None:
    ann = callers["ann"]
    sampler = ann.sampler(None)

    def tokens(**more: Any) -> list[list[int]]:
        answer = ann.samples(ann.begin_samples(sampler, TEXT[:3], **{"max_tokens": 12, "seed": 3, **more}))
        return [np.frombuffer(each.tokens, "<i4").tolist() for each in answer.sequences]

    (one,) = tokens(stop=[])
    assert len(one) == 12, "an empty list disables even the end of turn"
    assert tokens(stop=[]) == [one]
    assert tokens(stop=[], seed=4) != [one]
    pair = tokens(stop=[], num_samples=2)
    assert pair[0] == one
    assert pair[1] != one
    (free,) = tokens()
    cut = free.index(free[2]) + 1
    assert tokens(stop=[free[2]]) == [free[:cut]], "a token id ends the sequence and belongs to it"
    begun = ann.begin_samples(sampler, TEXT[:3], max_tokens=12, seed=3, stop=[free[2]])
    assert ann.samples(begun).sequences[0].stop_reason == wire.STOP


def test_clients_see_only_their_own(server: TinkerServer, callers: Callers) -> None:
    ann, bob = callers["ann"], callers["bob"]
    model = ann.create()
    path = ann.save(model, "mine")["path"]
    stranger = Caller(ann.web, "tml-wrong-wrong-wrong")
    stranger.post("create_session", {}, 401)
    ann.web.headers["x-kapelle-client"] = "ann"  # what the server passes on is never taken from a caller
    stranger.post("create_session", {}, 401)
    bob.post("get_info", {"model_id": model}, 404)
    bob.begin_passes(model, [supervised(TEXT)], status=404)
    bob.post("retrieve_future", {"request_id": f"{model}:1"}, 410)
    bob.post("weights_info", {"tinker_path": path}, 404)
    for odd in ("tinker://../weights/mine", f"tinker://{model}/weights/../weights/mine", "/etc/passwd"):
        ann.post("weights_info", {"tinker_path": odd}, 404)
    assert ann.post("get_info", {"model_id": model})["lora_rank"] == 2


def test_quotas_and_wrong_requests(callers: Callers) -> None:
    ann = callers["ann"]
    model, *_ = [ann.create(number) for number in range(3)]
    body = {"session_id": ann.session, "base_model": "tiny", "lora_config": {"rank": 2}}
    over = ann.result(ann.post("create_model", {**body, "model_seq_id": 3}))
    assert "which is the quota" in over["error"]
    assert over["category"] == "user"
    ann.post("create_model", {**body, "model_seq_id": 4, "base_model": "gpt"}, 400)
    long: Data = ([5] * 200, {"target_tokens": [5] * 200, "weights": [1.0] * 200})
    assert "allows 2000" in ann.begin_passes(model, [long] * 11, status=400)["error"]["message"]
    for data, loss, message in (
        ([supervised(TEXT)], "ppo", "lacks `logprobs`"),
        ([supervised(TEXT)], "pro", "Did you mean 'ppo'"),
        ([], "cross_entropy", "at least one example"),
        ([supervised([5, 999])], "cross_entropy", "ids outside"),
        ([supervised([5] * 400)], "cross_entropy", "the context is 256"),
        ([example(TEXT, weights=[1.0])], "cross_entropy", "needs one row for each"),
        ([example(TEXT, weights=[math.nan] * 7)], "cross_entropy", "not finite"),
        ([example(TEXT, advantages=[1.0] * 7)], "cross_entropy", "is not an input"),
    ):
        assert message in ann.begin_passes(model, data, loss, status=400)["error"]["message"]
    begun = ann.begin_passes(model, [reinforced(TEXT)], "importance_sampling")
    again = ann.post("retrieve_future", {"request_id": "none"}, 410)
    assert "unknown" in again["error"]["message"]
    ann.passes(begun)
    assert ann.passes(begun), "a result can be read again"


def test_files_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# clients\nann tml-aaaaaaaaaaaaaaaa\n\nbob tml-bbbbbbbbbbbbbbbb\n", "utf-8")
    assert read_keys(file, "example.org") == KEYS
    for text in ("ann aaaaaaaaaaaaaaaaaaaa", "ann tml-a\nann tml-b", "ann", "", "a/b tml-aaaaaaaaaaaaaaaa"):
        file.write_text(text, "utf-8")
        with pytest.raises(ConfigError):
            read_keys(file, "127.0.0.1")
    file.write_text("ann tml-short", "utf-8")
    with pytest.raises(ConfigError, match="at least 16"):
        read_keys(file, "example.org")


def test_a_server_without_keys_separates_clients_by_their_keys(tmp_path: Path) -> None:
    from kapelle.services.binding import Binding
    from kapelle.services.tinker.service import serve_tinker

    with (
        serve_tinker(tiny_model(), "tiny", tmp_path, Binding()) as server,
        httpx.Client(base_url=server.url, timeout=60.0) as web,
    ):
        one, other = Caller(web, "tml-one").open(), Caller(web, "tml-other").open()
        model = one.create()
        other.post("get_info", {"model_id": model}, 404)
