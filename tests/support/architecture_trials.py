"""One model of transformers or timm trained in eager mode and with each pass: same bits, and the peak foretold."""

from __future__ import annotations

import copy
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import nn

import graphopt
from graphopt import Pass, Program
from graphopt.ir.node import value_of
from graphopt.passes import FitMemory, MixedPrecision, Offload, Recompute
from tests.support.bits import first_difference
from tests.support.other_architectures import IMAGES, SERIES, SOUND
from tests.support.text_architectures import TEXT
from tests.support.tiny_models import Batch
from tests.support.training import Training, train
from tests.support.zoo import own_loss

__all__ = ["ARCHITECTURES", "Verdict", "passes_in_turn", "try_architecture"]

ARCHITECTURES = {architecture.name: architecture for architecture in (*TEXT, *IMAGES, *SOUND, *SERIES)}

STEPS = 3
SHARES = (0.6, 0.8, 0.95)
"""What a budget leaves of the bytes above those that are resident; the first of these that can be met is taken."""

adamw = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)

PASSES: dict[str, Callable[[], list[Pass]]] = {
    "none": list,
    "recompute": lambda: [Recompute("auto")],
    "fit": list,  # needs the peak of the program without a pass
    "offload": lambda: [Offload(tier="disk", min_bytes=1)],
    "mixed": lambda: [MixedPrecision()],
}


