"""Predictions beside measurements that others have published, each model made of its sizes without data.

A prediction is what the program says by itself: the peak of its timeline and the workspaces of the device's profile, or
the seconds of its roofline. Nothing is fitted. Figures of `nvidia-smi` are compared above what was occupied before the
model was there. `published_memory.toml` has the rows, their sources, and what each prediction leaves out.
"""

from __future__ import annotations

import functools
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import make_table, parser, show
from published_models import MODELS

import graphopt
from graphopt.analysis.costs.cost import costs_of
from graphopt.analysis.costs.profiles import PROFILES
from graphopt.capture.devices.for_device import without_data_for
from graphopt.capture.session import CaptureSession
from graphopt.ir.context import Context
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.prediction.link import HostLink, Link
from graphopt.rewriting.distributed.prediction.predict import predict_workload
from graphopt.rewriting.distributed.prediction.strategies import ShardedParameters
from graphopt.rewriting.distributed.prediction.workload import workload_of
from graphopt.rewriting.memory.fit.budget import budget_bytes
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.programs.rewrite import rewrite

ROWS = Path(__file__).parent / "published_memory.toml"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LARGER = 2

LATENCY = 10e-6
"""Seconds of a round between hosts, an assumption."""


def program_of(row: Mapping[str, Any], sizes: Mapping[str, int]) -> Program:
    """The step, or forward and backward where there is no optimizer, as the device of the row would run it."""
    profile = PROFILES[row["device"]]
    with graphopt.without_data():
        parts = MODELS[row["model"]](sizes, row)
        model = parts["model"].to(_DTYPES.get(row["precision"], torch.float32)).train()
        optimizer = _optimizer(model, row["optimizer"])
    passes = [f"recompute{{checkpoints={row['checkpointing']}}}"] if row["checkpointing"] != "none" else []
    passes += ["mixed-precision{dtype=float16}"] if row["precision"] == "mixed float16" else []
    twins = without_data_for(profile, model, optimizer, parts.get("example_inputs", ()), parts.get("kwargs", {}), None)
    session = CaptureSession(twins.model, twins.args, twins.kwargs, loss=parts["loss"], optimizer=twins.optimizer)
    stage = "joint" if optimizer is None else "step"
    return rewrite(session, Pipeline(", ".join(passes)), until=stage, context=Context(device=profile)).program


def _optimizer(model: torch.nn.Module, name: str) -> torch.optim.Optimizer | None:
    if name == "none":
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, foreach=name == "AdamW")


# --- what is compared ------------------------------------------------------------------------------------------------


def peak_bytes(row: Mapping[str, Any], sizes: Mapping[str, int]) -> float:
    """The peak of a step after the first, and the workspaces of the libraries, which torch's allocator counts too."""
    memory = program_of(row, sizes).memory()
    return budget_bytes("100%", memory) + sum(PROFILES[row["device"]].workspaces.values())


def largest_batch(row: Mapping[str, Any], sizes: Mapping[str, int]) -> float:
    """How many sequences fit beside the context, by the line through the peaks of two batches."""
    batch = row["batch"]
    small, large = (peak_bytes({**row, "batch": size}, sizes) for size in (batch, _LARGER * batch))
    each = (large - small) / ((_LARGER - 1) * batch)
    profile = PROFILES[row["device"]]
    return float(batch + (profile.memory_bytes - profile.context_bytes - small) // each)


def tokens_per_second(row: Mapping[str, Any], sizes: Mapping[str, int]) -> float:
    """By the roofline of the row's device."""
    seconds = sum(costs_of(program_of(row, sizes).memory(), row["device"]).seconds)
    return row["batch"] * row["tokens"] / seconds


def exchanged_tokens_per_second(row: Mapping[str, Any], sizes: Mapping[str, int]) -> float:
    """By the same, of each of so many devices, with parameters sharded over all of them, on the profile's links."""
    profile = PROFILES[row["device"]]
    host = HostLink(profile.devices_per_host, profile.peer_bandwidth)
    link = Link(profile.network_bandwidth, LATENCY, host=host)
    workload = workload_of(program_of(row, sizes), row["device"])
    found = predict_workload(workload, row["ranks"], link, ShardedParameters())
    print(f"{row['what']}: {found.exposed / found.step:.1%} of the step waits for exchanges", file=sys.stderr)
    return float(row["batch"] * row["tokens"] / found.step)


def layer_bytes(row: Mapping[str, Any], sizes: Mapping[str, int]) -> float:
    """What three layers hold at their peak more than two, without parameters and their gradients."""
    programs = [program_of(row, {**sizes, "layers": count}) for count in (2, 3)]
    small, large = (program.memory() for program in programs)
    more = [large.peak_bytes - small.peak_bytes, large.resident_bytes - small.resident_bytes]
    return float(more[0] - more[1])


FIGURES: dict[str, Callable[[Mapping[str, Any], Mapping[str, int]], float]] = {
    "peak_bytes": peak_bytes,
    "occupied_bytes": peak_bytes,
    "largest_batch": largest_batch,
    "tokens_per_second": tokens_per_second,
    "exchanged_tokens_per_second": exchanged_tokens_per_second,
    "layer_bytes": layer_bytes,
}


def compared(row: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """A row with the prediction, and its distance as a share of what was published."""
    published = row["published"] - row.get("baseline", 0)
    predicted = FIGURES[row["figure"]](row, sizes)
    return {**row, "compared": published, "predicted": predicted, "distance": predicted / published - 1}


def _shown(figure: str, value: float) -> str:
    if figure == "largest_batch":
        return f"{value:.0f} rows"
    return f"{value:,.0f} tokens/s" if figure.endswith("tokens_per_second") else f"{value / 1e9:.2f} GB"


def _row(found: Mapping[str, Any]) -> tuple[str, ...]:
    shown = functools.partial(_shown, found["figure"])
    return (
        found["what"],
        shown(found["predicted"]),
        shown(found["compared"]),
        f"{found['distance']:+.1%}",
        found["source"],
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--match", default="", help="only rows whose description has this text")
    given = options.parse_args(argv)
    data = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    rows = [row for row in data["rows"] if given.match in row["what"]]
    if given.quick:
        rows = [row for row in rows if row["config"] == "bert_large" and row["batch"] == 1]
    results = []
    for row in rows:
        results.append(compared(row, data["configs"][row["config"]]))
        print(" | ".join(_row(results[-1])), file=sys.stderr, flush=True)
    head = ("", "predicted", "published", "distance", "source")
    table = make_table("Predictions beside published measurements", head, [_row(found) for found in results])
    show({"results": results}, [table], as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
