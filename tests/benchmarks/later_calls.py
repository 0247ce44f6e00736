"""How long calls of usual loops wait that come behind the first one: for another program, another size, other settings.

A GPT within 60 % of its peak, on one thread, in processes of their own that find nothing kept. Each call's processor
seconds beside those of its like, the shortest call of the same loop that does the same: the first one, and of all later
ones the one that is longer by most.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from harness import example_models, make_table, parser, show

import graphopt
from graphopt.passes import FitMemory

models = example_models()

BATCH, SHORT, CONTEXT, VOCAB = 8, 5, 64, 128
ROUNDS = 3
"""How often each loop goes through what it has to do; the shortest call of each kind is the like of the others."""


class Loop:
    """A model in training, and the seconds of its calls by what they do."""

    def __init__(self, layers: int, width: int, door: str) -> None:
        torch.manual_seed(0)
        config = models.GPTConfig(vocab=VOCAB, context=CONTEXT, d=width, layers=layers, heads=2)
        self.model: Any = models.GPT(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.calls: list[tuple[str, float]] = []
        self.step: Any = None
        if door == "optimize_step":
            loss, passes = models.next_token_loss, [FitMemory("60%")]
            self.step = graphopt.optimize_step(self.model, self.optimizer, passes, loss=loss)
        else:
            self.model = graphopt.optimize(self.model, [FitMemory("60%")])

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Note how long the block takes."""
        started = time.process_time()
        yield
        self.calls.append((kind, time.process_time() - started))

    def train(self, kind: str, rows: int = BATCH) -> None:
        """One call in training, and in a drop-in model its backward and update."""
        batch = torch.randint(VOCAB, (2, rows, CONTEXT))
        with self.timed(kind):
            if self.step is not None:
                self.step(*batch)
                return
            models.next_token_loss(self.model, *batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self, kind: str) -> None:
        """One call of the model in evaluation."""
        self.model.eval()
        with self.timed(kind), torch.no_grad():
            self.model(torch.randint(VOCAB, (BATCH, CONTEXT)))
        self.model.train()


def one_size(loop: Loop) -> None:
    """The same call again and again."""
    for _ in range(2 * ROUNDS):
        loop.train("train")


def accumulation(loop: Loop) -> None:
    """Four batches an update."""
    loop.step.accumulate(4)
    for _ in range(ROUNDS):
        for kind in ("accumulate", "accumulate", "accumulate", "update"):
            loop.train(kind)


def short_last_batch(loop: Loop) -> None:
    """Epochs of three batches, the last of which is shorter."""
    for _ in range(ROUNDS):
        for rows in (BATCH, BATCH, SHORT):
            loop.train(f"{rows} rows", rows)


def evaluation(loop: Loop) -> None:
    """The model is evaluated between two steps."""
    for _ in range(ROUNDS):
        loop.train("train")
        loop.train("train")
        loop.evaluate("evaluate")


def changing_betas(loop: Loop) -> None:
    """A scheduler changes learning rate and betas behind each step."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, 1e-3, total_steps=2 * ROUNDS + 1)
    for _ in range(2 * ROUNDS):
        loop.train("train")
        schedule.step()


LOOPS: dict[str, Callable[[Loop], None]] = {
    "one size": one_size,
    "accumulate(4)": accumulation,
    "a short last batch": short_last_batch,
    "evaluation in between": evaluation,
    "OneCycleLR, with betas": changing_betas,
}
DOORS = {"optimize_step": [*LOOPS], "optimize": ["one size", "a short last batch", "evaluation in between"]}


def beyond_their_like(calls: Sequence[tuple[str, float]]) -> list[float]:
    """How much longer each call takes than the shortest of its kind."""
    like: dict[str, float] = {}
    for kind, seconds in calls:
        like[kind] = min(seconds, like.get(kind, seconds))
    return [seconds - like[kind] for kind, seconds in calls]


def in_a_process(name: str, door: str, layers: int, width: int) -> list[float]:
    """What each call of a loop takes beyond its like, in a process that finds nothing kept."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"GRAPHOPT_CACHE": folder, "GRAPHOPT_LOG": "off"}
        options = ["--alone", name, door, "--size", str(layers), str(width)]
        command = [sys.executable, __file__, *options]
        ran = subprocess.run(command, env=os.environ | settings, stdout=subprocess.PIPE, text=True, check=True)
    return [float(seconds) for seconds in json.loads(ran.stdout)]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--size", nargs=2, type=int, default=(12, 128), help="layers and width of the GPT")
    options.add_argument("--alone", nargs=2, metavar=("LOOP", "DOOR"), help="one loop in this process, as JSON")
    given = options.parse_args(argv)
    torch.set_num_threads(1)
    layers, width = (2, 64) if given.quick else given.size
    if given.alone:
        name, door = given.alone
        loop = Loop(layers, width, door)
        LOOPS[name](loop)
        print(json.dumps(beyond_their_like(loop.calls)))
        return 0
    results = {
        f"{door}: {name}": in_a_process(name, door, layers, width) for door, names in DOORS.items() for name in names
    }
    rows = [
        (name, f"{seconds[0]:.2f} s", f"{max(seconds[1:]):.2f} s", str(1 + seconds.index(max(seconds[1:]))))
        for name, seconds in results.items()
    ]
    title = f"Processor seconds beyond the shortest call of the same kind, GPT of {layers} layers of {width}"
    headings = ("loop", "first call", "longest later call", "which")
    show({"results": results}, [make_table(title, headings, rows)], as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
