"""Checkpoints of one process: training goes on bit for bit, in both formats; and what is refused."""

from __future__ import annotations

import io
import logging
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import GraphoptError, TrainStep, checkpoint
from graphopt.passes import MixedPrecision
from graphopt.runtime.checkpoints.step_checkpoint import load_step_state
from graphopt.runtime.state.packed_state import pack, unpack
from tests.support.properties import examples

Format = Literal["dcp", "torch"]
FORMATS: tuple[Format, ...] = ("dcp", "torch")


def training(width: int = 8, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> TrainStep:
    model = nn.Sequential(
        nn.Conv2d(3, width, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(width), nn.Dropout(0.3),
        nn.Flatten(), nn.Linear(width * 4, 4),
    )  # fmt: skip
    optimizer = make(model.parameters(), lr=0.01)
    passes = [MixedPrecision("float16", init_scale=2.0**20, growth_interval=3)]
    return graphopt.optimize_step(model, optimizer, passes, loss=lambda model, x: model(x).square().mean())


X = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def states(step: TrainStep) -> list[torch.Tensor]:
    """Every tensor of a step."""
    packed = pack([step.model.state_dict(), step.optimizer.state_dict(), step.state_dict(), torch.get_rng_state()])
    return list(packed.tensors.values())


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(one, other, strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("before", [0, 2])
def test_training_goes_on_bit_for_bit(tmp_path: Path, format: Format, before: int) -> None:
    """Into a new step, and into one that has run already; in the middle of an accumulation."""
    step = training().accumulate(2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(step.optimizer, [2, 4])
    for number in range(5):
        step(X)
        if number % 2:
            scheduler.step()
    saved = checkpoint.save(tmp_path, {"step": step, "scheduler": scheduler, "note": [1, "two"]}, format=format)
    expected = [step(X) for _ in range(4)]
    torch.manual_seed(3)
    other = training().accumulate(2)
    schedule = torch.optim.lr_scheduler.MultiStepLR(other.optimizer, [9])
    for _ in range(before):
        other(X)
    assert checkpoint.load(saved, {"step": other, "scheduler": schedule}) == {"note": [1, "two"]}
    assert schedule.milestones == Counter([2, 4])
    found = [other(X) for _ in range(4)]
    assert_same(expected, found)
    assert_same(states(step), states(other))


@pytest.mark.parametrize("format", FORMATS)
def test_the_newest_ones_stay(tmp_path: Path, format: Format) -> None:
    step = training()
    names = [checkpoint.save(tmp_path / "run", step, format=format, keep=3).name for _ in range(5)]
    assert sorted(item.name for item in (tmp_path / "run").iterdir()) == names[2:]
    assert names[-1] == "checkpoint-00000005"
    assert checkpoint.load(tmp_path / "run", step) == {}


def test_what_was_left_unfinished_is_no_checkpoint(tmp_path: Path) -> None:
    step = training()
    step(X)
    checkpoint.save(tmp_path, {"step": step, "number": 1})
    (tmp_path / "checkpoint-00000002.unfinished").mkdir()
    (tmp_path / "checkpoint-00000002.unfinished" / ".metadata").write_bytes(b"half")
    (tmp_path / "checkpoint-00000000.old").mkdir()
    (tmp_path / "notes").mkdir()
    assert checkpoint.load(tmp_path, {"step": step}) == {"number": 1}
    checkpoint.save(tmp_path, {"step": step, "number": 2})
    assert sorted(item.name for item in tmp_path.iterdir()) == ["checkpoint-00000001", "checkpoint-00000002", "notes"]


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = training()
    checkpoint.save(tmp_path, {"step": step, "number": 1}, format="torch")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(GraphoptError, match=r"cannot be written: .*No space left"):
        checkpoint.save(tmp_path, {"step": step, "number": 2}, format="torch")
    with pytest.raises(GraphoptError, match=r"cannot be written: .*No space left"):
        checkpoint.save(tmp_path, {"step": step, "number": 2})
    monkeypatch.undo()
    assert checkpoint.load(tmp_path, {"step": step}) == {"number": 1}


@pytest.mark.sweep(but=("[1]-what is a step, or a mapping o",))
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"stp": None}, "the checkpoint has no 'stp'; did you mean 'step'"),
        ({"epoch": None}, "the checkpoint holds the step 'step', which is not given"),
        ({"step": nn.Linear(2, 2)}, "the checkpoint holds the step 'step', which is not given"),
        ({"epoch": None, "step": training(width=9)}, "the checkpoint is of another model or optimizer"),
        ({"step": training(make=torch.optim.SGD), "epoch": training()}, "this is no state of a step"),
        ([1], "what is a step, or a mapping of names"),
        ({"random generators": 1}, "is saved in any case: use another name"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, what: Any, message: str) -> None:
    step = training()
    step(X)
    checkpoint.save(tmp_path, {"step": step, "epoch": 1})
    with pytest.raises(GraphoptError, match=message):
        checkpoint.load(tmp_path, what)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({1, 2}, "cannot hold the set at /part"),
        ({"a": [object()]}, "cannot hold the object at /part/a/0"),
        ({(1, 2): 3}, r"cannot hold the key \(1, 2\) at /part"),
        (torch.eye(2).to_sparse(), "cannot hold the Tensor .* at /part"),
        (
            {"a": {"b": torch.ones(1)}, "a/b": torch.ones(1)},
            "two tensors of the state would both be called '/part/a",
        ),
    ],
    ids=["a set", "an object", "a key", "a sparse tensor", "one name twice"],
)
def test_state_that_a_file_cannot_hold(tmp_path: Path, part: Any, message: str) -> None:
    with pytest.raises(GraphoptError, match=message):
        checkpoint.save(tmp_path, {"part": part})
    assert list(tmp_path.iterdir()) == []


