"""Sparse and local exchange against dense exchange on real data: what training ends with, and what each rank receives.

Four processes (``--ranks``) of one thread train together (gloo), every way with the same batches and seeds:

* handwritten digits (scikit-learn): a multilayer perceptron, evaluated on 360 images;
* English text: the GPT of the examples, small, evaluated on text that was held out;
* the same with AdamW, as DiLoCo and 8-bit training are published: dense, local steps, outer steps, bfloat16 and float8.

Dense is ``DataParallel`` with momentum. ``DeepGradientCompression`` sends 0.1 % of the large tensors' elements behind a
warm-up over the published sparsities, and is then run without each of its corrections: without momentum correction
it is gradient dropping (error feedback, momentum behind the exchange). Local SGD averages every so many steps.

Figures are medians over the seeds, with the spread (largest minus smallest) behind ±. Bytes are those of the model in
``graphopt.rewriting.distributed.prediction.volume``'s terms: 2 (N - 1) / N of what is summed, (N - 1) times what each
rank gathers. With ``--rate`` every rank sits behind a link of that rate, as in ``exchange.py``; steps per second are
those of such links. ``--curves`` writes the loss over the steps, means over ranks and medians over seeds, to a file, as
``notebooks/6_train_apart.ipynb`` draws it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import example_models, make_table, parser, show
from network import Network, NetworkError, network
from torch import nn

import graphopt
from graphopt.ir.node import value_of
from graphopt.ir.ops.communication.collectives import ALL_GATHER, ALL_REDUCE, BROADCAST, GATHER_INTO
from graphopt.ir.ops.values import storage_bytes
from graphopt.passes import (
    AdaptiveLocalSGD,
    DataParallel,
    DeepGradientCompression,
    DiLoCo,
    Float8,
    LocalSGD,
    MixedPrecision,
)
from graphopt.rewriting.training_pass import Clock

MODELS = example_models()
TEXT = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "text.py"))
WORLD = 4
MOMENTUM = 0.9
POINTS = 50  # of a curve
Batch = tuple[torch.Tensor, torch.Tensor]


# --- what is trained -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A model, its data, and how it is trained.

    Attributes:
        title: for people.
        make: a new model.
        loss: of a model on a batch.
        data: batches to train on, of all ranks together, and what to evaluate on; takes steps and seed.
        steps: updates.
        dense: updates with dense exchange before the warm-up.
        warm_up: updates over which the sparsities rise.
        rate: the learning rate at the beginning; it falls to 0 with the cosine.
        adam: whether AdamW trains in place of SGD with momentum.
    """

    title: str
    make: Callable[[], nn.Module]
    loss: Callable[..., torch.Tensor]
    data: Callable[[int, int], tuple[list[Batch], Batch]]
    steps: int
    dense: int
    warm_up: int
    rate: float
    adam: bool = False


