"""One table of what graphopt does on a GPU: bits, budgets, overlap of transfers, CUDA graphs, and a frontier.

Every row says what was asked, what came of it, and the figure. A row that fails, or that raises, is shown and the
others go on; the exit code is 1 then. With a second GPU the rows of bits are also measured on it, while the first is
current, and two ranks exchange gradients. The table is written as text and as JSON. ``--device cpu`` tries the table
itself where there is no GPU: rows that need one say so.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo
import torch._functorch.config
from harness import CheckpointedBlock, example_models, machine
from torch import nn

import graphopt
from graphopt.analysis.host_waits import graph_obstacles, host_waits
from graphopt.errors import PassError
from graphopt.passes import FitMemory, Offload, Recompute
from graphopt.rewriting.memory.fit.budget import BudgetError

models = example_models()

Outcome = Literal["yes", "no", "failed", "needs a GPU", "one device here", "does not fit", "figure"]


@dataclass(frozen=True)
class Row:
    """One line of the table: what was asked, on which device, what came of it, and the figure."""

    question: str
    device: str
    outcome: Outcome
    figure: str


@dataclass(frozen=True)
class Setting:
    """A GPT with dropout and its batch on one device."""

    device: torch.device
    quick: bool

    def build(self, dropout: float = 0.1) -> nn.Module:
        torch.manual_seed(0)
        size = {"vocab": 64, "context": 32, "d": 32, "layers": 2, "heads": 2}
        if not self.quick:
            size = {"vocab": 8192, "context": 512, "d": 768, "layers": 8, "heads": 12}
        model: nn.Module = models.GPT(models.GPTConfig(**size, dropout=dropout))
        return model.to(self.device)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        shape, vocab = ((2, 32), 64) if self.quick else ((16, 512), 8192)
        tokens, targets = torch.randint(vocab, (2, *shape))
        return tokens.to(self.device), targets.to(self.device)

    def step(self, passes: Sequence[Any], dropout: float = 0.1) -> tuple[nn.Module, Any]:
        model = self.build(dropout)
        optimizer = adamw(model)
        return model, graphopt.optimize_step(model, optimizer, list(passes), loss=models.next_token_loss)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


PASSES: dict[str, Callable[[], list[Any]]] = {
    "no pass": list,
    "Recompute": lambda: [Recompute("blocks.*")],
    "Offload": lambda: [Recompute("blocks.*"), Offload(min_bytes=0)],
    "FitMemory 80%": lambda: [FitMemory("80%")],
}


# --- the rows --------------------------------------------------------------------------------------------------------


def same_bits(setting: Setting, passes: Callable[[], list[Any]]) -> tuple[Outcome, str]:
    """Three steps of AdamW with dropout: losses, parameters and the generator, beside eager PyTorch."""
    batch, found = setting.batch(), []
    for kind in ("eager", "graphopt"):
        if kind == "eager":
            model = setting.build()
            run: Callable[..., torch.Tensor] = partial(eager_step, model, adamw(model))
        else:
            model, run = setting.step(passes())
        torch.manual_seed(2)
        losses = [run(*batch).detach().clone() for _ in range(3)]
        found.append([*losses, *(parameter.detach() for parameter in model.parameters())])
    different = sum(not torch.equal(one, two) for one, two in zip(*found, strict=True))
    return ("no" if different else "yes"), f"{different} of {len(found[0])} tensors differ after 3 steps"


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The implementation is named, so that eager PyTorch and the captured step run the same kernels."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss: torch.Tensor = models.next_token_loss(model, *batch)
    loss.backward()
    optimizer.step()
    return loss


def within_budget(setting: Setting) -> tuple[Outcome, str]:
    """What the allocator reserves for a step that ``FitMemory`` fitted, beside what was predicted."""
    if not setting.on_gpu:
        return "needs a GPU", "reserved bytes are those of CUDA's allocator"
    torch.cuda.empty_cache()  # what earlier rows left
    _, step = setting.step([FitMemory("80%")])
    batch = setting.batch()
    step(*batch)
    setting.wait()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(setting.device)
    for _ in range(2):
        step(*batch)
    setting.wait()
    predicted = step.program.reserved().reserved_peak_bytes
    measured = torch.cuda.max_memory_reserved(setting.device)
    return ("yes" if measured <= predicted * 1.05 else "no"), f"predicted {predicted:,}, reserved {measured:,} bytes"


def overlap(setting: Setting) -> tuple[Outcome, str]:
    """How much of the time of copies to and from the host a kernel runs beside them, by the profiler's trace."""
    if not setting.on_gpu:
        return "needs a GPU", "copies run beside kernels on a device alone"
    _, step = setting.step(PASSES["Offload"]())
    batch = setting.batch()
    step(*batch)
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        step(*batch)
        setting.wait()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(event.time_range.start, event.time_range.end, event.name) for event in events]
    copies = [span[:2] for span in spans if "Memcpy" in span[2] and "Pinned" in span[2]]
    kernels = [span[:2] for span in spans if "Memcpy" not in span[2] and "Memset" not in span[2]]
    share = covered(copies, kernels)
    return ("yes" if share > 0.5 else "no"), f"{share:.0%} of {len(copies)} copies' time beside kernels"


