"""`advise`: the passes for a model on a machine, chosen among all by what is predicted of each."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from graphopt import _torch
from graphopt.analysis.costs.cost import check_cost
from graphopt.analysis.costs.profiles import DeviceProfile, device_profile
from graphopt.capture.devices.for_device import without_data_for
from graphopt.capture.effects.side_effects import CAPTURE_LOCK
from graphopt.errors import ArgumentError, GraphoptError, check_type, did_you_mean, public, whole_number
from graphopt.ir.context import Context
from graphopt.ir.host import local_ranks
from graphopt.ir.node import Stage
from graphopt.ir.words.written_units import format_bytes, parse_bytes
from graphopt.rewriting.distributed.prediction.advice import CLOSE
from graphopt.rewriting.distributed.prediction.link import parse_bandwidth
from graphopt.rewriting.memory.fit.budget import BudgetError
from graphopt.rewriting.memory.free_memory import free_bytes
from graphopt.rewriting.pass_ import Numerics
from graphopt.rewriting.progress import working
from graphopt.runtime.advice.candidate_pipelines import Candidate, candidates, with_less_memory, within_budget
from graphopt.runtime.advice.evaluation import Evaluated, Evaluator, SharedCapture
from graphopt.runtime.advice.recommendation import Advice

__all__ = ["Machine", "advise", "advise_session", "memory_left"]

_MOST_DEVICES = 4096
"""Where the search for a number of devices that can hold a model ends."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is trained on.

    Attributes:
        devices: how many.
        profile: of each, with the links between them; None for the one that is here.
        budget: bytes of each that the program may take.
        cost: where seconds come from.
    """

    devices: int
    profile: DeviceProfile | None
    budget: int
    cost: str = "measured"

    @classmethod
    def of(
        cls, devices: int, profile: DeviceProfile | None, memory: int | None, model: nn.Module, cost: str = "measured"
    ) -> Machine:
        """Devices with so many bytes each; by default with what they have, or with what is left where the model is.

        Raises:
            ArgumentError: where the driver alone takes more.
        """
        if profile is None:
            return cls(devices, None, memory_left(model) if memory is None else memory, cost)
        memory = profile.memory_bytes if memory is None else memory
        if memory <= profile.context_bytes:
            raise ArgumentError(
                f"{format_bytes(memory)} of memory are not enough for the driver of {profile.name}, which takes "
                f"{format_bytes(profile.context_bytes)}"
            )
        return cls(devices, profile, memory - profile.context_bytes, cost)

    @property
    def beside(self) -> int:
        """Bytes of each device's memory that are not the program's."""
        return 0 if self.profile is None else self.profile.context_bytes

    @property
    def hosts(self) -> int:
        """On how many hosts the devices are; 1 where these would not all have as many."""
        per_host = 1 if self.profile is None else self.profile.devices_per_host
        return self.devices // per_host if self.devices % per_host == 0 else 1

    def __str__(self) -> str:
        name = "this device" if self.profile is None else self.profile.name
        return name if self.devices == 1 else f"{self.devices} x {name}"

    @contextlib.contextmanager
    def ranks(self) -> Iterator[None]:
        """While the block runs, this process is one of its ranks: the first, where there are no processes for them.

        Raises:
            ArgumentError: where there are others than these.
        """
        there = dist.get_world_size() if dist.is_available() and dist.is_initialized() else self.devices
        if there != self.devices:
            raise ArgumentError(
                f"{there} ranks have a process group here, and devices={self.devices} are to be planned for: give "
                f"devices={there}, or ask in a process without a group"
            )
        per_host = 1 if self.profile is None else self.profile.devices_per_host
        with _torch.ranks_without_network(self.devices, per_host):
            yield


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
    machine = _machine(model, memory, whole_number("devices", devices, least=1), device, network, cost)
    if example_inputs is not None:
        check_type("advise's example_inputs", example_inputs, tuple, "the batch as a tuple of positional arguments")
    args, kwargs = example_inputs or (), kwargs or {}
    if machine.profile is not None:
        twins = without_data_for(machine.profile, model, optimizer, args, kwargs)
        model, optimizer, args, kwargs = twins.model, twins.optimizer, twins.args, twins.kwargs
    with CAPTURE_LOCK:
        return advise_session(SharedCapture(model, args, kwargs, loss=loss, optimizer=optimizer), machine, numerics)


def memory_left(model: nn.Module) -> int:
    """The bytes that a program may take on the device of a model: what the model holds, and 95 % of what is free.

    On a CPU each rank has its part of that.
    """
    held = [*model.parameters(), *model.buffers()]
    device = held[0].device if held else torch.device("cpu")
    sharing = local_ranks() if device.type == "cpu" else 1
    return sum(tensor.numel() * tensor.element_size() for tensor in held) + int(0.95 * free_bytes(device) / sharing)


def _machine(
    model: nn.Module, memory: int | str | None, devices: int, device: Any, network: str | None, cost: str
) -> Machine:
    profile = None if device is None else device_profile(device)
    check_cost(cost)
    if profile is not None and cost != "measured":
        raise ArgumentError(f"cost={cost!r} is for the device that is here, and device= names another one: give one")
    if profile is None and devices > 1:
        raise ArgumentError(
            f"devices={devices} needs device=, whose seconds and links are planned with: device='h100-80gb'"
        )
    if network is not None:
        if profile is None:
            raise ArgumentError(f"network={network!r} joins devices: give device= and devices= too")
        profile = replace(profile, network_bandwidth=parse_bandwidth(network))
    try:
        given = parse_bytes(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise ArgumentError(f"memory={memory!r}: {error}") from None
    return Machine.of(devices, profile, None if given is None else int(given), model, cost)


def advise_session(
    session: SharedCapture,
    machine: Machine,
    numerics: Numerics,
    agreed: Callable[[Evaluated], Evaluated] = lambda found: found,
) -> Advice:
    """The same for a capture.

    Args:
        session: of the model, for the machine.
        machine: what it is for.
        numerics: as ``advise`` takes it.
        agreed: gives what counts of a prediction, where several processes predict the same.
    """
    stage: Stage = "joint" if session.optimizer is None else "step"
    evaluate = Evaluator(session, stage, Context(device=machine.profile), machine.cost, machine.devices, machine.budget)
    with machine.ranks(), working(f"choosing passes for {session.title}"):
        search = _Search(evaluate, numerics, agreed)
        search.run(
            candidates(
                machine.devices,
                machine.hosts,
                numerics,
                "" if session.optimizer is None else type(session.optimizer).__name__,
            )
        )
    fitting = [one for one in search.found if one.fits]
    if not fitting:
        raise _nothing_fits(search.found, evaluate, machine)
    return Advice(_chosen(fitting), _ranked(search.found), machine.budget, machine.beside, str(machine), _UNCONSIDERED)


_ALIKE = 1.01
"""How many times as fast a pipeline has to be for its plan to be looked for."""

_FALLS = 0.98
"""What twice as many devices have to leave of the bytes of one at most, for even more of them to be tried."""

_NEAREST = 2
"""For how many candidates copies to the host are planned, which takes longer."""

_UNCONSIDERED = (
    "other batches than the one that is given, and gradients accumulated over several: see graphopt.largest_batch",
    "compress-activations, compress-gradients and adaptive-local-sgd, whose price in accuracy is to be tried",
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

    def run(self, wanted: list[Candidate]) -> None:
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
