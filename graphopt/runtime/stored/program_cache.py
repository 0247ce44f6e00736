"""Captures found in the folder of the cache instead of being made, and put there when they were made.

A capture is looked up by its key (``program_key``). Those whose sizes vary have the key of calls of any sizes: of them
there may be several, for other ranges of sizes and planned for other sizes, and one that serves the call is taken. One
whose files cannot be used counts as one that is not there, and a warning says what failed (``stored_capture``).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.capture import CaptureSession
from graphopt.capture.call.flatten import flatten
from graphopt.capture.dynamo.graph_part import GraphPart
from graphopt.capture.guards.code_owner import is_covered_class
from graphopt.errors import GraphoptError, quoted
from graphopt.ir.context import Context
from graphopt.ir.node import Stage
from graphopt.rewriting.dump import DumpDirectory
from graphopt.rewriting.memory.budget_text import is_what_is_free
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.progress import working
from graphopt.runtime.calls.size_rules import SizeRules, Target
from graphopt.runtime.programs.rewrite import Rewritten, Verify
from graphopt.runtime.stored.cache_lookup import CacheLookup, refuse
from graphopt.runtime.stored.program_files import HEADER, FolderFiles, ProgramFiles
from graphopt.runtime.stored.program_folder import (
    entries,
    is_on,
    programs_folder,
)
from graphopt.runtime.stored.program_key import Key, Subject, differences, program_key, read_sections
from graphopt.runtime.stored.shipped_captures import Shipped
from graphopt.runtime.stored.stable_form import NoStableFormError
from graphopt.runtime.stored.stored_capture import StoredCapture, read_capture
from graphopt.runtime.stored.stored_sizes import read_sizes

__all__ = ["ProgramCache"]

logger = logging.getLogger(__name__)


class HasOptions(Protocol):
    """How a model or a step is captured, rewritten and compiled."""

    @property
    def pipeline(self) -> Pipeline:
        """Whose passes run."""
        ...

    @property
    def dynamic_shapes(self) -> Any:
        """The sizes that vary, as a user gives them: ``"auto"`` for those that are found to; None for none."""
        ...

    @property
    def backend(self) -> Any:
        """What makes the code."""
        ...

    @property
    def verify(self) -> Verify:
        """How far passes are checked."""
        ...


class ProgramCache:
    """Looks up the captures of one model or step.

    Args:
        options: which passes run, on which sizes, and what makes and checks the code.
        until: the stage of the program that runs.

    Attributes:
        shipped: the captures of a file that a step was loaded from.
    """

    def __init__(self, options: HasOptions, until: Stage) -> None:
        self._pipeline = options.pipeline
        self._until: Stage = until
        self._backend = options.backend
        self._verify: Verify = options.verify
        self._sizes = options.dynamic_shapes
        self.shipped: Shipped | None = None

    def look_up(self, session: CaptureSession, context: Context, target: Target | None = None) -> CacheLookup | None:
        """What is there for a capture that is about to be made; None where the cache is off or cannot serve it.

        Args:
            session: the capture.
            context: of its programs.
            target: the sizes that it is planned for once more, where they vary.

        Raises:
            GraphoptError: for the first call of a step that was loaded from a file, where the file has no capture for
                it.
        """
        if self.shipped is not None:
            found = self._look_up_shipped(self.shipped, session, context, target)
            if found is not None:
                return found
        folder = programs_folder()
        if folder is None or not is_on():
            return None
        try:
            reason = self._out_of_reach(context)
            if reason:
                raise NoStableFormError(reason)
            return self._search(folder, session, context, target)
        except NoStableFormError as error:
            refuse(folder, session.title, str(error))
        except Exception as error:  # of what the user's objects do when they are looked at
            refuse(folder, session.title, f"looking at what it depends on raised {quoted(error, 200)}")
        return None

    def _search(self, folder: Path, session: CaptureSession, context: Context, target: Target | None) -> CacheLookup:
        """What is in the folder for a capture.

        Raises:
            NoStableFormError: where it depends on what cannot be compared.
        """
        fixed = None
        if not session.sizes_vary and target is None:
            fixed = CacheLookup(self.key(session, room=context.room), folder)
            self._take(fixed, [FolderFiles(folder / fixed.key.name)], session, context)
        lookup = fixed
        may_vary = self._sizes is not None and not isinstance(session.model, GraphPart)
        if lookup is None or (lookup.found is None and may_vary):
            lookup = CacheLookup(self.key(session, vary=True), folder)
            several = [FolderFiles(own) for own in sorted(folder.glob(f"*-{lookup.key.name}"))]
            self._take(lookup, self._serving(several, session, target), session, context)
        if lookup.found is None:
            lookup = fixed or lookup
            lookup.why = lookup.why or _nearest(folder, lookup.key)
            logger.debug("no stored capture of %s: %s", lookup.key.title, lookup.why)
        return lookup

    def _take(
        self, lookup: CacheLookup, candidates: Sequence[ProgramFiles], session: CaptureSession, context: Context
    ) -> None:
        """Read the first capture that can be used."""
        for files in candidates:
            if HEADER not in files:
                continue
            try:
                found = self.read(files, session, context, lookup.key)
                if not self._fits_now(found):
                    files.remove()  # all of it: plans for one number of bytes belong together
                    lookup.why = "it was planned for what was free then, and another number of bytes is free now"
                    continue
                lookup.found, lookup.rules = found, self._rules(found)
                return
            except Exception as error:  # whatever is in the files, training goes on
                lookup.why = quoted(error, 500)
                _tell_useless(lookup.key.title, error)

    def _fits_now(self, stored: Rewritten) -> bool:
        """Whether a capture would be planned in the same way now, where that depends on what is free ("auto").

        It would not where it takes more than there is, or saves memory that need not be saved.
        """
        limited = [p for p in self._pipeline.passes if is_what_is_free(getattr(p, "budget", None))]
        if not limited:
            return True
        memory = stored.program.memory()
        limit = min(found for current in limited if (found := current.limit(memory)) is not None)
        names = {current.name for current in limited}
        saves = [record for record in stored.records if record.name in names and record.changed]
        needless = any(record.peak_before is not None and record.peak_before <= limit for record in saves)
        reserved = reserved_where_cached(stored.program, memory)
        taken = memory.peak_bytes if reserved is None else reserved.reserved_peak_bytes
        return taken <= limit and not needless

    def _rules(self, found: Rewritten) -> SizeRules:
        """The sizes that a capture serves which was read."""
        sizes = found.entry.sizes if isinstance(found.entry, StoredCapture) else None
        return SizeRules() if sizes is None else sizes.rules(declared=self._declared)

    @property
    def _declared(self) -> bool:
        """Whether a user has said which sizes vary."""
        return self._sizes is not None and not isinstance(self._sizes, str)

    def _serving(
        self, candidates: Sequence[ProgramFiles], session: CaptureSession, target: Target | None
    ) -> list[ProgramFiles]:
        """Those of some captures whose sizes vary that serve a call, the best first.

        Args:
            candidates: of the call's key.
            session: with the call.
            target: as for ``look_up``.
        """
        tensors = flatten(session.example, paths=False)[0]
        ranked: list[tuple[int, ProgramFiles]] = []
        for files in candidates:
            try:
                sizes = read_sizes(files.read(HEADER)["sizes"]) if HEADER in files else None
                rank = None if sizes is None else sizes.rank(tensors, target, declared=self._declared)
            except Exception as error:  # whatever is in the files, training goes on
                _tell_useless(session.title, error)
                continue
            if rank is not None:
                ranked.append((rank, files))
        return [files for _, files in sorted(ranked, key=lambda pair: pair[0])]

    def _look_up_shipped(
        self, shipped: Shipped, session: CaptureSession, context: Context, target: Target | None
    ) -> CacheLookup | None:
        """What a file has for a capture; None where others of it have served calls, and this one is to be captured.

        Raises:
            GraphoptError: where it has none, and none of it has served a call yet.
        """
        try:
            own = [] if session.sizes_vary or target is not None else [self.key(session)]
            keys = [*own, *([] if self._sizes is None else [self.key(session, vary=True)])]
        except NoStableFormError as error:
            raise GraphoptError(f"{shipped.source} cannot be used for {session.title}: {error}") from error
        for key in keys:
            found: Sequence[ProgramFiles] = shipped.of(key)
            for files in found if key in own else self._serving(found, session, target):
                if HEADER not in files:
                    continue
                shipped.has_served = True
                read = self.read(files, session, context, key)
                if not self._fits_now(read):
                    files.remove()
                    continue
                return CacheLookup(key, Path(), read, self._rules(read))
        if not shipped.has_served:
            raise shipped.differs(keys)
        return None

    def key(self, session: CaptureSession, *, vary: bool = False, room: int | None = None) -> Key:
        """The key of a capture.

        Args:
            session: the capture.
            vary: for calls of any sizes, as far as these vary.
            room: the bytes that its program may take, where it is one part of a model.

        Raises:
            NoStableFormError: where it depends on what cannot be compared.
        """
        subject = self.subject(session.model, session.loss, session.optimizer, session.example)
        return program_key(replace(subject, sizes=self._sizes if vary else None, room=room))

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
        with working(f"reading the stored capture of {session.title}"):
            found = read_capture(own, session, context, self._pipeline, self._verify, classes)
        own.used()
        found.seconds = time.perf_counter() - started
        return found

    def _out_of_reach(self, context: Context) -> str:
        """Why no capture of these options is looked up; empty where it is."""
        if self._verify == "numerics":
            return 'verify="numerics" compares with the program before passes, which only a capture has'
        if context.step.numbers:
            return "passes go on with numbers of an earlier run"
        foreign = next((current.name for current in self._pipeline.passes if not is_covered_class(type(current))), "")
        if foreign and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return f"{foreign} is no pass of graphopt's, and may talk to other ranks while it rewrites"
        if DumpDirectory.is_wanted():
            return "GRAPHOPT_DUMP asks for the programs before and between passes"
        return ""


def _tell_useless(title: str, error: Exception) -> None:
    logger.warning("a stored capture of %s cannot be used, and it is captured anew: %s", title, quoted(error))


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
    if best == []:
        return "those that are there serve other sizes, or were planned for others"
    return "; ".join(best) if best else f"there is no capture of {key.title} yet"
