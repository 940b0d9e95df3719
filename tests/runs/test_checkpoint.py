import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.support.equal_trees import same_tree

from kapelle.errors import CheckpointError
from kapelle.runs.checkpoint import (
    load,
    newest_valid,
    save,
    verify,
)


def same(a: object, b: object) -> bool:
    """Bitwise equality of trees, types, dtypes and shapes included."""
    return same_tree(a, b, _same_leaf)


def _same_leaf(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    return a == b


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


# --------------------------------------------------------------------------------------- what comes back


def test_trees_of_tensors_and_json_return_bitwise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {
        "policies": {
            "actor": {"layer.0.weight": torch.randn(3, 4), "layer.0.bias": torch.randn(4).bfloat16()},
            "reasoner": {"layer.0.weight": torch.randn(2).half(), "double": torch.randn(2).double()},
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "seen": torch.tensor([True, False])}},
            "betas": (0.9, 0.999),
        },
        "loop": {
            "step": 12,
            "cursor": [1, 2],
            "lr": 0.1 + 0.2,
            "best": float("-inf"),
            "name": "déjà",
            "none": None,
        },
        "odd": {
            "empty": torch.zeros(0, 5),
            "ids": torch.tensor([2**62, -1]),
            "nan": torch.tensor(float("nan")),
        },
        "alone": torch.arange(3),
        "nothing": {},
    }
    assert same(load(save(tmp_path, 12, state)), state)


def test_keys_with_dots_stay_different(tmp_path: Path) -> None:
    state = {"p": {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), "value": torch.tensor(3)}}
    assert same(load(save(tmp_path, 0, state)), state)


def test_tied_and_sliced_and_transposed_tensors_return_equal(tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    state = {
        "model": {
            "embed": weight,
            "head": weight,
            "row": weight[1],
            "column": weight[:, 1],
            "turned": weight.T,
        }
    }
    assert same(load(save(tmp_path, 0, state)), state)


def test_an_optimizer_continues_bitwise_identical(tmp_path: Path) -> None:
    def trained(restart_at: int | None) -> torch.Tensor:
        torch.manual_seed(3)
        layer = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        for step in range(6):
            if step == restart_at:
                folder = save(
                    tmp_path, step, {"layer": layer.state_dict(), "optimizer": optimizer.state_dict()}
                )
                layer = torch.nn.Linear(4, 4)
                optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5)
                state = load(folder)
                layer.load_state_dict(state["layer"])
                optimizer.load_state_dict(state["optimizer"])
            optimizer.zero_grad()
            layer(torch.full((2, 4), float(step))).square().sum().backward()
            optimizer.step()
        return layer.weight.detach()

    assert same(trained(restart_at=3), trained(restart_at=None))


def test_extra_files_are_part_of_the_checkpoint(tmp_path: Path) -> None:
    def peft_folder(folder: Path) -> None:
        (folder / "policies" / "actor").mkdir(parents=True)
        (folder / "policies" / "actor" / "adapter_config.json").write_text("{}")

    folder = save(tmp_path, 0, {"loop": {}}, peft_folder)
    (folder / "policies" / "actor" / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"policies/actor/adapter_config\.json"):
        verify(folder)


def test_a_value_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"loop\.pool is a set"):
        save(tmp_path, 0, {"loop": {"pool": {1, 2}}})
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------- faults

CALLS = ("mkdir", "write", "fsync", "rename")


def faults(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[pytest.MonkeyPatch]:
    """Yield once for each system call of a save, with that call made to fail."""
    reached = True
    place = 0
    while reached:
        place += 1
        with monkeypatch.context() as patch:
            count = 0

            def failing(real: Any) -> Any:
                def call(*arguments: Any, **named: Any) -> Any:
                    nonlocal count
                    count += 1
                    if count == place:  # noqa: B023 - the closure lives as long as the place
                        raise OSError(number, os.strerror(number))
                    return real(*arguments, **named)

                return call

            for name in CALLS:
                patch.setattr(os, name, failing(getattr(os, name)))
            patch.setattr(safetensors.torch, "save_file", failing(safetensors.torch.save_file))
            yield patch
            reached = count >= place


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only"), (errno.EIO, "fault")]
)
def test_a_disk_failure_at_any_call_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    good = {"model": {"w": torch.arange(5.0)}, "loop": {"step": 1}}
    save(tmp_path, 1, good)
    failures: list[str] = []
    for place, _ in enumerate(faults(monkeypatch, number)):
        try:
            save(tmp_path, 2 + place, {"model": {"w": torch.zeros(5)}, "loop": {"step": 2}})
        except CheckpointError as error:
            failures.append(str(error))
    # A folder, tensors, state and manifest written, each flushed, the folder flushed and renamed.
    assert len(failures) >= 9
    assert all(words in failure for failure in failures)
    newest = newest_valid(tmp_path)
    assert newest.rejected == ()
    assert same(load(tmp_path / "00000001"), good)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


# The child is forked for each place, so that torch is imported once; a place beyond the last ends it.
KILLER = """
import json, os, resource, signal, sys
from pathlib import Path
import safetensors.torch, torch
from kapelle.runs.checkpoint import newest_valid, load, save
from kapelle.errors import CheckpointError

torch.set_num_threads(1)  # a forked child has no pool of threads to wait for
root = Path(sys.argv[1])
state = lambda step: {"model": {"w": torch.full((50_000,), float(step))}, "loop": {"step": step}}
save(root, 1, state(1))

def dying(real, place, half=False):
    def call(*arguments, **named):
        global count
        count += 1
        if count == place:
            if half:
                Path(arguments[1]).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)
    return call

place, report = 0, []
while True:
    place += 1
    child = os.fork()
    if child == 0:
        count = 0
        for name in ("mkdir", "write", "fsync", "rename"):
            setattr(os, name, dying(getattr(os, name), place))
        safetensors.torch.save_file = dying(safetensors.torch.save_file, place, half=True)
        save(root, 1 + place, state(1 + place))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    newest = newest_valid(root)
    step = load(newest.folder)["loop"]["step"]
    report.append([os.WTERMSIG(status), step, len(newest.rejected)])
    if status == 0:
        break

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    save(root, 1000, state(1000))
    refused = ""
except CheckpointError as error:
    refused = str(error)
last = newest_valid(root)
print(json.dumps({"report": report, "refused": refused, "last": load(last.folder)["loop"]["step"],
                  "rejected": len(last.rejected), "names": sorted(p.name for p in root.iterdir())}))
"""


@pytest.mark.slow
def test_a_kill_at_any_call_leaves_the_last_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", KILLER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    result = json.loads(done.stdout)
    *killed, (signal_last, step_last, _) = result["report"]
    assert len(killed) >= 9
    assert {number for number, _, _ in killed} == {signal.SIGKILL}
    assert [rejected for _, _, rejected in result["report"]] == [0] * len(result["report"])
    # Killed before the renaming: the first is the newest. Killed at the last flush: the new one is.
    assert [step for _, step, _ in killed] == [1] * (len(killed) - 1) + [1 + len(killed)]
    assert (signal_last, step_last) == (0, 2 + len(killed))
    # Afterwards the kernel itself rejected a file that is too large.
    assert "size limit" in result["refused"]
    assert (result["last"], result["rejected"]) == (step_last, 0)
    assert not [name for name in result["names"] if name.startswith(".")]
