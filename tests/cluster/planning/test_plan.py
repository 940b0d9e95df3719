from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest
from tests.support.tiny import tiny_model

from kapelle.cli import main
from kapelle.cli.plan import DOES_NOT_FIT
from kapelle.cluster.planning import plan
from kapelle.cluster.planning.memory import adapter_bytes
from kapelle.cluster.planning.plan import _largest
from kapelle.cluster.planning.planned_run import base_bytes
from kapelle.cluster.planning.sampling_memory import PlannedRows, places
from kapelle.models.embedded import settings_of
from kapelle.models.outline import outline_of_settings
from kapelle.models.weights import save_model
from kapelle.settings.schema import EmbeddedConfig


def test_a_step_collects_without_weights_in_the_trainer() -> None:
    work = plan("demo", "training.tasks_per_step=5").run.work
    assert (work.tasks, work.group, work.played) == (5, 8, True)
    first, second = work.turns
    assert (first.agent, second.agent, first.moment, second.moment) == ("reasoner", "actor", 0, 1)
    assert second.prompt > first.answer, "the second reads what the first said"


def test_a_plan_fits_after_the_advised_changes() -> None:
    found = plan("demo", "model.device=cpu", gpu_memory=0.55)
    assert not found.fits
    assert [each.setting for each in found.advice] == ["training.gradient_checkpointing=true"]
    assert found.advice[-1].peak <= 0.55e9


def test_processes_share_what_fsdp_shards(tmp_path: Path) -> None:
    model = tiny_model(layers=4, hidden=64)
    save_model(tmp_path / "model", model)
    pretrained = f"model.path={tmp_path / 'model'}"
    settings = (pretrained, "team.sharing=shared", "algorithm.loss.kl_coefficient=0.1")
    fsdp = (*settings, "train_engine.name=fsdp")

    def update(*words: str, ranks: int) -> Mapping[str, int]:
        [training] = plan("demo", *words, gpu_memory=80, ranks=ranks).processes
        assert training.count == 1
        return training.phases[1].kinds

    alone, copied = update(*settings, ranks=1), update(*settings, ranks=4)
    shared = update(*fsdp, ranks=4)
    for kind in ("weights", "references", "optimiser"):
        assert copied[kind] == alone[kind]
    for kind in ("references", "optimiser"):
        assert shared[kind] * 4 == pytest.approx(alone[kind], rel=1e-3)
    # A fourth of the float32 weights, and what a pass gathers: two of four blocks, and everything outside of blocks.
    count, (first, *_) = sum(p.numel() for p in model.model.parameters()), model.model.model.layers
    gathered = count - 2 * sum(p.numel() for p in first.parameters())
    assert shared["weights"] == pytest.approx(count + 4 * gathered)
    on_cpu = plan("demo", *fsdp, ranks=4)
    [training] = on_cpu.processes
    assert on_cpu.devices["cpu"] == 4 * training.peak
    sampling = training.phases[0].kinds["weights"]
    assert sampling == pytest.approx(1.25 * alone["weights"], rel=1e-3), "whole, beside the part"


def test_exit_codes_say_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "demo", "--gpu-memory", "80"]) == 0
    assert "cpu: " in capsys.readouterr().out
    assert main(["plan", "demo", "--gpu-memory", "0.5", "--json"]) == DOES_NOT_FIT
    row = json.loads(capsys.readouterr().out)
    assert not row["fits"]
    assert row["processes"][0]["peak"] == max(
        phase["total"] for phase in row["processes"][0]["phases"].values()
    )
    assert main(["plan", "demo", "--gpu-memory", "none"]) == 2


def test_a_second_process_has_weights_of_its_own() -> None:
    one, two = plan("demo"), plan("demo", "training.asynchronous=true", "training.max_staleness=1")
    assert [process.name for process in two.processes] == ["training", "sampling process"]
    sampling = two.processes[1].phases[0].kinds
    assert sampling["weights"] == one.processes[0].phases[0].kinds["weights"]
    assert sampling["optimiser"] == 0
    assert [phase.name for phase in two.processes[0].phases] == ["update", "evaluation"]


def test_a_program_may_fill_the_context() -> None:
    pytest.importorskip("starlette")
    team = "team={agents: [{name: a, sampling: {max_tokens: 8}}]}"
    found = plan("demo", team, "environment={name: external}", "workflow={name: external}", "warmup=null")
    assert found.run.work.longest == 512
    assert not found.run.work.played


def test_four_bits_are_counted() -> None:
    outline = outline_of_settings(settings_of(EmbeddedConfig()))
    assert outline is not None
    linear = sum(a * b for path, (a, b) in outline.layers.linear.items() if path != outline.layers.head)
    rest = outline.parameters - linear
    assert base_bytes(outline, 2, nf4=True) == pytest.approx(0.516 * linear + 2 * rest, rel=1e-3)
    assert base_bytes(outline, 2, nf4=False) == 2 * outline.parameters


