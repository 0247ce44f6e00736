"""`advise`: the passes for a model on a machine, chosen among all by what is predicted of each."""

from __future__ import annotations

import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from graphopt.analysis.costs.profiles import DeviceProfile
from graphopt.capture.call.batch_rows import Arguments, example_rows, of_rows
from graphopt.capture.devices.for_device import without_data_for
from graphopt.capture.effects.side_effects import CAPTURE_LOCK
from graphopt.errors import ArgumentError, CaptureError, GraphoptError, check_type, did_you_mean, public, whole_number
from graphopt.ir.context import Context
from graphopt.ir.node import Stage
from graphopt.ir.words.written_units import counted, format_bytes, format_seconds
from graphopt.rewriting.distributed.prediction.advice import CLOSE
from graphopt.rewriting.memory.fit.budget import BudgetError
from graphopt.rewriting.pass_ import Numerics
from graphopt.rewriting.progress import working
from graphopt.runtime.advice.candidate_pipelines import Candidate, candidates, with_less_memory, within_budget
from graphopt.runtime.advice.evaluation import Evaluated, Evaluator, SharedCapture
from graphopt.runtime.advice.machine import Machine, machine_of
from graphopt.runtime.advice.recommendation import Advice

__all__ = ["advise", "advise_batch", "advise_capture", "advise_session"]

_MOST_DEVICES = 4096
"""Where the search for a number of devices that can hold a model ends."""


@public
def advise(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    example_inputs: tuple[Any, ...] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    memory: int | str | None = None,
    devices: int = 1,
    device: str | os.PathLike[str] | DeviceProfile | None = None,
    network: str | None = None,
    numerics: Numerics = "bitwise",
    cost: str = "measured",
    global_batch: int | None = None,
) -> Advice:
    """The passes for a model on a machine: what fits, and is predicted to be fastest. The model is not run.

    Every precision and way to exchange gradients that ``numerics`` allows is rewritten and simulated as a program:
    bytes to the last one, seconds of ops, exchanges and copies beside each other. What does not fit gets a plan of
    ``FitMemory``, with what else leaves memory, unless even without it a step would be slower than one that fits.
    Of pipelines within 5 % of the fastest the one that changes results least is taken, with the fewest passes.

    Args:
        model: as for ``graphopt.optimize_step``; it may be without data (``graphopt.without_data()``).
        optimizer: whose update ends the step; None for a drop-in model.
        example_inputs: the batch of one device, as positional arguments.
        kwargs: those by keyword.
        loss: as for ``graphopt.optimize_step``.
        memory: bytes of one device, or text (``"80GB"``); by default those that ``device`` has, or that are left here.
        devices: how many train together.
        device: what they are: a name (``"h100-80gb"``), a profile, or a file with one; None for the device that is
            here, on which calls are timed.
        network: what one device has of the network between hosts, such as ``"400Gbit"``; by default what the device's
            profile says.
        numerics: what passes may do to results: ``"bitwise"``, nothing but exchange gradients between devices;
            ``"tolerant"``, sums in another order; ``"changes"``, 16 bits, and an exchange that leaves something out.
        cost: where seconds come from on the device that is here, as for ``FitMemory``.
        global_batch: the rows of an update on all devices together. With it the rows of a call are chosen too, from
            those that divide what one device has of them: the gradients of several calls are added up where that is
            faster, or where more rows do not fit. The first axes of the example's tensors are its rows. By default a
            call takes the example's rows, and every call updates.

    Returns:
        The advice: ``pipeline``, ``step``, ``runner_up`` and more; ``print`` shows it.

    Raises:
        ArgumentError: for arguments of another form.
        BudgetError: where nothing fits, with the least bytes, or the number of devices, that would do.
        CaptureError: where the model cannot be captured.

    Example:
        >>> advice = graphopt.advise(model, optimizer, (x,), loss=loss, device="a100-80gb")
        >>> advice.pipeline, advice.limit
        ('', 'compute')
    """
    if numerics not in get_args(Numerics):
        raise ArgumentError(f"numerics={numerics!r} is not possible; {did_you_mean(str(numerics), get_args(Numerics))}")
    machine = machine_of(model, memory, whole_number("devices", devices, least=1), device, network, cost)
    if example_inputs is not None:
        check_type("advise's example_inputs", example_inputs, tuple, "the batch as a tuple of positional arguments")
    args, kwargs = example_inputs or (), kwargs or {}
    if machine.profile is not None:
        twins = without_data_for(machine.profile, model, optimizer, args, kwargs)
        model, optimizer, args, kwargs = twins.model, twins.optimizer, twins.args, twins.kwargs

    def captured(batch: Arguments) -> SharedCapture:
        return SharedCapture(model, *batch, loss=loss, optimizer=optimizer)

    with CAPTURE_LOCK:
        return advise_capture(captured, (args, kwargs), machine, numerics, global_batch)


