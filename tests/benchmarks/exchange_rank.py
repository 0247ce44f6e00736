"""One rank of exchange.py: trains the same GPT in every way in turn, at every rate, and times it.

The first rank talks to the benchmark in lines of JSON: it asks for the links to be shaped, waits for an answer on its
standard input, and gives the result.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import example_models
from network import bits_per_second, multiple_of_compute, passes_segments, sent_bytes
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer

import graphopt
from graphopt.ir.ops.communication.groups import find_group
from graphopt.passes import (
    CompressGradients,
    DataParallel,
    DeepGradientCompression,
    LocalSGD,
    ShardOptimizer,
    ShardParameters,
)
from graphopt.rewriting.distributed.prediction.compressed import LowRank, Sparse
from graphopt.rewriting.distributed.prediction.link import Link
from graphopt.rewriting.distributed.prediction.measured_link import measure_link
from graphopt.rewriting.distributed.prediction.predict import predict_workload
from graphopt.rewriting.distributed.prediction.strategies import Dense, Local, Sharded, ShardedParameters, Strategy
from graphopt.rewriting.distributed.prediction.workload import Workload, workload_of

models = example_models()
Step = Callable[[], Any]
WARM_UP = 4
CALIBRATING = 9
"""Steps without exchange whose median sets a rate that is asked for as a multiple of the computation."""

WITHOUT = "no exchange"
HEADERS = 1 + 66 / 1448 + 66 / (2 * 1448)
"""Bytes on a link for a byte of payload, counted by segment: TCP over Ethernet, every second one acknowledged."""


@dataclass(frozen=True)
class Setting:
    """What is trained: a GPT on ``batch`` sequences of random tokens in each rank."""

    config: Any
    batch: int

    def build(self, momentum: float = 0.9) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A model, the same on every rank, and SGD."""
        torch.manual_seed(0)
        model = models.GPT(self.config)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum, fused=True)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch of this rank's own."""
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (self.batch, self.config.context)
        x, y = (torch.randint(self.config.vocab, shape, generator=generator) for _ in range(2))
        return x, y


@dataclass(frozen=True)
class Mode:
    """One way to train.

    Attributes:
        name: for the table.
        make: makes what runs one step.
        steps: how many steps make a period; times and bytes are means over them.
        strategy: whose prediction it is compared with, if any.
    """

    name: str
    make: Callable[[Setting], Step]
    steps: int = 1
    strategy: Strategy | None = None


# --- PyTorch's -------------------------------------------------------------------------------------------------------


def eager(setting: Setting) -> Step:
    """The loop that everyone writes, in one process."""
    model, optimizer = setting.build()
    return _loop(model, optimizer, setting)


def theirs(
    hook: Callable[[nn.parallel.DistributedDataParallel], None] | None = None, bucket_mb: float | None = None
) -> Callable[[Setting], Step]:
    """DistributedDataParallel, with a communication hook or without, and buckets of its default size or another."""

    def make(setting: Setting) -> Step:
        model, optimizer = setting.build()
        parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        if hook is not None:
            hook(parallel)
        return _loop(parallel, optimizer, setting)

    return make


def post_local(period: int) -> Callable[[Setting], Step]:
    """torch's own post-local SGD, past its synchronous steps."""

    def make(setting: Setting) -> Step:
        model, optimizer = setting.build()
        parallel = nn.parallel.DistributedDataParallel(model)
        alone, _ = dist.new_subgroups(group_size=1)
        state = PostLocalSGDState(None, alone, start_localSGD_iter=1, post_local_gradient_allreduce=False)
        parallel.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=period, warmup_steps=0)
        return _loop(parallel, PostLocalSGDOptimizer(optimizer, averager), setting)

    return make


