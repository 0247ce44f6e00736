"""Captures together in one file, to be used on another machine: what is in it, and which of them a call takes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphopt.errors import GraphoptError
from graphopt.ir.files.checked_json import Field
from graphopt.runtime.stored.checked_file import read_checked
from graphopt.runtime.stored.program_files import HEADER, ShippedFiles
from graphopt.runtime.stored.program_key import MACHINE, Key, Sections, differences, read_sections

__all__ = ["KIND", "Shipped", "read_shipped"]

KIND = "graphopt step"

_LARGEST_COMPILED = 1024**3
_ELSEWHERE = (MACHINE,)
"""Sections that are as they are on another machine."""


@dataclass
class Shipped:
    """The captures of one file.

    Attributes:
        source: the file.
        pipeline: the passes, as text.
        backend: that makes the code.
        verify: how far passes were checked.
        captures: each by its key.
        compiled: what a compiler made, in a format of torch's own; empty for nothing.
        has_served: whether one of them has served a call.
    """

    source: str
    pipeline: str
    backend: str
    verify: str
    captures: list[tuple[Sections, ShippedFiles]]
    compiled: bytes = b""
    has_served: bool = False

    def check(self, key: Key) -> None:
        """Compare what is known before the first call: versions, passes, model, loss and optimizer.

        Raises:
            GraphoptError: saying what differs from the capture that is nearest.
        """
        found = [differences(_without_call(key.sections), _without_call(sections)) for sections, _ in self.captures]
        if found and all(found):
            raise self._differs(key.title, min(found, key=len))

    def of(self, key: Key) -> list[ShippedFiles]:
        """The captures of a key; made on another machine as well."""
        return [files for sections, files in self.captures if not differences(_here(key.sections), _here(sections))]

    def differs(self, keys: Sequence[Key]) -> GraphoptError:
        """The error that no capture is for a call, saying how it differs from the one that is nearest.

        Args:
            keys: of the call, and of such calls of any sizes.
        """
        found = [differences(_here(key.sections), _here(part)) for key in keys for part, _ in self.captures]
        nearest = min(found, key=len) or ["call: its sizes are none of those that the captures serve"]
        return self._differs(keys[0].title, nearest)

    def _differs(self, title: str, lines: list[str]) -> GraphoptError:
        return GraphoptError(
            f"{self.source} was saved for something else than this {title}: {'; '.join(lines)}\n  what to do: make the "
            "step with graphopt.optimize_step, which captures, and save it again"
        )


def _here(sections: Sections) -> Sections:
    return {name: part for name, part in sections.items() if name not in _ELSEWHERE}


def _without_call(sections: Sections) -> Sections:
    return {name: part for name, part in sections.items() if name not in (*_ELSEWHERE, "call", "code", "settings")}


def read_shipped(path: Path) -> Shipped:
    """What is in a file.

    Raises:
        GraphoptError: where it is no file of ``TrainStep.save``, or is not whole.
    """
    data = read_checked(path)
    parts = data.parts(("kind", "pipeline", "backend", "verify", "captures", "compiled"))
    parts["kind"].one_of({KIND: KIND})
    captures: list[tuple[Sections, ShippedFiles]] = []
    for item in parts["captures"].items(most=1_000):
        files: dict[str, Field] = dict(item.entries(most=1_000))
        if HEADER not in files:
            raise item.error(f"{HEADER!r} is missing")
        captures.append((read_sections(files[HEADER]["key"]), ShippedFiles(str(path), files)))
    if not captures:
        raise parts["captures"].expected("at least one capture")
    try:
        compiled = base64.b64decode(parts["compiled"].text(longest=_LARGEST_COMPILED), validate=True)
    except (binascii.Error, ValueError) as error:
        raise parts["compiled"].error(f"no base64: {error}") from error
    backend = parts["backend"].one_of({name: name for name in ("eager", "inductor", "callable")})
    verify = parts["verify"].one_of({name: name for name in ("structure", "True", "False")})
    return Shipped(str(path), parts["pipeline"].text(longest=100_000), backend, verify, captures, compiled)