def advise_capture(
    captured: Callable[[Arguments], SharedCapture],
    example: Arguments,
    machine: Machine,
    numerics: Numerics,
    global_batch: int | None = None,
) -> Advice:
    """The same for what captures a model.

    Args:
        captured: gives a capture of the model for the arguments of a call, for the machine.
        example: the arguments.
        machine: what it is for.
        numerics: as ``advise`` takes it.
        global_batch: as ``advise`` takes it.
    """
    if global_batch is None:
        return advise_session(captured(example), machine, numerics)
    rows = whole_number("global_batch", global_batch, least=1, of="rows")
    if rows % machine.devices:
        raise ArgumentError(
            f"global_batch={rows} is not a multiple of devices={machine.devices}, which all take equally many rows"
        )
    return advise_batch(captured, example, machine, numerics, rows // machine.devices)


def advise_batch(
    captured: Callable[[Arguments], SharedCapture],
    example: Arguments,
    machine: Machine,
    numerics: Numerics,
    rows: int,
) -> Advice:
    """The same where an update takes so many rows of each device, in one call or in several.

    All pipelines are weighed for the number of rows that is nearest to the example's, or for the largest smaller one
    with which something fits. From there, more rows are tried as long as an update gets faster, with the pipelines that
    were best.
    """
    given = example_rows(
        example, "global_batch chooses the rows of a call: give an example whose first axes are its rows"
    )
    counts = [count for count in range(1, rows + 1) if rows % count == 0]  # of rows of a call

    def advised(count: int, among: Sequence[Candidate] | None = None) -> Advice:
        session = captured(of_rows(example, count))
        if session.optimizer is None:
            raise ArgumentError("global_batch is of a whole step, whose calls add up gradients: give the optimizer too")
        found = advise_session(session, machine, numerics, calls=rows // count, among=among)
        return replace(found, rows=count, calls=rows // count, unconsidered=_UNCONSIDERED[1:])

    nearest = bisect_right(counts, given) - 1  # 1 is among them
    try:
        best = advised(counts[nearest])
    except BudgetError:
        smaller = counts[:nearest]
        if not smaller:
            raise
        best = _largest_that_fits(advised, smaller)
    weighed = []
    among = list(dict.fromkeys(one.candidate.without_budget for one in best.evaluated if one.fits))[:_NEAREST]
    for count in counts[bisect_left(counts, 2 * best.rows) :]:
        if count < 2 * best.rows:
            continue
        try:
            more = advised(count, among)
        except BudgetError as error:
            weighed.append(f"{count} rows do not fit: at least {format_bytes(error.smallest_bytes)}")
            break
        slower = best if _ALIKE * more.step.seconds < best.step.seconds else more
        weighed.append(f"{counted(slower.rows, 'rows')}: {slower.pipeline or 'no pass'}, {_of_update(slower)}")
        if slower is more:
            break
        best = more
    return replace(best, batches=tuple(weighed))


def _largest_that_fits(advised: Callable[[int], Advice], counts: Sequence[int]) -> Advice:
    """What is best for the largest of some numbers of rows with which something fits; the least is tried first.

    Raises:
        BudgetError: where nothing fits with the least.
        CaptureError: where the model cannot be captured with any of them.
    """
    low, high = 0, len(counts)
    while True:
        try:
            found = advised(counts[low])
            break
        except CaptureError:  # such as that of a norm over one row
            low += 1
            if low == high:
                raise
    while high - low > 1:
        middle = (low + high) // 2
        try:
            found, low = advised(counts[middle]), middle
        except BudgetError:
            high = middle
    return found


def _of_update(advice: Advice) -> str:
    return f"{format_bytes(advice.chosen.taken)}, {format_seconds(advice.step.seconds)} an update"


def advise_session(
    session: SharedCapture,
    machine: Machine,
    numerics: Numerics,
    agreed: Callable[[Evaluated], Evaluated] = lambda found: found,
    calls: int = 1,
    among: Sequence[Candidate] | None = None,
) -> Advice:
    """The same for a capture.

    Args:
        session: of the model, for the machine.
        machine: what it is for.
        numerics: as ``advise`` takes it.
        agreed: gives what counts of a prediction, where several processes predict the same.
        calls: how many calls' gradients are added up for an update.
        among: the pipelines, without budgets, that are weighed; all that are possible by default.
    """
    stage: Stage = "joint" if session.optimizer is None else "step"
    context = Context(device=machine.profile)
    evaluate = Evaluator(session, stage, context, machine.cost, machine.devices, machine.budget, calls)
    optimizer = "" if session.optimizer is None else type(session.optimizer).__name__
    if among is None:
        among = candidates(machine.devices, machine.hosts, numerics, optimizer)
    with machine.ranks(), working(f"choosing passes for {session.title}"):
        search = _Search(evaluate, numerics, agreed)
        search.run(among)
    fitting = [one for one in search.found if one.fits]
    if not fitting:
        raise _nothing_fits(search.found, evaluate, machine)
    return Advice(_chosen(fitting), _ranked(search.found), machine.budget, machine.beside, str(machine), _UNCONSIDERED)


_ALIKE = 1.01
"""How many times as fast a pipeline has to be for its plan to be looked for."""

_FALLS = 0.98
"""What twice as many devices have to leave of the bytes of one at most, for even more of them to be tried."""

_NEAREST = 2
"""For how many candidates copies to the host are planned, which takes longer, and larger batches."""

_UNCONSIDERED = (
    "other batches than the one that is given, and gradients accumulated over several: give global_batch",
    "compress-activations, compress-gradients, float8, adaptive-local-sgd and diloco: try their price in accuracy",
)


@dataclass
class _Search:
    """Looks at candidates, those that may be fastest first.

    Attributes:
        evaluate: predicts one.
        numerics: what passes may do to results.
        agreed: as ``advise_session`` takes it.
        found: what was predicted of each.
    """

    evaluate: Evaluator
    numerics: Numerics
    agreed: Callable[[Evaluated], Evaluated]
    found: list[Evaluated] = field(default_factory=list)

    def run(self, wanted: Sequence[Candidate]) -> None:
        """Look at every candidate as it is, then within the budget at those that may be fastest so.

        Those are candidates that do not fit, and those whose parameters a budget leaves gathered. Nothing is planned
        for one that takes longer in any case than another one that fits. Copies to the host, which take longer to
        plan, are planned for the nearest two.
        """
        looked = [one for one in map(self._look, wanted) if not one.problem]
        large = [one for one in looked if not one.fits or one.candidate.gathers]
        large.sort(key=lambda one: one.least_seconds)
        reached = {one: self._within(one, "recompute") for one in large}
        nearest = sorted((one for one in large if not one.fits), key=lambda one: (reached[one], one.seconds))[:_NEAREST]
        for one in nearest[:1]:
            for variant in with_less_memory(one.candidate, self.numerics):
                if self._may_gain(one) and (less := self._look(variant)).taken < one.taken:
                    self._within(less, "recompute")
        for one in nearest:
            self._within(one, "recompute,offload")
        if self.evaluate.stage == "step" and not any(one.fits for one in self.found):
            for one in nearest:
                self._within(one, "recompute,offload,state")

    def _within(self, plain: Evaluated, allow: str) -> float:
        """Look at a candidate within the budget, where it may gain by that; gives the seconds that it comes to."""
        if plain.problem or not self._may_gain(plain):
            return plain.seconds if plain.fits else math.inf
        found = self._look(within_budget(plain.candidate, self.evaluate.budget, allow, self.evaluate.cost))
        return found.seconds if found.fits else math.inf

    def _may_gain(self, plain: Evaluated) -> bool:
        """Whether a candidate may be faster than what fits, or as fast with less changed."""
        fitting = [one for one in self.found if one.fits]
        alike = min(
            (one.seconds for one in fitting if one.candidate.change <= plain.candidate.change), default=math.inf
        )
        best = min((one.seconds for one in fitting), default=math.inf)
        return _ALIKE * plain.least_seconds < alike and plain.least_seconds <= CLOSE * best

    def _look(self, candidate: Candidate) -> Evaluated:
        with working(f"simulating {candidate}"):
            self.found.append(self.agreed(self.evaluate(candidate)))
        return self.found[-1]


def _chosen(fitting: list[Evaluated]) -> Evaluated:
    """Of those that are hardly slower than the fastest, the one that changes results least, with the fewest passes."""
    fastest = min(one.seconds for one in fitting)
    close = [one for one in fitting if one.seconds <= CLOSE * fastest]
    return min(close, key=lambda one: (one.candidate.change, len(one.candidate.names), one.seconds))


def _ranked(found: list[Evaluated]) -> list[Evaluated]:
    """Those that fit by their seconds, then those that do not by their bytes, then those that are not possible."""
    return sorted(found, key=lambda one: (not one.fits, bool(one.problem), one.seconds if one.fits else one.taken))


def _nothing_fits(found: list[Evaluated], evaluate: Evaluator, machine: Machine) -> GraphoptError:
    """The error: the least bytes that are enough, and how many devices would be."""
    possible = [one for one in found if not one.problem]
    if not possible:
        return GraphoptError("no pipeline is possible: " + "; ".join(sorted({one.problem for one in found})))
    least = min(possible, key=lambda one: one.taken)
    message = (
        f"the least that one of {machine} has to hold is {format_bytes(least.taken)} ({least.candidate}), "
        f"and {format_bytes(machine.budget)} are there"
    )
    enough = _enough_devices(evaluate, machine, least.candidate)
    if enough is not None:
        message += f"\n  what to do: {enough} devices can hold it"
    return BudgetError(message, least.taken, machine.budget)


def _enough_devices(evaluate: Evaluator, machine: Machine, least: Candidate) -> int | None:
    """A number of devices over which parameters and state can be sharded so that it fits; None where none is known."""
    if machine.profile is None or evaluate.stage != "step" or dist.is_initialized():
        return None  # ranks that are here are as many as there are
    precision = Candidate(tuple(text for text in least.passes if text.startswith("mixed-precision")))
    sharded = precision.plus("data-parallel").plus("shard-parameters")
    planned = within_budget(sharded, machine.budget, "recompute", machine.cost)
    devices, taken = machine.devices, math.inf
    while devices < _MOST_DEVICES:
        devices *= 2
        with replace(machine, devices=devices).ranks():
            one = replace(evaluate, ranks=devices)(sharded)
        if one.problem or one.taken > _FALLS * taken:
            return None  # more of them do not help: activations take it
        taken = one.taken
        if one.fits:
            break
    else:
        return None
    fewer = devices // 2
    if fewer > machine.devices:
        with replace(machine, devices=fewer).ranks():
            devices = fewer if replace(evaluate, ranks=fewer)(planned).fits else devices
    return devices
