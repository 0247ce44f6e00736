"""One thread that copies, beside the threads that compute."""

from __future__ import annotations

import os
import queue
import threading
import traceback
import weakref
from collections.abc import Callable

from graphopt.errors import GraphoptError

__all__ = ["Job", "Worker"]


class Job:
    """Work that was handed to a worker.

    Args:
        work: does it; what it raises is kept for ``wait``.
        keep: what must live until the work is done (the storage that is read or written).
    """

    __slots__ = ("_done", "_error", "_keep", "_work")

    def __init__(self, work: Callable[[], None], keep: object) -> None:
        self._work: Callable[[], None] | None = work
        self._keep: object = keep
        self._error: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """Do the work; never raises. What was kept alive is let go before waiters wake up."""
        assert self._work is not None
        try:
            self._work()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they refer to what was to be copied
            self._error = error
        finally:
            self._work = self._keep = None
            self._done.set()

    @property
    def finished(self) -> bool:
        """Whether the work is done, or has failed."""
        return self._done.is_set()

    def wait(self) -> None:
        """Block until the work is done.

        Raises:
            GraphoptError: where the work failed; what it raised is the cause.
        """
        self._done.wait()
        if self._error is not None:
            # A new exception for each waiter: an exception that is kept would keep the frames it passed through, and
            # with them the handle whose release gives this job up.
            raise GraphoptError(str(self._error) or repr(self._error)) from self._error

    join = wait


class Worker:
    """A daemon thread that runs jobs one after the other, in the order in which they come.

    The thread starts with the first job, and ends when the worker is closed, is garbage, or the interpreter exits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stop: weakref.finalize[..., Worker] | None = None

    def submit(self, work: Callable[[], None], keep: object) -> Job:
        """Run ``work()`` after everything submitted before; ``keep`` lives until then."""
        job = Job(work, keep)
        with self._lock:
            if self._stop is None or not self._stop.alive:
                thread = threading.Thread(target=_serve, args=(self._queue,), name="graphopt transfers", daemon=True)
                thread.start()
                self._stop = weakref.finalize(self, _end, self._queue, thread, os.getpid())
            self._queue.put(job)
        return job

    def close(self) -> None:
        """Wait for what was submitted, and end the thread; a job that comes later starts a new one."""
        with self._lock:
            if self._stop is not None:
                self._stop()


def _serve(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # a finished job must not keep anything alive while the thread is idle


def _end(jobs: queue.SimpleQueue[Job | None], thread: threading.Thread, owner: int) -> None:
    if os.getpid() != owner:  # a forked child has the objects, but not the thread
        return
    jobs.put(None)
    if thread is not threading.current_thread():  # garbage collection may find the worker from within a job
        thread.join()
