"""Captures found in the folder of the cache instead of being made, and put there when they were made.

A capture is looked up by its key (``program_key``). One whose files cannot be used counts as one that is not there, and
a warning says what failed (``stored_capture``).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphopt.capture import CaptureSession
from graphopt.capture.graph_part import GraphPart
from graphopt.capture.replayed_trace import not_replayed
from graphopt.errors import GraphoptError
from graphopt.ir.context import Context
from graphopt.ir.node import Stage
from graphopt.rewriting.dump import DumpDirectory
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.rewrite import Rewritten, Verify
from graphopt.runtime.stored.program_files import HEADER, FolderFiles, ProgramFiles
from graphopt.runtime.stored.program_folder import (
    entries,
    is_on,
    make_room,
    note_refusal,
    programs_folder,
)
from graphopt.runtime.stored.program_key import Key, Subject, differences, program_key, read_sections
from graphopt.runtime.stored.shipped_captures import Shipped
from graphopt.runtime.stored.stable_form import NoStableFormError, digest
from graphopt.runtime.stored.stored_capture import StoredCapture, not_kept, read_capture, write_capture

__all__ = ["CacheLookup", "ProgramCache"]

logger = logging.getLogger(__name__)
_package = logging.getLogger("graphopt")


@dataclass
class CacheLookup:
    """One question to the cache: what was found, or where to put what is captured instead.

    Attributes:
        found: the capture; None where there is none.
    """

    key: Key
    folder: Path
    found: Rewritten | None = None
    why: str = ""
    said: list[tuple[str, str]] = field(default_factory=list)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Around a capture: what it warns of is kept with it, and said again where it is read."""
        handler = _Listener(self.said)
        _package.addHandler(handler)
        try:
            yield
        finally:
            _package.removeHandler(handler)

    def keep(self, rewritten: Rewritten) -> None:
        """Write a capture, and let its variants be written when they are made; says why not at DEBUG."""
        reason = not_kept(rewritten) or _not_replayed(rewritten)
        files = FolderFiles(self.folder / self.key.name)
        if not reason:
            try:
                write_capture(files, self.key, rewritten, self.said, self.why)
            except (OSError, GraphoptError, NoStableFormError) as error:
                reason = str(error)
        if reason:
            refuse(self.folder, self.key.title, reason)
            return
        rewritten.entry = StoredCapture(files, rewritten.session, rewritten.program.context)
        make_room(self.folder)