def fully_sharded(again: bool, passes: str | None = None) -> Callable[[Setting], Step]:
    """FSDP2 (``fully_shard``) around each block and the whole, which gathers parameters again for backward or not.

    With ``passes``, empty for none, the result is optimized. Its optimizer has no fused form for a CPU's DTensors.
    """

    def make(setting: Setting) -> Step:
        model, _ = setting.build()
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, reshard_after_forward=again)
        fully_shard(model, mesh=mesh, reshard_after_forward=again)
        if passes is not None:
            model = graphopt.optimize(model, passes or ())
        return _loop(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), setting)

    return make


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting) -> Step:
    x, y = setting.draw()

    def step() -> None:
        models.next_token_loss(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _in_bfloat16(group, bucket):  # type: ignore[no-untyped-def]  # DistributedDataParallel reads the annotations
    """torch's own hook under another name: by its name DistributedDataParallel refuses it beside gloo."""
    return default_hooks.bf16_compress_hook(group, bucket)


def _bf16(parallel: nn.parallel.DistributedDataParallel) -> None:
    parallel.register_comm_hook(None, _in_bfloat16)


def _powersgd(parallel: nn.parallel.DistributedDataParallel) -> None:
    """For one bucket: beside gloo the all-reduces of several may start in another order on each rank, and fail."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


# --- graphopt's ------------------------------------------------------------------------------------------------------


def ours(*added: graphopt.Pass, momentum: float = 0.9, alone: bool = False) -> Callable[[Setting], Step]:
    """A whole step with DataParallel and what is added to it."""

    def make(setting: Setting) -> Step:
        model, optimizer = setting.build(momentum)
        used = [] if alone else [DataParallel(), *added]
        step = graphopt.optimize_step(model, optimizer, used, loss=models.next_token_loss)
        x, y = setting.draw()
        return lambda: step(x, y)

    return make


def all_modes() -> list[Mode]:
    """Every way."""
    found = [
        Mode("no exchange, eager", eager),
        Mode("DDP", theirs()),
        Mode("DDP, bf16 hook", theirs(_bf16)),
        Mode("DDP, PowerSGD hook", theirs(_powersgd, bucket_mb=1024)),
        Mode("DDP, post-local SGD, 4", post_local(4), 4),
        Mode(WITHOUT, ours(alone=True)),
        Mode("DataParallel", ours(), strategy=Dense()),
    ]
    found.append(Mode("CompressGradients bf16", ours(CompressGradients("bf16")), strategy=Dense(wire=torch.bfloat16)))
    found.append(
        Mode("CompressGradients powersgd", ours(CompressGradients("powersgd", start_step=2)), strategy=LowRank())
    )
    found.append(Mode("ShardOptimizer", ours(ShardOptimizer()), strategy=Sharded()))
    found += [
        Mode("FSDP2", fully_sharded(again=True)),
        Mode("FSDP2, gathered once", fully_sharded(again=False)),
        Mode("FSDP2, optimize", fully_sharded(again=True, passes="")),
        Mode("FSDP2, FitMemory", fully_sharded(again=True, passes="fit-memory{budget=60%}")),
        Mode("ShardParameters", ours(ShardParameters()), strategy=ShardedParameters()),
        Mode("ShardParameters, keep=1GB", ours(ShardParameters(keep="1GB")), strategy=ShardedParameters(stay=True)),
    ]
    sparse = DeepGradientCompression(sparsity=(0.999,), momentum=0.9)
    found.append(Mode("DeepGradientCompression 99.9 %", ours(sparse, momentum=0.0), strategy=Sparse(0.001)))
    found += [Mode(f"LocalSGD k={k}", ours(LocalSGD(k_steps=k)), k, Local(k)) for k in (4, 8, 16)]
    return found


# --- measuring -------------------------------------------------------------------------------------------------------


def timed(action: Step, steps: int, interface: str) -> tuple[float, int]:
    """Seconds and bytes sent of so many steps, begun by all ranks at once."""
    dist.barrier()
    before, started = sent_bytes(interface), time.perf_counter()
    for _ in range(steps):
        action()
    seconds = time.perf_counter() - started
    dist.barrier()
    return seconds, sent_bytes(interface) - before


def measure_rate(modes: Sequence[Mode], actions: Sequence[Step], rounds: int, interface: str) -> list[dict[str, Any]]:
    """Every way in turn, in every round beginning with another one; by way, seconds and bytes of a step."""
    found: list[list[tuple[float, int]]] = [[] for _ in modes]
    for number in range(rounds):
        for offset in range(len(modes)):
            index = (number + offset) % len(modes)
            seconds, sent = timed(actions[index], modes[index].steps, interface)
            found[index].append((seconds / modes[index].steps, sent // modes[index].steps))
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    results = []
    for index, mode in enumerate(modes):
        by_round = list(zip(*(rank[index] for rank in everywhere), strict=True))
        results.append(
            {
                "mode": mode.name,
                "seconds": [max(seconds for seconds, _ in ranks) for ranks in by_round],
                "sent_bytes": statistics.median(sum(sent for _, sent in ranks) for ranks in by_round) / len(everywhere),
            }
        )
    return results


def ask(question: dict[str, Any]) -> None:
    """Let the benchmark do something, and wait until all ranks know that it is done."""
    if dist.get_rank() == 0:
        print(json.dumps(question), flush=True)
        sys.stdin.readline()
    dist.barrier()


def link_rate(asked: str, modes: Sequence[Mode], actions: Sequence[Step], payload: int, options: dict[str, Any]) -> str:
    """The rate of each link: as asked, or so that dense exchange takes a multiple (``5.5x``) of the computation.

    For a multiple, all ranks run the step without exchange at once, and the slowest rank's median counts; the time
    of dense exchange is that of its bytes, headers included.
    """
    if not (multiple := multiple_of_compute(asked)):
        return asked
    alone = next(number for number, mode in enumerate(modes) if mode.name == WITHOUT)
    seconds = statistics.median(timed(actions[alone], 1, options["interface"])[0] for _ in range(CALIBRATING))
    everywhere: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everywhere, seconds)
    ranks = len(everywhere)
    sent = 2 * (ranks - 1) / ranks * payload * HEADERS * (ranks if options["shared"] else 1)
    return f"{sent * 8 / (multiple * max(everywhere)) / 1e3:.0f}kbit"


def shared_out(results: list[dict[str, Any]], shared: bool) -> list[dict[str, Any]]:
    """Where all ranks send through one interface, each of them counted what all sent."""
    ranks = dist.get_world_size() if shared else 1
    return [{**result, "sent_bytes": result["sent_bytes"] / ranks} for result in results]


def predictions(
    modes: Sequence[Mode], workload: Workload, link: Link, results: Sequence[dict[str, Any]], headers: float
) -> None:
    """Add what the dry run says to the results of the ways that it knows; ``headers`` is bytes per byte of payload.

    Where the step without exchange is among the results, all computation is scaled to its time: ranks of one machine
    share its cores and its memory, which the dry run knows nothing of.
    """
    alone = [result["seconds"] for result in results if result["mode"] == WITHOUT]
    if alone:
        workload = workload.taking(statistics.median(alone[0]))
    for mode, result in zip(modes, results, strict=True):
        if mode.strategy is not None:
            found = predict_workload(workload, dist.get_world_size(), link, mode.strategy)
            result |= {"predicted_seconds": found.step, "predicted_bytes": found.sent * headers}


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    setting = Setting(models.GPTConfig(**options["config"]), options["batch"])
    modes = [mode for mode in all_modes() if not options["modes"] or mode.name in options["modes"]]
    workload = None
    if dist.get_rank() == 0:
        model, optimizer = setting.build()
        workload = workload_of(
            graphopt.capture(model, setting.draw(), loss=models.next_token_loss, optimizer=optimizer)
        )
    dist.barrier()
    actions = [mode.make(setting) for mode in modes]
    for mode, action in zip(modes, actions, strict=True):
        timed(action, max(WARM_UP, 2 * mode.steps), options["interface"])
    parameters = list(models.GPT(setting.config).parameters())
    payload = sum(p.numel() * p.element_size() for p in parameters)
    result: dict[str, Any] = {"parameters": sum(p.numel() for p in parameters), "rates": []}
    for asked in options["rates"]:
        ask({"shape": "unshaped"})
        rate = link_rate(asked, modes, actions, payload, options)
        ask({"shape": rate})
        measured = measure_link(find_group(""), torch.device("cpu"))
        bits = bits_per_second(rate)
        sharing = dist.get_world_size() if options["shared"] else 1
        bandwidth = measured.bandwidth if bits == float("inf") else bits / 8 / sharing
        found = shared_out(measure_rate(modes, actions, options["rounds"], options["interface"]), options["shared"])
        if workload is not None:
            headers = HEADERS if passes_segments(rate) else 1.0
            predictions(modes, workload, Link(bandwidth / headers, measured.latency), found, headers)
        figures = {"bandwidth": measured.bandwidth, "latency": measured.latency}
        result["rates"].append({"rate": rate, **figures, "modes": found})
    if dist.get_rank() == 0:
        print(json.dumps({"result": result}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
