"""Checkpoints of training: model, optimizer, what passes hold, generators; of one rank or of many.

>>> graphopt.checkpoint.save("run", {"step": step, "scheduler": scheduler, "epoch": epoch})
>>> epoch = graphopt.checkpoint.load("run", {"step": step, "scheduler": scheduler})["epoch"]
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from graphopt.errors import GraphoptError, check_type, choice, did_you_mean, whole_number
from graphopt.rewriting.progress import working
from graphopt.runtime.checkpoints.checkpoint_folder import newest, together, write_checkpoint
from graphopt.runtime.checkpoints.checkpoint_formats import read_states, write_by_dcp, write_by_torch
from graphopt.runtime.checkpoints.step_checkpoint import load_step_state, same_everywhere
from graphopt.runtime.ranks.watch import meeting
from graphopt.runtime.state.lasting_folder import finished_step, is_lasting_folder
from graphopt.runtime.state.packed_state import pack
from graphopt.runtime.state.state_dict import place
from graphopt.runtime.step.step_state import GENERATORS, generator_states, is_step_state
from graphopt.runtime.step.train_step import TrainStep

__all__ = ["load", "save"]

logger = logging.getLogger(__name__)

_WRITERS = {"dcp": write_by_dcp, "torch": write_by_torch}


@runtime_checkable
class _Stateful(Protocol):
    """What has a state: a model, an optimizer, a scheduler, a data loader."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def save(
    folder: str | os.PathLike[str],
    what: TrainStep | Mapping[str, Any],
    *,
    format: Literal["dcp", "torch"] = "dcp",
    keep: int = 2,
) -> Path:
    """Add a checkpoint to a folder; all ranks call it, and all of them are in it.

    A step stands for its model, its optimizer and what its passes hold. The states of torch's random generators are
    saved as well. What differs from rank to rank (shards, residuals, parameters between two averages of local SGD) is
    kept for each rank; what is equal to the last bit is stored once.

    The checkpoint appears under its number when all of it is on the disk: whoever is killed at whatever moment leaves
    the ones before, and ``load`` takes the newest that is whole.

    Args:
        folder: is made where it is not there; on a disk that all ranks see.
        what: a step, or by name: steps, other objects with ``state_dict`` and ``load_state_dict``, and plain values.
        format: ``dcp`` as ``torch.distributed.checkpoint`` writes it, or ``torch`` for a file of ``torch.save`` for
            each rank.
        keep: how many checkpoints stay in the folder.

    Returns:
        the folder of this checkpoint, within ``folder``.

    Raises:
        GraphoptError: on every rank, where one cannot write; and for state that a file cannot hold, naming it.
        RankError: naming the rank that ends, or hangs, before all have written theirs.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> step = graphopt.optimize_step(model, optimizer, [Recompute("blocks.*")], loss=loss)
        >>> value = step(x)
        >>> graphopt.checkpoint.save(folder, {"step": step, "epoch": 1}).name
        'checkpoint-00000001'
        >>> graphopt.checkpoint.load(folder, {"step": step})
        {'epoch': 1}
    """
    write = _WRITERS[choice("format", format, tuple(_WRITERS))]
    keep = whole_number("keep", keep, least=1, of="checkpoints")
    parts, place_of_all = _parts(what, "graphopt.checkpoint.save"), _folder(folder)
    with working(f"saving a checkpoint in {place_of_all}"), meeting("the saving of a checkpoint"):
        state = together(lambda: pack(_state_of_all(parts)), "the checkpoint cannot be made")
        return write_checkpoint(place_of_all, keep, lambda into: write(into, state))


