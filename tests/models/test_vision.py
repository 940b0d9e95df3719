"""A model that sees: sampler, trainer and `transformers` agree on pictures, and nothing but the language side learns."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL")

from tests.support.seeing import SEEING, picture, seeing_model
from tests.support.tiny import draw_samples, lora_policies, stir, train_engine, with_behaviour
from torch import Tensor

from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.rollout.local.decode_batch import decode
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.engines.train.batch import unfold
from kapelle.engines.train.protocol import Objective
from kapelle.errors import DataError, ModelError
from kapelle.models.adapters import adapted_layers, named
from kapelle.models.language_model import LanguageModel, load_language_model
from kapelle.models.lora_bank import layers_of
from kapelle.models.outline import adapter_parameters, outline_of
from kapelle.models.vision import opened
from kapelle.models.weights import save_adapter, save_model
from kapelle.rows import Sample
from kapelle.settings.schema import ModelConfig
from kapelle.team import Lora
from kapelle.types import Image, Message, Sampling

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

LORA = Lora(rank=2, alpha=4.0)
RED, WIDE, TALL = picture("red"), picture("blue", 24, 16), picture("green", 16, 32)
FAMILIES = [
    "qwen2_5_vl",
    *(pytest.param(family, marks=pytest.mark.slow) for family in SEEING if family != "qwen2_5_vl"),
]


def jobs_of(model: LanguageModel) -> list[Job]:
    """Rows with none, one and several pictures, one of which continues an earlier answer."""
    ask = model.renderer.start([Message("user", "what?", images=(RED, WIDE))])
    again = model.renderer.extend(ask, (50, 1), [Message("user", "and?", images=(TALL,))])
    none = model.renderer.start([Message("user", "hello there")])
    one = model.renderer.start([Message("user", "this", images=(TALL,))])
    return [
        Job("a", ask, Sampling(max_tokens=6), 1, images=(RED, WIDE)),
        Job("a", none, Sampling(max_tokens=8), 2),
        Job("b", again, Sampling(max_tokens=4), 3, images=(RED, WIDE, TALL)),
        Job("b", one, Sampling(max_tokens=5), 4, images=(TALL,)),
    ]


def sample_of(job: Job, ids: list[int]) -> Sample:
    places = tuple(range(len(job.prompt), len(job.prompt) + len(ids)))
    return Sample(job.adapter or "", (*job.prompt, *ids), places, images=job.images)


@torch.no_grad()
def alone(model: LanguageModel, sample: Sample) -> Tensor:
    """The targets' log-probs by `transformers` alone, which finds places and positions itself."""
    assert model.vision is not None
    ids = torch.tensor([sample.tokens])
    seen = {}
    if sample.images:
        patches = [model.vision.patches(image) for image in sample.images]
        seen = {
            "pixel_values": torch.cat([each.values_PF for each in patches]),
            "image_grid_thw": torch.tensor([each.grid for each in patches]),
            "mm_token_type_ids": (ids == model.vision.token).int(),
        }
    with model.bank.routed([(sample.learner, 0, 1)]):
        logits_LV: Tensor = model.model(input_ids=ids, use_cache=False, **seen).logits[0]
    places = torch.tensor(sample.targets)
    return logits_LV.log_softmax(-1)[places - 1, torch.tensor(sample.tokens)[places]]


class TestPasses:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_sampler_trainer_and_transformers_agree(self, family: str) -> None:
        model = seeing_model(family)
        engine = train_engine(lora_policies("a", "b", lora=LORA), models={"base": model}, stirred=False)
        for seed, name in enumerate("ab"):
            stir(model.bank.parameters(name), seed, 0.1)
        jobs = jobs_of(model)
        outputs = decode(model, jobs)
        samples = [sample_of(job, output.ids) for job, output in zip(jobs, outputs, strict=True)]
        for sample, output, trained_T in zip(samples, outputs, engine.score(samples), strict=True):
            expected_T = alone(model, sample)
            assert float((torch.tensor(output.logprobs) - expected_T).abs().max()) < 1e-5
            assert float((trained_T - expected_T).abs().max()) < 1e-5
            if sample.images:
                other = replace(sample, images=(picture("yellow"), *sample.images[1:]))
                other = (
                    other if sample.images[0] is RED else replace(sample, images=(picture("red", 16, 32),))
                )
                assert float((engine.score([other])[0] - expected_T).abs().max()) > 0.01

    def test_an_image_token_in_an_agents_text_moves_no_image(self) -> None:
        model = seeing_model()
        assert model.vision is not None
        engine = train_engine(lora_policies("a", lora=LORA), models={"base": model}, stirred=False)
        ask = model.renderer.start([Message("user", "what?", images=(RED,))])
        begun = (model.vision.token, 40, model.vision.token + 2)  # those of a picture and of a film
        job = Job("a", (*ask, *begun), Sampling(max_tokens=5), 1, 3, images=(RED,))
        output = decode(model, [job])[0]
        sample = sample_of(job, output.ids)
        assert float((engine.score([sample])[0] - torch.tensor(output.logprobs)).abs().max()) < 1e-5
        padded = replace(sample, tokens=(*ask, 0, 40, 0, *output.ids))
        assert torch.equal(engine.score([sample])[0], engine.score([padded])[0]), "it is read as padding"

    def test_equal_tokens_of_different_pictures_are_different_sequences(self) -> None:
        one = Sample("a", (5, 6, 7, 8), (3,), images=(RED,))
        other = replace(one, images=(picture("blue"),))
        again = replace(one, targets=(2,))
        assert [
            (tree.images, [b.samples for b in tree.branches])
            for tree in unfold([one, other, again], share=True)
        ] in (
            [((RED,), [[0, 2]]), (other.images, [[1]])],
            [(other.images, [[1]]), ((RED,), [[0, 2]])],
        )