@pytest.mark.parametrize(("name", "bytes_each"), [("adamw", 8.0), ("adamw_8bit", 2 + 8 / 256)])
def test_moments_take_the_bytes_of_their_type(name: str, bytes_each: float) -> None:
    found = plan("demo", "team.sharing=shared", f"optimizer.name={name}")
    numbers = sum(sum(found.run.trained_numbers(base)) for base in found.run.team.bases)
    assert found.processes[0].phases[1].kinds["optimiser"] == pytest.approx(bytes_each * numbers, rel=1e-6)


@pytest.mark.parametrize("algorithm", ["grpo", "ippo"])
def test_adapters_and_heads_take_4_bytes_a_number_and_as_much_for_gradients(algorithm: str) -> None:
    found = plan("demo", "team.sharing=lora", f"algorithm={{name: {algorithm}}}")
    numbers = sum(sum(found.run.trained_numbers(base)) for base in found.run.team.bases)
    update = found.processes[0].phases[1].kinds
    assert update["adapters"] == update["gradients"] == 4 * numbers


def test_a_pass_holds_the_tasks_of_one_optimiser_step() -> None:
    def activations(tasks: int, minibatches: int) -> int:
        settings = (f"training.tasks_per_step={tasks}", f"algorithm.minibatches={minibatches}")
        found = plan("demo", "training.microbatch_tokens=100000", *settings)
        return found.processes[0].phases[1].kinds["activations"]

    assert activations(4, 4) == activations(1, 1)
    assert activations(4, 1) == pytest.approx(4 * activations(1, 1), rel=0.05)


@pytest.mark.parametrize(
    ("rows", "prompts", "answer", "end"),
    [
        (2, 2, 1, 2 * 70),  # the sampled token is never read
        (2, 2, 2, 2 * (64 + 16)),  # a block of 64 for each prompt of 70 tokens, and a tail that grows by 16
        (4, 1, 1, 128),  # two blocks of a prompt that several rows read
        (4, 1, 2, 128 + 4 * 16),
    ],
)
def test_the_places_of_a_cache_by_hand(rows: int, prompts: int, answer: int, end: int) -> None:
    assert places(PlannedRows(rows, prompts, 70, answer, tempered=False))[0] == end


def test_the_largest_number_that_fits_is_found() -> None:
    for most, bound in product(range(1, 10), range(12)):
        assert _largest(most, lambda count, bound=bound: count <= bound) == min(most, bound)  # type: ignore[misc]


def test_an_automatic_pass_is_as_large_as_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path / "model", tiny_model())
    pretrained = f"model.path={tmp_path / 'model'}"

    def tokens(*settings: str, gb: float) -> int:
        found = plan("demo", pretrained, *settings, gpu_memory=gb)
        assert found.fits
        return found.run.pass_tokens("base")

    few, more, most = (tokens(gb=gb) for gb in (0.66, 0.8, 80))
    assert 1024 <= few < more < most == 1 << 16
    assert tokens("training.gradient_checkpointing=true", gb=0.66) > few
    assert tokens("training.microbatch_tokens=700", gb=80) == 700
    assert plan("demo", gpu_memory=80).run.pass_tokens("base") == 4096  # the embedded model is on the CPU
    words = ["plan", "demo", pretrained, "model.tf32=true", "model.dtype=bfloat16"]
    assert main([*words, "--gpu-memory", "80"]) == 0
    computes = "base on cuda: computes in bfloat16, float32 products in TF32; passes of at most 65536 tokens (what fits"
    assert computes in capsys.readouterr().out
    assert main(["plan", "demo"]) == 0
    assert "base on cpu: computes in float32; passes of at most 4096 tokens\n" in capsys.readouterr().out


def test_several_adapters_on_a_gpu_are_stacked_twice_in_the_compute_type(tmp_path: Path) -> None:
    """4 bytes a number, and 2 · 2 more in bfloat16; one adapter is stacked with nothing, and a CPU stacks none."""
    save_model(tmp_path / "model", tiny_model())
    pretrained = (f"model.path={tmp_path / 'model'}", "model.dtype=bfloat16")

    def adapters(*settings: str) -> int:
        run = plan("demo", *pretrained, *settings, gpu_memory=80).run
        return sum(adapter_bytes(run, base) for base in run.team.bases)

    assert adapters() == 2 * adapters("model.device=cpu")
    both = "team.agents=[{name: reasoner, weights: {adapter: one}}, {name: actor, weights: {adapter: one}}]"
    assert adapters(both) == adapters(both, "model.device=cpu")