def load(folder: str | os.PathLike[str], what: TrainStep | Mapping[str, Any]) -> dict[str, Any]:
    """Continue from a checkpoint, bit for bit where as many ranks load it as have saved it; all ranks call it.

    With another number of ranks, shards are put together and cut anew, residuals go over as ``graphopt.redistribute``
    says, and what is refused is named: parameters that differ from rank to rank, before ``step.synchronize()``. A step
    may be new, or have run already. Nothing in the files is executed.

    Args:
        folder: what ``save`` got, for its newest checkpoint; or one of the numbered folders within; or the folder of
            ``OffloadState``, for the last step that was finished there.
        what: as for ``save``. Objects are loaded into; a plain value stands for one that is to be there.

    Returns:
        the plain values that were saved.

    Raises:
        GraphoptError: where there is no checkpoint, it cannot be read, it holds other names than are given, or it does
            not fit.
        RankError: naming the rank that ends, or hangs, before all have read theirs.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> step = graphopt.optimize_step(model, optimizer, loss=loss)
        >>> saved = [graphopt.checkpoint.save(folder, step) for _ in range(3)]
        >>> expected = step(x)
        >>> graphopt.checkpoint.load(folder, step)
        {}
        >>> torch.equal(step(x), expected)
        True
    """
    parts, given = _parts(what, "graphopt.checkpoint.load"), _folder(folder)
    with working(f"loading the checkpoint in {given}"):
        if is_lasting_folder(given):
            return _load(parts, [finished_step(given)])
        with meeting("the loading of a checkpoint"):
            found = newest(given)
            states = together(lambda: _read(found), f"{str(found)!r} cannot be loaded")
            return together(lambda: _load(parts, states), f"{str(found)!r} cannot be loaded")


def _read(found: Path) -> list[Any]:
    rank, ranks = place()
    return read_states(found, ranks=ranks, rank=rank)


def _load(parts: Mapping[str, Any], states: Sequence[Any]) -> dict[str, Any]:
    rank, ranks = place()
    _check_names(parts, states[0])
    for name, part in parts.items():
        of_ranks = [state[name] for state in states]
        if isinstance(part, TrainStep):
            load_step_state(part, of_ranks, rank, ranks)
        elif isinstance(part, _Stateful):
            part.load_state_dict(same_everywhere(of_ranks, name))
    _load_generators([state[GENERATORS] for state in states], rank)
    plain = [name for name in states[0] if name != GENERATORS and not isinstance(parts.get(name), _Stateful)]
    return {name: same_everywhere([state[name] for state in states], name) for name in plain}


def _folder(folder: str | os.PathLike[str]) -> Path:
    check_type("folder", folder, (str, os.PathLike), "the path of a folder")
    return Path(folder)


def _parts(what: TrainStep | Mapping[str, Any], called: str) -> Mapping[str, Any]:
    if isinstance(what, TrainStep):
        return _parts({"step": what}, called)
    check_type("what", what, Mapping, "a step, or a mapping of names to what has a state")
    if GENERATORS in what:
        raise GraphoptError(f"{GENERATORS!r} is saved in any case: use another name")
    for part in what.values():
        if isinstance(part, TrainStep):
            part.refuse_in_join(called)
    return what


def _state_of_all(parts: Mapping[str, Any]) -> dict[str, Any]:
    state = {name: _state_of(part) for name, part in parts.items()}
    return {**state, GENERATORS: generator_states()}


def _state_of(part: Any) -> Any:
    if isinstance(part, TrainStep):
        return part.checkpoint_state()
    return part.state_dict() if isinstance(part, _Stateful) else part


def _check_names(parts: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Refuse a checkpoint without something that is to be loaded, and objects that nobody gave a place."""
    saved = [name for name in state if name != GENERATORS]
    for name in parts:
        if name not in state:
            hint = did_you_mean(name, saved) or f"it holds {', '.join(saved) or 'nothing'}"
            raise GraphoptError(f"the checkpoint has no {name!r}; {hint}")
    steps = [name for name in saved if is_step_state(state[name])]
    left = [name for name in steps if not isinstance(parts.get(name), TrainStep)]
    if left:
        raise GraphoptError(
            f"the checkpoint holds the step {left[0]!r}, which is not given: give {{{left[0]!r}: step}}"
        )


def _load_generators(states: Sequence[Mapping[str, torch.Tensor]], rank: int) -> None:
    """Put the generators where they were on this rank.

    Args:
        states: this rank's alone, or those of all ranks of another number.
        rank: of this process.
    """
    if len(states) > 1 and rank >= len(states):
        logger.warning("rank %d has no generators in the checkpoint of %d ranks: its own go on", rank, len(states))
        return
    for device, state in states[rank if len(states) > 1 else 0].items():
        if device == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available() and int(device.partition(":")[2]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)
        else:
            logger.warning("there is no %s here, whose generator is in the checkpoint", device)