class TestLearning:
    @pytest.mark.parametrize("lora", [LORA, None])
    def test_the_vision_tower_and_its_projector_stay(self, lora: Lora | None) -> None:
        model = seeing_model()
        policies = lora_policies("a", lora=LORA)
        policies = [replace(policy, lora=lora) for policy in policies]
        engine = train_engine(policies, models={"base": model}, stirred=False)
        before = {name: tensor.clone() for name, tensor in engine.weights("a").items()}
        eyes = {name: t.clone() for name, t in model.base_parameters().items() if ".visual." in name}
        drawn = draw_samples(["a"], [(9, 7), (12, 8)])
        ask = model.renderer.start([Message("user", "what?", images=(RED,))])
        seen = [
            replace(
                s, tokens=(*ask, *s.tokens), targets=tuple(t + len(ask) for t in s.targets), images=(RED,)
            )
            for s in drawn
        ]
        engine.update(with_behaviour(engine, seen), Objective(SurrogateConfig().build()))
        after = engine.weights("a")
        assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
        assert eyes
        assert all(torch.equal(model.base_parameters()[name], tensor) for name, tensor in eyes.items())

    def test_adapters_are_on_the_language_side_only(self) -> None:
        layers = layers_of(seeing_model("qwen3_vl").model)
        paths = adapted_layers(layers, ("all-linear",))
        assert len(paths) == 2 * 7
        assert all(path.startswith("model.language_model.layers.") for path in paths)
        with pytest.raises(ModelError, match="vision tower"):
            adapted_layers(layers, ("linear_fc1",))


class TestFolders:
    def test_a_saved_vision_model_is_loaded_and_peft_reads_the_adapter(self, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        from transformers import AutoModelForImageTextToText

        model = seeing_model()
        save_model(tmp_path / "base", model)
        loaded = load_language_model(ModelConfig(path=str(tmp_path / "base"), device="cpu"))
        ask = [Message("user", "what?", images=(WIDE,))]
        assert loaded.renderer.start(ask) == model.renderer.start(ask)
        loaded.bank.add("a", LORA, seed=0)
        stir(loaded.bank.parameters("a"), 1)
        assert adapter_parameters(outline_of(model.model), LORA) == sum(
            tensor.numel() for tensor in loaded.bank.parameters("a").values()
        )
        save_adapter(
            tmp_path / "a",
            loaded.bank.parameters("a"),
            named(layers_of(loaded.model), LORA),
            str(tmp_path / "base"),
        )
        base = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
        theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "a")).eval()
        sample = Sample("a", (*loaded.renderer.start(ask), 20, 30), (16, 17), images=(WIDE,))
        expected = alone(loaded, sample)
        loaded_model, loaded.model = loaded.model, theirs
        found = alone(loaded, sample)
        loaded.model = loaded_model
        assert float((found - expected).abs().max()) < 1e-5


def png(width: int, height: int) -> bytes:
    """A PNG file that claims a size and holds next to nothing."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, content: bytes) -> bytes:
        whole = kind + content
        return struct.pack(">I", len(content)) + whole + struct.pack(">I", zlib.crc32(whole))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b"\0" * 64))
        + chunk(b"IEND", b"")
    )


class TestHostilePictures:
    @pytest.mark.parametrize(
        ("data", "why"),
        [
            (png(60_000, 60_000), "50,000,000 pixels"),
            (png(10_000, 10_000), "50,000,000 pixels"),
            (png(100, 100), "is damaged"),
            (picture("red").data[:40], "is damaged"),
            (b"\xff\xd8\xff" + b"\0" * 100, "is damaged"),
            (b"GIF89a" + b"\0" * 3, "is damaged"),
            (b"RIFF\0\0\0\0WEBPVP8 ", "is damaged"),
        ],
    )
    def test_a_bomb_or_a_broken_file_is_one_clear_error(self, data: bytes, why: str) -> None:
        with pytest.raises(DataError, match=why):
            opened(Image.of(data))

    def test_a_picture_that_the_model_cannot_read_is_named(self) -> None:
        model = seeing_model()
        with pytest.raises(DataError, match="cannot be read by the model"):
            model.renderer.start([Message("user", "x", images=(picture("red", 2000, 4),))])

    def test_the_mark_in_a_text_is_no_picture(self) -> None:
        model = seeing_model()
        plain = model.renderer.start([Message("user", "a what?", images=(RED,))])
        assert model.vision is not None
        for text in ("a <|image_pad|>what?", "a <|image_<|image_pad|>pad|>what?"):
            ids = model.renderer.start([Message("user", text, images=(RED,))])
            assert ids.count(model.vision.token) == plain.count(model.vision.token)
            assert text in model.renderer.decode(ids)
        new_messages = model.renderer.extend(plain, (50, 1), [Message("user", "<|image_pad|>and?")])
        assert new_messages.count(model.vision.token) == plain.count(model.vision.token)
