"""One question to the cache: what was found, or what is written when the capture has been made instead."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphopt.capture.joint.replayed_trace import not_replayed
from graphopt.errors import GraphoptError
from graphopt.ir.ops.communication.groups import times_talked
from graphopt.rewriting.warnings_kept import WarningsKept
from graphopt.runtime.calls.size_rules import SizeRules
from graphopt.runtime.programs.rewrite import Rewritten
from graphopt.runtime.stored.program_files import FolderFiles
from graphopt.runtime.stored.program_folder import make_room, note_refusal
from graphopt.runtime.stored.program_key import Key
from graphopt.runtime.stored.stable_form import NoStableFormError, digest
from graphopt.runtime.stored.stored_capture import CaptureNotes, StoredCapture, not_kept, write_capture
from graphopt.runtime.stored.stored_sizes import StoredSizes, write_sizes

__all__ = ["CacheLookup", "refuse"]

logger = logging.getLogger(__name__)
_package = logging.getLogger("graphopt")


@dataclass
class CacheLookup:
    """One question to the cache: what was found, or where to put what is captured instead.

    Attributes:
        key: of the capture; where its sizes vary, of calls of any sizes.
        found: the capture; None where there is none.
        rules: the sizes that it serves.
        why: nothing that is there would do.
    """

    key: Key
    folder: Path
    found: Rewritten | None = None
    rules: SizeRules = field(default_factory=SizeRules)
    why: str = ""
    said: list[tuple[str, str]] = field(default_factory=list)
    _talked: bool = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Around a capture: what it warns of is kept with it, and said again where it is read.

        One for which ranks had to tell each other something is not kept: a rank that read it would not take part.
        """
        handler, before = WarningsKept(self.said), times_talked()
        _package.addHandler(handler)
        try:
            yield
        finally:
            _package.removeHandler(handler)
            self._talked = times_talked() > before

    def keep(self, rewritten: Rewritten, rules: SizeRules) -> None:
        """Write a capture, and let its variants be written when they are made; says why not at DEBUG.

        Args:
            rewritten: the capture.
            rules: the sizes that it serves.
        """
        reason = not_kept(rewritten) or _not_replayed(rewritten)
        if rewritten.session.sizes_vary and not rules:
            reason = reason or "its sizes were to vary, and tracing has fixed all of them"
        if self._talked:
            reason = reason or "ranks told each other something while it was made, which all of them have to do"
        if not reason:
            try:
                sizes = write_sizes(rules, rewritten.program.context)
                files = FolderFiles(self.folder / _entry_name(self.key, sizes))
                write_capture(files, self.key, rewritten, CaptureNotes(sizes, self.said, self.why))
                context = rewritten.program.context
                own = (
                    StoredSizes(rules.inputs, context.sizes.planned, context.sizes.largest)
                    if rules and rules.inputs
                    else None
                )
                rewritten.entry = StoredCapture(files, rewritten.session, context, own)
                make_room(self.folder)
                return
            except (OSError, GraphoptError, NoStableFormError) as error:
                reason = str(error)
        refuse(self.folder, self.key.title, reason)


def _entry_name(key: Key, sizes: dict[str, Any] | None) -> str:
    """The folder of a capture; where sizes vary there are several of one key, of which the first letters differ."""
    return key.name if sizes is None else f"{digest([key.name, sizes])[:16]}-{key.name}"


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