def test_places_that_are_not_right(tmp_path: Path) -> None:
    step = training()
    with pytest.raises(GraphoptError, match="there is no folder"):
        checkpoint.load(tmp_path / "none", step)
    with pytest.raises(GraphoptError, match="there is no checkpoint in"):
        checkpoint.load(tmp_path, step)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(GraphoptError, match="File exists"):
        checkpoint.save(file, step)
    with pytest.raises(GraphoptError, match="format='dpc' is not known; did you mean 'dcp'"):
        checkpoint.save(tmp_path, step, format="dpc")  # type: ignore[arg-type]
    with pytest.raises(GraphoptError, match="keep is a whole number of checkpoints of at least 1"):
        checkpoint.save(tmp_path, step, keep=0)
    with pytest.raises(GraphoptError, match="folder is the path of a folder"):
        checkpoint.save(None, step)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_damaged_files_are_refused(tmp_path: Path, format: Format, damage: str) -> None:
    saved = checkpoint.save(tmp_path, {"values": torch.arange(100.0), "number": 7}, format=format)
    for file in sorted(saved.iterdir()):
        whole = file.read_bytes()
        if damage == "missing":
            file.unlink()
        else:
            half = len(whole) // 2
            file.write_bytes(whole[:half] + (b"" if damage == "cut" else bytes(255 - b for b in whole[half:])))
        with pytest.raises(GraphoptError, match=r"cannot be read|there is no checkpoint"):
            checkpoint.load(tmp_path, {"values": None})
        file.write_bytes(whole)
    assert checkpoint.load(tmp_path, {"values": None})["number"] == 7


@pytest.mark.parametrize("format", FORMATS)
def test_a_bit_that_flips_is_noticed(tmp_path: Path, format: Format) -> None:
    value = torch.full((1000,), 3.0)
    saved = checkpoint.save(tmp_path, {"value": value}, format=format)
    (file,) = [file for file in saved.iterdir() if value.numpy().tobytes() in file.read_bytes()]
    content = bytearray(file.read_bytes())
    content[content.index(value.numpy().tobytes()) + 17] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(GraphoptError, match=r"the tensor '/value' is damaged|cannot be read"):
        checkpoint.load(tmp_path, {"value": None})


class Evil:
    """Calls something when it is read as a pickle."""

    def __reduce__(self) -> Any:
        return logging.getLogger("evil").error, ("called",)


def test_nothing_in_a_file_is_executed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = checkpoint.save(tmp_path, {"number": 7})
    (saved / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(GraphoptError, match="its metadata asks for builtins"):
        checkpoint.load(tmp_path, {})
    saved = checkpoint.save(tmp_path, {"number": 7}, format="torch")
    buffer = io.BytesIO()
    torch.save({"structure": Evil(), "tensors": {}}, buffer)
    (saved / "rank0of1.pt").write_bytes(buffer.getvalue())
    with pytest.raises(GraphoptError, match="cannot be read"):
        checkpoint.load(tmp_path, {})
    assert "called" not in caplog.text


def test_a_checkpoint_of_something_else(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "checkpoint-00000001")
    with pytest.raises(GraphoptError, match="is a checkpoint of something else"):
        checkpoint.load(tmp_path, {})


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@given(plain)
@examples(50)
def test_plain_state_comes_back(state: Any) -> None:
    found = unpack(pack(state).structure, {})
    assert found == state
    assert repr(found) == repr(state)


@given(st.binary(max_size=40).map(lambda found: found.decode("latin-1")) | plain.map(str))
@examples(50)
def test_other_structures_are_refused(structure: str) -> None:
    with pytest.raises(GraphoptError):
        unpack(structure, {})


def test_tensors_keep_their_bits_and_strides() -> None:
    tensors = [
        torch.tensor(3), torch.zeros(0, 4), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 4).t(), torch.tensor([float("nan"), -0.0]), torch.randn(3).to(torch.bfloat16), torch.eye(2) > 0,
    ]  # fmt: skip
    packed = pack(tensors)
    contiguous = {path: tensor.contiguous() for path, tensor in packed.tensors.items()}
    for one, other in zip(tensors, unpack(packed.structure, contiguous), strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        assert one.numel() == 0 or one.stride() == other.stride()


@pytest.mark.sweep
def test_a_state_that_an_earlier_version_saved() -> None:
    """Without what says which parameters are shards."""
    step, other = training(), training()
    for _ in range(3):
        step(X)
    state = step.checkpoint_state()
    assert state.pop("shards") == {}
    load_step_state(other, [state], 0, 1)
    assert_same(states(step), states(other))
