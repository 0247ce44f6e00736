"""Training that is disturbed, by an interrupt at any line or by memory that runs out, and what the next steps are."""

from __future__ import annotations

import copy
import ctypes
import linecache
import random
import resource
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import Pass
from graphopt.passes import FitMemory, FuseUpdate, MixedPrecision, Offload, OffloadState, Recompute
from tests.support.bits import first_difference

__all__ = ["PIPELINES", "WAYS", "interrupted", "starved"]

PIPELINES: dict[str, Callable[[], list[Pass]]] = {
    "none": list,
    "recompute": lambda: [Recompute("auto")],
    "fit": lambda: [FitMemory("95%", cost="roofline")],
    "offload": lambda: [Offload(tier="disk", min_bytes=1)],
    "state": lambda: [OffloadState(("optimizer", "parameters"), min_bytes=1, cost="roofline")],
    "fuse, recompute": lambda: [FuseUpdate(), Recompute("auto")],
    "float16": lambda: [MixedPrecision("float16")],
}
WAYS = {"drop-in": ["none", "recompute"], "whole step": list(PIPELINES)}
"""The pipelines that are tried in each way: loss scaling, updates and their state belong to whole steps."""

AFTER = 2
"""Steps behind the disturbed one that are compared."""


class Net(nn.Module):
    """Linear layers with dropout and a norm that counts; ``width`` says how large its tensors are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.2)
        return self.norm(x)


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


class Loop:
    """One training loop, and the state to which it can be taken back."""

    def __init__(self, way: str, passes: list[Pass] | None, width: int = 8, rows: int = 4) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Net(width)
        self.batch = torch.randn(rows, width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, fused=True)
        self.step: graphopt.TrainStep | None = None
        if way == "whole step" and passes is not None:
            self.step = graphopt.optimize_step(self.model, self.optimizer, passes, loss=_loss)
        elif passes is not None:
            self.model = graphopt.optimize(self.model, passes)
        for parameter in self.model.parameters():  # momentum is there from the beginning
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self._saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def run(self, seed: int) -> torch.Tensor:
        """One step."""
        torch.manual_seed(seed)
        if self.step is not None:
            return self.step(self.batch).detach().clone()
        self.optimizer.zero_grad()
        loss = _loss(self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach().clone()

    def take_back(self) -> None:
        """Load the state that was saved at the beginning."""
        model, optimizer = copy.deepcopy(self._saved)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.optimizer.zero_grad()

    def outcome(self) -> list[Any]:
        """Losses, state and the generator's state after some steps from the saved state, in a thread of its own."""
        found: list[Any] = []

        def steps() -> None:
            self.take_back()
            found.append([self.run(seed) for seed in range(AFTER)])
            found.append(copy.deepcopy((dict(self.model.state_dict()), self.optimizer.state_dict()["state"])))
            found.append(torch.get_rng_state())

        thread = threading.Thread(target=steps, daemon=True)
        thread.start()
        thread.join(120)
        assert not thread.is_alive(), "another thread waits for ever"
        return found


def _process_state() -> tuple[Any, ...]:
    """What one thread's failure must not leave behind in a process."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        torch.compiler.is_compiling(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        torch.overrides._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(),
    )  # fmt: skip


# --- interrupts ------------------------------------------------------------------------------------------------------


class _Lines:
    """Counts the lines of graphopt and of generated code that run, and raises KeyboardInterrupt at one of them.

    Lines with ``with`` are left out: a trace sees one again where its block ends, before ``__exit__`` is called, and
    there Python lets no interrupt in.
    """

    def __init__(self, at: int = -1) -> None:
        self.seen, self.at = 0, at

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        if "/graphopt/" not in file and "/passes/" not in file and not file.startswith("<eval_with_key>"):
            return None
        if event == "line" and not linecache.getline(file, frame.f_lineno).lstrip().startswith("with "):
            self.seen += 1
            if self.seen - 1 == self.at:
                raise KeyboardInterrupt
        return self


@contextmanager
def _traced(lines: _Lines) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(lines)
    try:
        yield
    finally:
        sys.settrace(before)


def interrupted(way: str, pipeline: str, when: str, times: int) -> Iterator[dict[str, Any]]:
    """Interrupt a step at random lines, each in a loop of its own; what was wrong afterwards.

    Args:
        way: ``drop-in`` or ``whole step``.
        pipeline: a key of ``PIPELINES``.
        when: ``first step``, which captures, or ``later step``.
        times: how often.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    make = PIPELINES[pipeline]

    def loop() -> Loop:
        made = Loop(way, make())
        if when == "later step":
            made.run(0)
        return made

    undisturbed, lines = loop(), _Lines()
    with _traced(lines):
        undisturbed.run(7)
    expected, before = undisturbed.outcome(), _process_state()
    chance, made = random.Random(f"{way} {pipeline} {when}"), loop()
    for _ in range(times):
        at, fired = chance.randrange(lines.seen), False
        made = made if when == "later step" else loop()
        try:
            with _traced(_Lines(at)):
                made.run(7)
        except KeyboardInterrupt:
            fired = True
        yield {"at": at, "fired": fired, "wrong": _wrong(made, expected, before)}


def _wrong(made: Loop, expected: list[Any], before: tuple[Any, ...]) -> str:
    """What a disturbance has left behind that it must not, or an empty text."""
    if _process_state() != before:
        return f"the process is in another state: {_process_state()}"
    try:
        return first_difference(made.outcome(), expected)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# --- memory that runs out --------------------------------------------------------------------------------------------


def _data_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


@contextmanager
def _at_most(more: int) -> Iterator[None]:
    """No more than so many bytes beside those that the process has."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def starved(way: str, pipeline: str, when: str, times: int) -> Iterator[dict[str, Any]]:
    """Let memory run out at different points of a step; whether it did, the error, and what was wrong afterwards."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ctypes.CDLL(None).mallopt(-3, 65536)  # what is freed goes back to the system at once
    width, rows = 64, 1 << 14  # tensors of 4 MB

    def loop() -> Loop:
        made = Loop(way, PIPELINES[pipeline](), width, rows)
        if when == "later step":
            made.run(0)
        return made

    undisturbed = loop()
    peak = graphopt.measure_peak(lambda: undisturbed.run(7)).allocated_peak_bytes
    expected, before, made = undisturbed.outcome(), _process_state(), loop()
    for number in range(times):
        made, error = made if when == "later step" else loop(), ""
        try:
            with _at_most(int(peak * (number + 1) / (times + 1))):
                made.run(7)
        except (RuntimeError, MemoryError, graphopt.GraphoptError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        yield {"share": (number + 1) / (times + 1), "error": error, "wrong": _wrong(made, expected, before)}
