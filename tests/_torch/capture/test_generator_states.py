"""States of generators that programs save and replay, on devices that are only named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from graphopt import _torch
from graphopt._torch.capture import generator_states


class Machine:
    """Stands for ``torch.cuda`` with two devices, whose generators are numbers that drawing counts up."""

    def __init__(self) -> None:
        self.current = 0
        self.generators = [100, 200]

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, torch.device(device).index or 0
        try:
            yield
        finally:
            self.current = before

    def get_rng_state(self) -> torch.Tensor:
        return torch.tensor(self.generators[self.current])

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.generators[self.current] = int(state)

    def draw(self, *args: object, device: object = None) -> int:
        """Stands for a random op: each device's kernel draws from its own generator."""
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        index = torch.device(str(device)).index if device is not None else tensors[0].device.index
        self.generators[index] += 1
        return self.generators[index]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    for name in ("device", "get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, getattr(machine, name))
    return machine


@pytest.mark.parametrize("key", ["CUDA", "BackendSelect"])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("by", ["tensor", "argument"])
def test_a_replay_draws_what_the_first_run_drew_whatever_device_is_current(
    machine: Machine, key: str, index: int, by: str
) -> None:
    where = f"cuda:{index}"
    with FakeTensorMode():
        args = (torch.empty(3, device=where),) if by == "tensor" else ()
    kwargs = {} if by == "tensor" else {"device": where}
    kernel_key = getattr(torch._C.DispatchKey, key)
    save, replay = (op.py_kernels[kernel_key] for op in (_torch.run_and_save_rng_state, _torch.run_with_rng_state))
    if key == "CUDA" and by == "argument":
        kwargs = {"device": torch.device(where)}
    state, first = save(machine.draw, *args, **kwargs)
    machine.draw(device=where)
    after = list(machine.generators)
    assert replay(state, machine.draw, *args, **kwargs) == first == (100, 200)[index] + 1
    assert machine.generators == after  # both are where they were
    assert machine.current == 0


def test_random_ops_of_the_host_do_not_ask_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", None)
    x = torch.ones(64)
    state, first = _torch.run_and_save_rng_state(torch.ops.aten.native_dropout.default, x, 0.5, True)
    again = _torch.run_with_rng_state(state, torch.ops.aten.native_dropout.default, x, 0.5, True)
    assert torch.equal(first[1], again[1])


def test_an_example_state_is_as_large_as_its_device_has_it() -> None:
    with FakeTensorMode():
        there = torch.empty(3, device="cuda:1")
        states = [generator_states._example_state(lambda *_: None, x)[0] for x in (there, torch.empty(3, device="cpu"))]
    assert [state.numel() for state in states] == [16, torch.get_rng_state().numel()]