def classification(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(model(x), y)


def perceptron() -> nn.Module:
    """64 pixels to 10 classes; 85,000 parameters."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def gpt() -> nn.Module:
    """A byte-level GPT of two blocks; 135,000 parameters."""
    model: nn.Module = MODELS.GPT(MODELS.GPTConfig(vocab=256, context=64, d=64, layers=2, heads=4))
    return model


def digits(steps: int, seed: int, size: int = 64) -> tuple[list[Batch], Batch]:
    """Batches from 1,437 images, a new order at each epoch, and the other 360."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held_out, kept = order[:360], order[360:]
    generator = torch.Generator().manual_seed(seed)
    rows: list[torch.Tensor] = []
    while len(rows) < steps:
        rows += list(kept[torch.randperm(len(kept), generator=generator)].split(size))[:-1]
    return [(x[part], y[part]) for part in rows[:steps]], (x[held_out], y[held_out])


def text(steps: int, seed: int) -> tuple[list[Batch], Batch]:
    """Batches of 16 × 64 bytes, and all the text that is held out, in windows of 64 bytes."""
    tokens, held_out = TEXT["split_tokens"]()
    batches = TEXT["draw_batches"](tokens, count=steps, size=16, length=64, seed=seed)
    windows = held_out.unfold(0, 65, 64)
    return batches, (windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


TASKS = {
    "digits": Task("digits, perceptron", perceptron, classification, digits, 500, 0, 50, 0.2),
    "text": Task("text, GPT", gpt, MODELS.next_token_loss, text, 8000, 1000, 400, 0.3),
    "adamw": Task("text, GPT, AdamW", gpt, MODELS.next_token_loss, text, 2000, 0, 0, 3e-3, adam=True),
}


# --- how it is exchanged ---------------------------------------------------------------------------------------------

SMALL = {"min_elements": 4096, "momentum": MOMENTUM}


def ways(task: Task, steps: int) -> dict[str, tuple[float, list[graphopt.Pass]]]:
    """The optimizer's momentum and the passes beside ``DataParallel``, by what they are called."""
    if task.adam:
        return {name: (0.0, passes) for name, passes in ways_with_adam().items()}
    scale = steps / task.steps
    begin = {
        "rampup_begin_step": int(scale * task.dense), "rampup_step": max(1, int(scale * task.warm_up)), **SMALL,
    }  # fmt: skip
    plain = {key: value for key, value in begin.items() if key != "momentum"}  # which is the optimizer's then
    once = {**SMALL, "sparsity": (0.999,), "rampup_step": 1}
    local: dict[str, tuple[float, list[graphopt.Pass]]] = {
        f"local SGD, {k} steps": (MOMENTUM, [LocalSGD(k_steps=k, last_step=steps - 1)]) for k in (4, 8, 16)
    }
    return {
        "dense": (MOMENTUM, []),
        "DGC": (0.0, [DeepGradientCompression(**begin)]),
        "gradient dropping": (MOMENTUM, [DeepGradientCompression(correction="feedback", **plain)]),
        "DGC, no masking": (0.0, [DeepGradientCompression(masking=False, **begin)]),
        "DGC, no warm-up": (0.0, [DeepGradientCompression(**once)]),
        **local,
        "local SGD, adaptive": (MOMENTUM, [AdaptiveLocalSGD(init_k_steps=16, last_step=steps - 1)]),
    }


def ways_with_adam() -> dict[str, list[graphopt.Pass]]:
    """The same for AdamW; the state of it is each rank's own between outer steps."""
    sparse = {"sparsity": 0.97, "outer_lr": 1.0, "outer_momentum": 0.0}
    return {
        "dense": [],
        "DGC, feedback": [DeepGradientCompression(correction="feedback", min_elements=4096, rampup_step=100)],
        "local SGD, 20 steps": [LocalSGD(k_steps=20)],
        "DiLoCo, 20 steps": [DiLoCo(every=20)],
        "DiLoCo, 100 steps": [DiLoCo(every=100)],
        "DiLoCo, 20 steps, streaming, 8 bits": [DiLoCo(every=20, fragments=4, delay=1, mix=0.5, bits=8)],
        "SparseLoCo, 20 steps, 3 %": [DiLoCo(every=20, bits=16, **sparse)],
        "bfloat16": [MixedPrecision()],
        "float8, tensorwise": [MixedPrecision(), Float8(skip="head")],
        "float8, rowwise": [MixedPrecision(), Float8("rowwise", skip="head")],
        "float8, mx": [MixedPrecision(), Float8("mx", skip="head")],
    }


def received_bytes(program: graphopt.Program) -> float:
    """Bytes that come to a rank in one run."""
    ranks = dist.get_world_size()
    factors = {ALL_REDUCE: 2 * (ranks - 1) / ranks, ALL_GATHER: (ranks - 1) / ranks, BROADCAST: 1.0}
    nodes = [node for node in program.graph.nodes if node.target in factors]
    into = [node.args[1] for node in program.graph.find_nodes(op="call_function", target=GATHER_INTO)]
    gathered = sum(storage_bytes(value_of(node)) for node in into) * (ranks - 1) / ranks
    return gathered + sum(factors[node.target] * storage_bytes(value_of(node)) for node in nodes)


class Trainer:
    """One way to exchange on one task; compiled once, and started again for each seed."""

    def __init__(self, task: Task, momentum: float, passes: Sequence[graphopt.Pass]) -> None:
        torch.manual_seed(0)
        self._task = task
        self._passes = passes
        self._model = task.make()
        self._optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self._model.parameters(), lr=task.rate, momentum=momentum
        )
        if task.adam:
            self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=task.rate, fused=True)
        self._step = graphopt.optimize_step(self._model, self._optimizer, [DataParallel(), *passes], loss=task.loss)
        self._fresh: dict[str, Any] | None = None

    def train(self, steps: int, seed: int) -> dict[str, float]:
        """Train from the beginning; losses, accuracy, seconds per step and bytes received per step."""
        batches, held_out = self._task.data(steps, seed)
        mine = [
            tuple(part[dist.get_rank() :: dist.get_world_size()].contiguous() for part in batch) for batch in batches
        ]
        self._restart(seed, mine[0])
        forms: Counter[str] = Counter()
        losses = []
        started = time.perf_counter()
        for number, batch in enumerate(mine):
            forms[self._form(number)] += 1
            for group in self._optimizer.param_groups:
                group["lr"] = self._task.rate * (1 + math.cos(math.pi * number / steps)) / 2
            losses.append(self._step(*batch))
        if self._task.adam:
            self._step.synchronize()
        seconds = (time.perf_counter() - started) / steps
        means = torch.stack(losses) / dist.get_world_size()
        dist.all_reduce(means)
        return {
            "train": means[-max(1, steps // 20) :].mean().item(),
            "curve": [part.mean().item() for part in means.tensor_split(POINTS)],
            **self._evaluate(held_out),
            "seconds": seconds,
            **self._bytes(forms),
        }

    def _restart(self, seed: int, batch: Sequence[torch.Tensor]) -> None:
        torch.manual_seed(seed)
        self._model.load_state_dict(self._task.make().state_dict())
        self._optimizer.state.clear()
        if self._fresh is None:
            self._fresh = self._step.prepare(*batch).state_dict()
        parameters = dict(self._model.named_parameters())
        begin = "diloco/global/"  # what all ranks have in common is this seed's
        held = {
            name: parameters[name.removeprefix(begin)].detach() if name.startswith(begin) else kept
            for name, kept in self._fresh["held"].items()
        }
        self._step.load_state_dict({**self._fresh, "held": held})

    def _form(self, number: int) -> str:
        adapts = any(isinstance(current, AdaptiveLocalSGD) for current in self._passes)
        clock = Clock(steps=number, numbers=self._step.state_dict()["numbers"] if adapts else {})
        training = [current for current in self._passes if isinstance(current, graphopt.TrainingPass)]
        wanted = {current.name: current.form(clock) for current in training}
        return ", ".join(f"{name}: {form}" for name, form in wanted.items() if form)

    def _bytes(self, forms: Counter[str]) -> dict[str, float]:
        sizes = {label.partition(", ")[2]: received_bytes(program) for label, program in self._step.programs.items()}
        sizes.setdefault("", 0.0)
        total = sum(count * sizes[form] for form, count in forms.items())
        return {"bytes": total / forms.total(), "last bytes": sizes[""]}

    @torch.no_grad()
    def _evaluate(self, held_out: Batch) -> dict[str, float]:
        x, y = held_out
        right = (self._model(x).argmax(-1) == y).double().mean().item()
        return {"loss": self._task.loss(self._model, x, y).item(), "accuracy": right}


# --- the processes ---------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """What one rank does: every task, way and seed; rank 0 prints a line of JSON for each."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.store}",
        rank=options.rank,
        world_size=options.ranks,
        timeout=timedelta(minutes=5),
    )
    for name in options.tasks:
        task = TASKS[name]
        steps = max(10, int(task.steps * options.scale))
        for way, (momentum, passes) in ways(task, steps).items():
            if options.ways and way not in options.ways:
                continue
            trainer = Trainer(task, momentum, passes)
            for seed in range(options.seeds):
                found = trainer.train(steps, seed)
                if options.rank == 0:
                    print(json.dumps({"task": name, "way": way, "seed": seed, "steps": steps, **found}), flush=True)
    dist.destroy_process_group()


def launch(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the ranks; what rank 0 printed."""
    shaped: contextlib.AbstractContextManager[Network | None] = contextlib.nullcontext()
    if options.rate is not None:
        shaped = network(options.ranks)
    with shaped as links, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--store", f"{folder}/store", "--seeds", str(options.seeds)]
        command += ["--scale", str(options.scale), "--ranks", str(options.ranks), "--tasks", *options.tasks]
        command += ["--ways", *options.ways] if options.ways else []
        environment = dict(os.environ)
        if links is not None:
            links.shape(options.rate)
            environment["GLOO_SOCKET_IFNAME"] = links.interface
        ranks = [
            subprocess.Popen(
                [*(links.prefix(rank) if links is not None else []), *command, "--rank", str(rank)],
                env=environment, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(options.ranks)
        ]  # fmt: skip
        lines = []
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            lines.append(json.loads(line))
            said = "{task}, {way}, seed {seed}: train loss {train:.4f}, held-out {loss:.4f}, accuracy {accuracy:.2%}"
            print(said.format(**lines[-1]), file=sys.stderr)
        if any(process.wait() for process in ranks):
            raise SystemExit("a rank failed")
    return lines


def curves_of(found: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """By the way to train: the loss over the steps, the median over the seeds at each point."""
    curves: dict[str, list[list[float]]] = {}
    for line in found:
        curves.setdefault(line["way"], []).append(line["curve"])
    return {
        way: [round(statistics.median(point), 4) for point in zip(*lines, strict=True)] for way, lines in curves.items()
    }


def middle(values: Sequence[float], form: str) -> str:
    """The median, and how far the values lie apart."""
    return f"{statistics.median(values):{form}} ± {max(values) - min(values):{form}}"


def table_of(name: str, found: Sequence[dict[str, Any]], ranks: int, rate: str | None) -> Any:
    """One task's table."""
    task = TASKS[name]
    rows = []
    for way in dict.fromkeys(line["way"] for line in found):
        same = [line for line in found if line["way"] == way]
        columns = {key: [line[key] for line in same] for key in ("train", "loss", "accuracy", "seconds", "bytes")}
        held_out = middle([100 * share for share in columns["accuracy"]], ".1f")
        rows.append([
            way, middle(columns["train"], ".4f"), middle(columns["loss"], ".4f"), held_out,
            f"{statistics.median(columns['bytes']) / 1e3:,.1f}", f"{same[0]['last bytes'] / 1e3:,.1f}",
            f"{1 / statistics.median(columns['seconds']):.0f}",
        ])  # fmt: skip
    headings = ["way", "train loss", "held-out loss", "accuracy, %", "kB/step", "last", "steps/s"]
    behind = "" if rate is None else f", links of {rate}"
    return make_table(f"{task.title}, {found[0]['steps']} steps, {ranks} ranks{behind}", headings, rows)


def main() -> None:
    """Parse, run, print."""
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, default=3, help="how many seeds")
    made.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="what to train")
    made.add_argument(
        "--ways", nargs="+", choices=[*ways(TASKS["digits"], 500), *ways_with_adam()], help="by default all",
        metavar="WAY",
    )  # fmt: skip
    made.add_argument("--ranks", type=int, default=WORLD, help="how many train together (default: 4)")
    made.add_argument("--scale", type=float, default=1.0, help="times the steps of each task")
    made.add_argument("--rate", help="of each rank's link, such as 100mbit; none by default")
    made.add_argument("--curves", type=Path, help="a file of JSON to write the loss over the steps to, by task and way")
    made.add_argument("--store", help=argparse.SUPPRESS)
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.rank is not None:
        work(options)
        return
    if options.quick:
        options.seeds, options.scale = 1, 0.1
    try:
        found = launch(options)
    except NetworkError as error:
        raise SystemExit(str(error)) from error
    tables = [
        table_of(name, [line for line in found if line["task"] == name], options.ranks, options.rate)
        for name in options.tasks
    ]
    if options.curves is not None:
        tasks = {name: [line for line in found if line["task"] == name] for name in options.tasks}
        curves = {name: {"steps": lines[0]["steps"], "ways": curves_of(lines)} for name, lines in tasks.items()}
        options.curves.write_text(json.dumps({"ranks": options.ranks, "tasks": curves}, indent=1) + "\n")
    show({"rate": options.rate, "runs": found}, tables, as_json=options.json)


if __name__ == "__main__":
    main()
