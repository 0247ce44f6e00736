"""What translations of other configurations have in common: fields that are known, what becomes of each, the result.

A section has a table of the fields that may stand in it. A field that is given either becomes a pass or an option
(``Section.use``), or is named with the reason (``note``, ``warn``). ``Section.settle`` names those that are left, so
that none is dropped without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from graphopt.errors import GraphoptError, PipelineError, did_you_mean, wrong_argument
from graphopt.ir.files.checked_json import Field
from graphopt.rewriting.pass_ import Pass
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.registry import find_pass

__all__ = [
    "Findings",
    "Known",
    "Section",
    "Translation",
    "anything",
    "make",
    "mapping",
    "number",
    "number_of_ranks",
    "text",
    "texts",
    "truth",
    "whole",
    "wholes",
    "word",
]

logger = logging.getLogger(__name__)


class Translation(list[Pass]):
    """The passes that a configuration asks for, with what else it says.

    A list: it is given as ``passes=`` as it is.

    Attributes:
        accumulate: batches whose gradients make one update, for ``TrainStep.accumulate``; 1 where nothing is said.
        notes: a sentence on each field that did not become a pass or one of its options, beginning with its path.

    Example:
        >>> config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
        >>> found = graphopt.configs.from_deepspeed(config)
        >>> found
        [ClipGradients(max_norm=1.0, max_value=None, norm_type=2.0, keep_norm=False)]
        >>> step = graphopt.optimize_step(model, optimizer, found, loss=loss).accumulate(found.accumulate)
        >>> print(found.notes[-1])
        gradient_accumulation_steps is not honoured by passes: call step.accumulate(2)
    """

    def __init__(self, passes: Iterable[Pass] = (), *, accumulate: int = 1, notes: Iterable[str] = ()) -> None:
        super().__init__(passes)
        self.accumulate = accumulate
        self.notes = tuple(notes)


# --- reading ---------------------------------------------------------------------------------------------------------


def truth(found: Field) -> bool:
    """True or false."""
    return found.truth()


def number(smallest: float = float("-inf")) -> Callable[[Field], float]:
    """A finite number that is not too small."""

    def read(found: Field) -> float:
        value = found.number()
        if value < smallest:
            raise found.expected(f"a number of at least {smallest:g}")
        return value

    return read


def whole(smallest: int = 0) -> Callable[[Field], int]:
    """A whole number that is not too small, also written as ``5e8``."""

    def read(found: Field) -> int:
        value = found.value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise found.expected(f"a whole number of at least {smallest}")
        return value

    return read


def text(found: Field) -> str:
    """Text."""
    return found.text()


def word(*known: str) -> Callable[[Field], str]:
    """One of some words, in any case."""

    def read(found: Field) -> str:
        lowered = Field(found.value.lower(), found.path) if isinstance(found.value, str) else found
        return lowered.one_of({name.lower(): name for name in known})

    return read


def texts(found: Field) -> list[str]:
    """A list of texts."""
    return [item.text() for item in found.items()]


def wholes(smallest: int) -> Callable[[Field], list[int]]:
    """A list of whole numbers that are not too small."""
    return lambda found: [whole(smallest)(item) for item in found.items()]


def mapping(found: Field) -> Mapping[str, Any]:
    """An object, whatever is in it."""
    return {name: item.value for name, item in found.entries()}


def anything(found: Field) -> Any:
    """A value that is only named, and not read."""
    return found.value


# --- what becomes of fields ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Known:
    """A field that a section may have.

    Attributes:
        read: what is expected there.
        default: its value where it is left out.
        why: the reason where nothing comes of it; empty where the translation itself says what becomes of it.
    """

    read: Callable[[Field], Any]
    default: Any = None
    why: str = ""


@dataclass
class Findings:
    """What a translation has come to so far: problems, and sentences on fields."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        """Say what a user may want to know."""
        self.notes.append(sentence)

    def warn(self, sentence: str) -> None:
        """Say what is not done, or not as it is asked for."""
        self.notes.append(sentence)
        self.warnings.append(sentence)

    def finish(self, title: str, passes: list[Pass], accumulate: int) -> Translation:
        """The result; its warnings go to the logger ``graphopt``.

        Raises:
            GraphoptError: with all problems at once.
        """
        if not self.problems:
            try:
                Pipeline(passes)
            except PipelineError as error:
                self.problems += str(error).splitlines()
        if self.problems:
            raise GraphoptError("\n  ".join([f"{title} is not right:", *self.problems]))
        for sentence in self.notes:
            logger.log(logging.WARNING if sentence in self.warnings else logging.INFO, "%s", sentence)
        return Translation(passes, accumulate=accumulate, notes=self.notes)


class Section:
    """The fields of one section, of which each is used or named.

    Args:
        found: the section; an object, or what stands in its place, which is a problem.
        known: the fields that it may have.
        findings: take problems and sentences.
        auto: whether ``"auto"`` may stand for a value that another program fills in.
    """

    def __init__(self, found: Field, known: Mapping[str, Known], findings: Findings, *, auto: bool = False) -> None:
        self._path = found.path
        self._known = known
        self._findings = findings
        self._values: dict[str, Any] = {}
        self._done: set[str] = set()
        try:
            entries = dict(found.entries())
        except GraphoptError as error:
            findings.problems.append(str(error))
            return
        for name, value in entries.items():
            self._read(name, value, auto)

    def _read(self, name: str, value: Field, auto: bool) -> None:
        if name not in self._known:
            hint = did_you_mean(name[:100], self._known, 3) or f"the fields here are {', '.join(self._known)}"
            self._findings.problems.append(f"{value.path}: there is no such field; {hint}")
        elif auto and value.value == "auto":
            self._findings.warn(
                f"{self._label(name)} is not honoured: 'auto' is for the program that fills it in, such as a Trainer; "
                "write the value"
            )
        elif value.value is None and self._known[name].default is None:
            self._findings.note(f"{self._label(name)} is null, as if it were left out")
        else:
            try:
                self._values[name] = self._known[name].read(value)
            except GraphoptError as error:
                self._findings.problems.append(str(error))

    def __getitem__(self, name: str) -> Any:
        """The value of a field, or its default."""
        return self._values.get(name, self._known[name].default)

    def __contains__(self, name: str) -> bool:
        """Whether a field is given, with a value."""
        return name in self._values

    def _label(self, name: str) -> str:
        """A field by its path in the document."""
        return f"{self._path}.{name}".removeprefix("$.")

    def field(self, name: str) -> Field:
        """A field that is a section of its own; an empty one where it is not given."""
        if not self._values.get(name, True):
            self.note(name, "is empty")
        self._done.add(name)
        return Field(dict(self._values.get(name, {})), f"{self._path}.{name}")

    def use(self, name: str) -> Any:
        """The value of a field that becomes a pass or an option."""
        self._done.add(name)
        return self[name]

    def note(self, name: str, sentence: str) -> None:
        """Say of a field, where it is given, how it is taken: the sentence follows its path."""
        if name in self and name not in self._done:
            self._findings.note(f"{self._label(name)} {sentence}")
        self._done.add(name)

    def warn(self, name: str, why: str) -> None:
        """Say of a field, where it is given, why it is not honoured."""
        if name in self and name not in self._done:
            self._findings.warn(f"{self._label(name)} is not honoured: {why}")
        self._done.add(name)

    def problem(self, name: str, what: str) -> None:
        """Refuse the value of a field."""
        self._findings.problems.append(f"{self._path}.{name}: {what}")

    def settle(self, off: str = "") -> None:
        """Name every field that is given and was neither used nor named yet.

        Args:
            off: why nothing of the section is read, where that is so.
        """
        for name, value in self._values.items():
            if name in self._done:
                continue
            known = self._known[name]
            if off:
                self.warn(name, off)
            elif isinstance(value, Mapping) and _is_off(value):
                self.note(name, "is off, and so it is here" if value else "is empty")
            elif value == known.default:
                self.note(name, "is off, and so it is here" if value is False else "asks for what is so anyway")
            else:
                self.warn(name, known.why or "there is nothing here that does it")


def _is_off(section: Mapping[str, Any]) -> bool:
    """Whether a section that is not read is empty, or says itself that it is off."""
    return not section or section.get("enabled") is False


# --- making passes ---------------------------------------------------------------------------------------------------


def make(name: str, **options: Any) -> Pass:
    """The pass of a name."""
    return find_pass(name)(**options)


def number_of_ranks(ranks: int | None) -> int | None:
    """How many ranks train: as given, or as the process group says; None where there is neither.

    Raises:
        ArgumentError: for what is no number of ranks.
    """
    if ranks is not None:
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise wrong_argument("ranks", ranks, "a number of ranks of at least 1, or None")
        return ranks
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
