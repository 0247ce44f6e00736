"""Processes forked from one that has imported torch and graphopt, so that none of them takes seconds to start."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.context import ForkServerProcess
from typing import Any

__all__ = ["end", "start"]


def start(run: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> list[ForkServerProcess]:
    """Start ``run`` in a process for each of the arguments, all with the environment of this moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed", "graphopt.passes"])
    environment = dict(os.environ)
    processes = [context.Process(target=_child, args=(environment, run, *given), daemon=True) for given in arguments]
    for process in processes:
        process.start()
    return processes


def end(
    processes: Sequence[ForkServerProcess], *, alive: Sequence[bool] = (), seconds: float = 480
) -> list[int | None]:
    """Wait for processes to end, and kill what is left.

    Args:
        processes: to wait for.
        alive: for each of them whether it is not waited for; none by default.
        seconds: to wait at most, for all of them together.

    Returns:
        their exit statuses; None for one that was still alive at the end.
    """
    last = time.monotonic() + seconds
    for process, stays in zip(processes, alive or [False] * len(processes), strict=True):
        if not stays:
            process.join(timeout=max(0.0, last - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def _child(environment: dict[str, str], run: Callable[..., None], *given: Any) -> None:
    gc.freeze()  # what is imported stays: looking for garbage in it takes time
    os.environ.clear()
    os.environ.update(environment)
    run(*given)