def covered(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """The share of the time of some spans in which one of the others runs; 0 where there is none."""
    merged: list[list[float]] = []
    for start, end in sorted(others):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    total = sum(end - start for start, end in spans)
    shared = sum(max(0.0, min(end, b) - max(start, a)) for start, end in spans for a, b in merged)
    return shared / total if total else 0.0


def waits_nowhere(setting: Setting) -> tuple[Outcome, str]:
    """That the host waits in no call of a step's program, and in none of the step, where CUDA can tell."""
    _, step = setting.step(PASSES["Recompute"]())
    batch = setting.batch()
    step(*batch)
    found = host_waits(step.program)
    if setting.on_gpu:
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(*batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return ("no" if found else "yes"), "; ".join(map(str, found)) or "none in the program"


def as_graph(setting: Setting) -> tuple[Outcome, str]:
    """Forward and backward as a CUDA graph, replayed, beside the same program without one."""
    if not setting.on_gpu:
        return "needs a GPU", "CUDA graphs are of a device"
    model, batch = setting.build(dropout=0.0), setting.batch()
    run = graphopt.optimize(model, [Recompute("blocks.*")], example_inputs=batch[:1])

    def gradients() -> None:
        models.next_token_loss(run, *batch).backward()

    side = torch.cuda.Stream(setting.device)
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            gradients()
    setting.wait()
    wanted = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients()
    graph.replay()
    setting.wait()
    got = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    different = sum(not torch.equal(one, two) for one, two in zip(wanted, got, strict=True))
    obstacles = graph_obstacles(graphopt.capture(model, batch[:1], loss=lambda model, x: model(x).mean()))
    return ("no" if different or obstacles else "yes"), f"{different} gradients differ, {len(obstacles)} obstacles"


def way(setting: Setting, name: str) -> Callable[..., torch.Tensor]:
    """A training step by the name of a way to spend less memory."""
    if name.startswith("FitMemory"):
        return setting.step([FitMemory(name.split()[1])])[1]  # type: ignore[no-any-return]
    model = setting.build()
    run: Any = model
    if name.startswith("checkpoint"):
        for index, block in enumerate(model.blocks):  # type: ignore[arg-type, var-annotated]
            model.blocks[index] = CheckpointedBlock(block)  # type: ignore[index, operator]
    elif name.startswith("torch's budget"):
        torch._functorch.config.activation_memory_budget = float(name.split()[2])
        run = torch.compile(model, backend="aot_eager")
    return partial(eager_step, run, adamw(model))


WAYS = (
    "eager PyTorch", "checkpoint per block", "torch's budget 0.5", "torch's budget 0.2", "FitMemory 80%",
    "FitMemory 60%",
)  # fmt: skip


def frontier(setting: Setting, name: str) -> tuple[Outcome, str]:
    """The peak above persistent memory, and the seconds of a step, of one way."""
    step, batch = way(setting, name), setting.batch()
    try:
        for _ in range(2):
            step(*batch)
    except PassError as error:
        if isinstance(error.__cause__, BudgetError):
            return "does not fit", f"every plan takes {error.__cause__.smallest_bytes:,} bytes or more"
        raise
    peak = graphopt.measure_peak(lambda: step(*batch), device=setting.device).allocated_peak_bytes
    seconds = []
    for _ in range(3 if setting.quick else 10):
        setting.wait()
        started = time.perf_counter()
        step(*batch)
        setting.wait()
        seconds.append(time.perf_counter() - started)
    return "figure", f"{peak:,} bytes, {min(seconds) * 1e3:.1f} ms"


RANKS: dict[str, Callable[[dict[str, float]], str]] = {
    "a step without exchange": lambda found: f"{found['plain'] * 1e3:.1f} ms",
    "a step with exchange": lambda found: f"{found['exchanged'] * 1e3:.1f} ms",
    "exposed exchange": lambda found: f"{found['exposed'] * 1e3:.2f} of {found['exchange'] * 1e3:.2f} ms",
}
"""What two ranks are asked, and the figure from what ``gpu_exchange.py`` found."""


@functools.cache
def exchange(kind: str, quick: bool) -> dict[str, float]:
    """What two ranks measure that have a device each, in processes of their own."""
    command = [sys.executable, str(Path(__file__).with_name("gpu_exchange.py")), "--device", kind]
    done = subprocess.run([*command, *["--quick"] * quick], capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def two_ranks(devices: Sequence[torch.device], quick: bool, name: str) -> tuple[Outcome, str]:
    """A figure of data parallel training on two devices."""
    if len(devices) < 2:
        return "one device here", "two ranks need a device each"
    return "figure", RANKS[name](exchange(devices[0].type, quick))


# --- the table -------------------------------------------------------------------------------------------------------


def questions(devices: Sequence[torch.device], quick: bool) -> Iterator[tuple[str, torch.device, Any]]:
    for device in devices:
        setting = Setting(device, quick)
        for name, passes in PASSES.items():
            yield f"eager's bits: {name}", device, partial(same_bits, setting, passes)
    setting = Setting(devices[0], quick)
    yield "reserves what was predicted", devices[0], partial(within_budget, setting)
    yield "offload beside kernels", devices[0], partial(overlap, setting)
    yield "the host waits nowhere", devices[0], partial(waits_nowhere, setting)
    yield "runs as a CUDA graph", devices[0], partial(as_graph, setting)
    for name in WAYS:
        yield f"frontier: {name}", devices[0], partial(frontier, setting, name)
    for name in RANKS:
        yield f"two ranks: {name}", devices[0], partial(two_ranks, devices, quick, name)


def ask(question: str, device: torch.device, answer: Callable[[], tuple[Outcome, str]]) -> Row:
    """The row of a question; what the answer raises is its figure."""
    try:
        outcome, figure = answer()
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        return Row(question, str(device), "failed", f"{type(error).__name__}: {said}")
    finally:
        torch._dynamo.reset()
        gc.collect()
    return Row(question, str(device), outcome, figure)


def about(devices: Sequence[torch.device]) -> dict[str, Any]:
    """The machine, with the devices' names and the driver's version."""
    found = {**machine(), "device": "cpu (a trial of the table)", "driver": "none"}
    if devices[0].type == "cuda":
        found["device"] = ", ".join(torch.cuda.get_device_name(device) for device in devices)
        found["driver"] = driver()
        found["cuda"] = torch.version.cuda
    return found


def driver() -> str:
    """The version of the driver, as its own tool says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return "not known"


def as_text(head: dict[str, Any], rows: Sequence[Row]) -> str:
    """The table, as it is printed and written."""
    cells = [("question", "device", "", "figure"), *((r.question, r.device, r.outcome, r.figure) for r in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in cells
    ]
    return "\n".join([", ".join(f"{key} {value}" for key, value in head.items()), "", *lines, ""])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the table alone")
    made.add_argument("--quick", action="store_true", help="small sizes: whether it runs, not how fast")
    made.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for gpu.txt and gpu.json")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask all questions, print the table, and write it."""
    options = parse(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU that torch {torch.__version__} can use: nothing was measured", file=sys.stderr)
        return 1
    count = min(torch.cuda.device_count(), 2) if options.device == "cuda" else 0
    devices = [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]
    rows = []
    for question in questions(devices, options.quick):
        print(question[0], file=sys.stderr)
        rows.append(ask(*question))
    head = about(devices)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.txt").write_text(as_text(head, rows), encoding="utf-8")
    content = {"machine": head, "rows": [asdict(row) for row in rows]}
    (options.out / "gpu.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    print(as_text(head, rows))
    return int(any(row.outcome in ("no", "failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