def passes_in_turn(place: int) -> list[str]:
    """What one of many architectures is trained under: no pass, and a budget or one of the others, by its place."""
    others = ["fit", "recompute", "fit", "offload", "fit", "mixed"]
    return ["none", others[place // 2 % len(others)]]  # at every other place the way to train is another one


@dataclass(frozen=True)
class Verdict:
    """What came of one pass in one way.

    Attributes:
        passes: a key of ``PASSES``.
        way: ``drop-in`` or ``whole step``.
        kind: ``equal``, ``refused``, ``different`` or ``crash``; or ``eager fails``, under autocast.
        detail: the message, or the first difference.
        predicted: bytes at the peak above persistent memory.
        measured: the same, in the loop that takes most.
        spare: bytes of gradients that the program takes and the loss may not give: what is less then is not foretold.
        changed: whether the pass did something.
        parts: the programs of a model that is captured in parts; 1 for one that is captured whole.
        seconds: for everything.
    """

    passes: str
    way: str
    kind: str
    detail: str = ""
    predicted: int = 0
    measured: int = 0
    spare: int = 0
    changed: bool = False
    parts: int = 1
    seconds: float = 0.0

    @property
    def foretold(self) -> bool:
        """Whether the measured peak is within 0.1 % or 4 kB of the predicted one; of a model in parts none is said."""
        near = max(4000, self.measured / 1000)
        return self.parts > 1 or self.predicted - self.spare - near <= self.measured <= self.predicted + near


def try_architecture(name: str, ways: Sequence[str], passes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What comes of passes in each way: verdicts as dictionaries. The names of timm's models begin with ``timm:``."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial = _Trial(name)
        for way in ways:
            for one in passes:
                yield asdict(trial.verdict(one, way))


class _Trial:
    """The model, its batches, and its eager training."""

    def __init__(self, name: str) -> None:
        self.model, pair = _architecture(name).build(2)
        self.batches = [(pair[number % 2],) for number in range(STEPS)]
        self.eager = train(copy.deepcopy(self.model), adamw, own_loss, self.batches)
        self.low = self._under_autocast()
        self.plain: dict[str, tuple[Program, ...]] = {}

    def _under_autocast(self) -> Training | str:
        """Eager training under autocast, or why there is none."""
        try:
            return train(copy.deepcopy(self.model), adamw, _low_loss, self.batches)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def verdict(self, passes: str, way: str) -> Verdict:
        begun = time.perf_counter()
        if passes == "mixed" and isinstance(self.low, str):
            return Verdict(passes, way, "eager fails", self.low)
        run = self._drop_in if way == "drop-in" else self._whole_step
        try:
            if passes == "fit":
                found, programs, measured, changed = self._fit(run, way)
            else:
                found, programs, measured, changed = run(PASSES[passes]())
        except graphopt.GraphoptError as error:
            return Verdict(passes, way, "refused", str(error), seconds=time.perf_counter() - begun)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            return Verdict(passes, way, "crash", what, seconds=time.perf_counter() - begun)
        if passes == "none":
            self.plain[way] = programs
        different = self._difference(found, passes, way)
        predicted = programs[0].memory().allocated_peak_bytes if programs else 0
        tangents = [value_of(node) for program in programs for node, _ in program.inputs_of("tangent")]
        spare = sum(value.numel() * value.element_size() for value in tangents)
        kind, seconds = "different" if different else "equal", time.perf_counter() - begun
        return Verdict(passes, way, kind, different, predicted, measured, spare, changed, len(programs), seconds)

    def _fit(self, run: Callable[[list[Pass]], Any], way: str) -> Any:
        if way not in self.plain:
            raise graphopt.GraphoptError("nothing is captured without a pass")
        programs = self.plain[way]
        memory = programs[0].memory()
        resident = memory.peak_bytes - memory.allocated_peak_bytes
        for share in SHARES:
            bytes_left = resident + int(share * memory.allocated_peak_bytes)
            try:
                return run([FitMemory(f"{share:.0%}" if len(programs) > 1 else bytes_left, cost="roofline")])
            except graphopt.GraphoptError as error:
                if "no plan fits" not in str(error) or share == SHARES[-1]:
                    raise
        raise AssertionError

    def _drop_in(self, passes: Sequence[Pass]) -> tuple[Training, tuple[Program, ...], int, bool]:
        model = graphopt.optimize(copy.deepcopy(self.model), passes)
        found = train(model, adamw, own_loss, self.batches)
        (batch,) = self.batches[0]
        measured = max(_peak(model, _drops_outputs, batch), _peak(model, _keeps_outputs, batch))
        return found, model.programs, measured, any(record.changed for record in model.records)

    def _whole_step(self, passes: Sequence[Pass]) -> tuple[Training, tuple[Program, ...], int, bool]:
        model, found = copy.deepcopy(self.model), Training()
        optimizer = adamw(model.parameters())
        step = graphopt.optimize_step(model, optimizer, passes)
        torch.manual_seed(1)
        for number, (batch,) in enumerate(self.batches):
            found.add(f"{number}.loss", step(**copy.deepcopy(batch)))
        found.end(model, optimizer)
        (batch,) = self.batches[0]
        measured = graphopt.measure_peak(lambda: step(**batch)).allocated_peak_bytes
        return found, (step.program,), measured, any(record.changed for record in step.records)

    def _difference(self, found: Training, passes: str, way: str) -> str:
        expected = self.low if passes == "mixed" else self.eager
        assert isinstance(expected, Training)
        hidden = ".gradient" if way == "whole step" else "\n"
        names = [name for name in expected.tensors if hidden not in name]
        theirs = {name: _as_found(expected.tensors[name], name) for name in names}
        mine = {name: _as_found(value, name) for name, value in found.tensors.items() if hidden not in name}
        return first_difference(mine, theirs)


def _architecture(name: str) -> Any:
    if not name.startswith("timm:"):
        return ARCHITECTURES[name]
    from tests.support.timm_architectures import TIMM  # which is installed where the sweep over them runs only

    return TIMM[name.removeprefix("timm:")]


def _as_found(value: torch.Tensor, name: str) -> torch.Tensor:
    """A loss in float32: under autocast it may be in a lower precision, which a program casts back."""
    return value.float() if name.endswith(".loss") else value


def _low_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return own_loss(model, batch)


def _drops_outputs(model: nn.Module, batch: Batch) -> Any:
    own_loss(model, batch).backward()


def _keeps_outputs(model: nn.Module, batch: Batch) -> Any:
    outputs = model(**batch)
    outputs.loss.backward()
    return outputs


def _peak(model: nn.Module, loop: Callable[[nn.Module, Batch], Any], batch: Batch) -> int:
    """The bytes that forward and backward add at their peak, with gradients that are made anew."""
    model.zero_grad()
    return graphopt.measure_peak(lambda: loop(model, batch)).allocated_peak_bytes