class _Listener(logging.Handler):
    """Notes the warnings of graphopt's loggers."""

    def __init__(self, said: list[tuple[str, str]]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        """Note one."""
        if record.levelno == logging.WARNING:
            self._said.append((record.name, record.getMessage()))


def _not_replayed(rewritten: Rewritten) -> str:
    """Why the program of a drop-in model is not kept; empty where it is."""
    session = rewritten.session
    if session.optimizer is not None or session.joint is None:
        return ""
    return not_replayed(session.joint, rewritten.program)


def refuse(folder: Path, title: str, reason: str) -> None:
    """Say, and note for ``graphopt cache``, why a capture is not kept."""
    logger.debug("the capture of %s is not kept: %s", title, reason)
    note_refusal(folder, title, reason, digest([title, reason])[:24])


class ProgramCache:
    """Looks up the captures of one model or step.

    Args:
        pipeline: whose passes run.
        until: the stage of the program that runs.
        backend: as the user gave it.
        verify: how far passes are checked.

    Attributes:
        shipped: the captures of a file that a step was loaded from.
    """

    def __init__(self, pipeline: Pipeline, until: Stage, backend: object, verify: Verify) -> None:
        self._pipeline = pipeline
        self._until: Stage = until
        self._backend = backend
        self._verify: Verify = verify
        self.shipped: Shipped | None = None

    def look_up(self, session: CaptureSession, context: Context) -> CacheLookup | None:
        """What is there for a capture that is about to be made; None where the cache is off or cannot serve it.

        Raises:
            GraphoptError: for the first call of a step that was loaded from a file, where the file has no capture for
                it.
        """
        if self.shipped is not None:
            found = self.shipped.find(self.key, session)
            if found is not None:
                key, files = found
                return CacheLookup(key, Path(), self.read(files, session, context, key))
        folder = programs_folder()
        if folder is None or not is_on() or isinstance(session.model, GraphPart):
            return None
        try:
            key = self._reachable_key(session, context)
        except NoStableFormError as error:
            refuse(folder, session.title, str(error))
            return None
        except Exception as error:  # of what the user's objects do when they are looked at
            refuse(
                folder, session.title, f"looking at what it depends on raised {type(error).__name__}: {error!s:.200}"
            )
            return None
        lookup = CacheLookup(key, folder)
        own = FolderFiles(folder / key.name)
        if HEADER not in own:
            lookup.why = _nearest(folder, key)
            logger.debug("no stored capture of %s: %s", key.title, lookup.why)
            return lookup
        try:
            lookup.found = self.read(own, session, context, key)
        except Exception as error:  # whatever is in the files, training goes on
            lookup.why = f"{'' if isinstance(error, GraphoptError) else type(error).__name__ + ': '}{error!s:.500}"
            logger.warning("a stored capture of %s cannot be used, and it is captured anew: %s", key.title, error)
        return lookup

    def _reachable_key(self, session: CaptureSession, context: Context) -> Key:
        """The key of a capture that may be looked up and kept.

        Raises:
            NoStableFormError: saying why it may not.
        """
        reason = "its sizes vary" if session.sizes_vary else self._out_of_reach(context)
        if reason:
            raise NoStableFormError(reason)
        return self.key(session)

    def key(self, session: CaptureSession) -> Key:
        """The key of a capture.

        Raises:
            NoStableFormError: where it depends on what cannot be compared.
        """
        return program_key(self.subject(session.model, session.loss, session.optimizer, session.example))

    def subject(self, model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer | None, example: Any) -> Subject:
        """What is captured with these options.

        Args:
            model: the bare model.
            loss: as for ``CaptureSession``.
            optimizer: whose update ends the program.
            example: positional and keyword arguments of the call; None where there is none yet.
        """
        compiler = self._backend if isinstance(self._backend, str) else "callable"
        return Subject(model, loss, optimizer, example, self._pipeline, self._until, compiler, self._verify)

    def read(self, own: ProgramFiles, session: CaptureSession, context: Context, key: Key) -> Rewritten:
        """The capture of a key in its files, for the live model."""
        started = time.perf_counter()
        classes = {text for name, text in key.sections["code"].items() if name.startswith(("global ", "class "))}
        found = read_capture(own, session, context, self._pipeline, self._verify, classes)
        own.used()
        found.seconds = time.perf_counter() - started
        return found

    def _out_of_reach(self, context: Context) -> str:
        """Why no capture of these options is looked up; empty where it is."""
        if self._verify == "numerics":
            return 'verify="numerics" compares with the program before passes, which only a capture has'
        if context.numbers:
            return "passes go on with numbers of an earlier run"
        if any(_exchanges(current) for current in self._pipeline.passes):
            return "passes exchange with other ranks while they rewrite"
        if DumpDirectory.is_wanted():
            return "GRAPHOPT_DUMP asks for the programs before and between passes"
        return ""


def _exchanges(current: object) -> bool:
    return any(name in type(current).__dict__ for name in ("prepare", "settle", "shards"))


def _nearest(folder: Path, key: Key) -> str:
    """Why there is no entry for a key: what differs from the nearest entry of the same model."""
    best: list[str] | None = None
    for entry in entries(folder)[:20]:
        with contextlib.suppress(GraphoptError):
            header = entry.header()
            if header["title"].text() == key.title:
                found = differences(key.sections, read_sections(header["key"]))
                if best is None or len(found) < len(best):
                    best = found
    return "; ".join(best) if best else f"there is no capture of {key.title} yet"
