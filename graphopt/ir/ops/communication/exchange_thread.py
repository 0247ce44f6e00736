"""Exchanges that a thread of this process carries on while the program computes, one after the other.

All ranks start their exchanges in the same order, so that one at a time is enough, and none waits for another one that
has not begun elsewhere.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

import torch

from graphopt import _torch

__all__ = ["in_background"]


class _Job:
    """Something to be done, and how it ended."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it."""
        try:
            with torch.no_grad():
                self._action()  # type: ignore[misc]
        except BaseException as error:  # raised where it is waited for
            self.fail(error)
        else:
            self._ended.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._ended.set()

    @property
    def error(self) -> BaseException | None:
        return self._error

    def wait(self) -> None:
        """Wait for the end, and let go of what it works on; raises what went wrong.

        Here, since a measurement of memory does not see what another thread frees.
        """
        self._ended.wait()
        self._action = None
        if self._error is not None:
            raise self._error


class _Worker:
    """A thread with a queue. Where a job fails, those behind it do too: what they wait for will not come."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="graphopt exchanges", daemon=True).start()

    def submit(self, job: _Job) -> None:
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            job.run()
            if job.error is not None:
                self._fail_others(job.error)
            del job

    def _fail_others(self, error: BaseException) -> None:
        while not self._jobs.empty():
            self._jobs.get().fail(error)


_worker: _Worker | None = None


def in_background(action: Callable[[], None], result: torch.Tensor) -> None:
    """Do something in the thread for exchanges, behind what it was given before; ``wait_tensor(result)`` waits for it.

    What goes wrong is raised there.
    """
    global _worker
    if _worker is None or _worker.process != os.getpid():  # threads do not live on in a forked process
        _worker = _Worker()
    job = _Job(action)
    _torch.wait_with(result, _torch.work_of(job.wait))
    _worker.submit(job)
