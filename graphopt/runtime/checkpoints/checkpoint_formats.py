"""Two ways to write a checkpoint: by ``torch.distributed.checkpoint``, and one file of ``torch.save`` for each rank.

With the first, what is equal on all ranks to the last bit is stored once, under ``shared/``, and what differs under the
name of its rank. Equality is compared, not assumed.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from graphopt.errors import GraphoptError, quoted
from graphopt.ir.ops.communication.groups import alone, talking
from graphopt.runtime.state.packed_state import Packed, unpack
from graphopt.runtime.state.state_dict import place

__all__ = ["read_states", "write_by_dcp", "write_by_torch"]

_METADATA = ".metadata"
_STRUCTURE = "structure"


# --- writing ---------------------------------------------------------------------------------------------------------


def write_by_torch(folder: Path, state: Packed) -> None:
    """Write this rank's state to a file of its own."""
    rank, ranks = place()
    tensors = {path: _whole(tensor) for path, tensor in state.tensors.items()}
    content = {_STRUCTURE: state.structure, "tensors": tensors}
    with (folder / f"rank{rank}of{ranks}.pt").open("wb") as file:
        torch.save(content, file)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the rest of its storage, which ``torch.save`` would write too."""
    storage = tensor.untyped_storage()
    return tensor if storage.nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()


def write_by_dcp(folder: Path, state: Packed) -> None:
    """Write all ranks' states to one checkpoint of ``torch.distributed.checkpoint``."""
    rank, ranks = place()
    shared = _equal_everywhere(state.digests, ranks)
    whose = f"rank{rank}of{ranks}"
    named = {f"{'shared' if path in shared else whose}{path}": tensor for path, tensor in state.tensors.items()}
    named[f"{whose}/{_STRUCTURE}"] = torch.frombuffer(bytearray(state.structure, "utf-8"), dtype=torch.uint8)
    try:
        with warnings.catch_warnings(), talking():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save_by_dcp(named, storage_writer=_Writer(folder), no_dist=ranks == 1)
    except CheckpointException as error:
        raise RuntimeError("; ".join(f"rank {of}: {what[0]}" for of, what in error.failures.items())) from None


def _equal_everywhere(digests: Mapping[str, str], ranks: int) -> set[str]:
    """The tensors that are the same on all ranks to the last bit."""
    if ranks == 1:
        return set(digests)
    found: list[dict[str, str]] = [{}] * ranks
    with talking():
        dist.all_gather_object(found, dict(digests))
    return {path for path, digest in digests.items() if all(other.get(path) == digest for other in found)}


# --- reading ---------------------------------------------------------------------------------------------------------


def read_states(folder: Path, *, ranks: int, rank: int) -> list[Any]:
    """The states in a checkpoint: this rank's alone where as many ranks saved it, else those of all ranks in order.

    Args:
        folder: one checkpoint.
        ranks: how many there are now.
        rank: of this process.

    Raises:
        GraphoptError: for what is no checkpoint, and for one that is damaged.
    """
    by_dcp = (folder / _METADATA).is_file()
    try:
        return _read_by_dcp(folder, ranks, rank) if by_dcp else _read_by_torch(folder, ranks, rank)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, AttributeError, ValueError) as error:
        raise GraphoptError(f"the checkpoint {str(folder)!r} cannot be read: {quoted(error)}") from error
    except CheckpointException as error:
        raise GraphoptError(f"the checkpoint {str(folder)!r} cannot be read: {error}") from None


def _read_by_torch(folder: Path, ranks: int, rank: int) -> list[Any]:
    files = sorted(folder.glob("rank*of*.pt"))
    names = {file.name for file in files}
    saved = next((count for count in range(1, len(files) + 1) if f"rank0of{count}.pt" in names), 0)
    if not saved or any(f"rank{of}of{saved}.pt" not in names for of in range(saved)):
        raise GraphoptError(f"there is no checkpoint in {str(folder)!r}, or the file of a rank is missing")
    wanted = [rank] if saved == ranks else range(saved)
    states = []
    for of in wanted:
        found = torch.load(folder / f"rank{of}of{saved}.pt", map_location="cpu", weights_only=True)
        states.append(unpack(found[_STRUCTURE], found["tensors"]))
    return states


def _read_by_dcp(folder: Path, ranks: int, rank: int) -> list[Any]:
    metadata = _Reader(folder).read_metadata().state_dict_metadata
    owners = {name.partition("/")[0] for name in metadata} - {"shared"}
    saved = len(owners)
    if owners != {f"rank{of}of{saved}" for of in range(saved)}:
        raise GraphoptError(f"{str(folder)!r} is a checkpoint of something else than graphopt.checkpoint.save")
    wanted = [f"rank{of}of{saved}" for of in ([rank] if saved == ranks else range(saved))]
    tensors = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in metadata.items()
        if isinstance(found, TensorStorageMetadata) and name.partition("/")[0] in ("shared", *wanted)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_by_dcp(tensors, storage_reader=_Reader(folder), no_dist=True)
    return [unpack(_structure_of(whose, tensors), _of_rank(whose, tensors)) for whose in wanted]


def _structure_of(whose: str, tensors: Mapping[str, torch.Tensor]) -> str:
    return bytes(tensors[f"{whose}/{_STRUCTURE}"].tolist()).decode("utf-8")


def _of_rank(whose: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One rank's tensors by path, with what all ranks share."""
    found = {name.removeprefix("shared"): tensor for name, tensor in tensors.items() if name.startswith("shared/")}
    own = {name.removeprefix(whose): tensor for name, tensor in tensors.items() if name.startswith(f"{whose}/")}
    return found | own


class _Writer(FileSystemWriter):
    """Writes files while the other ranks may wait for this one, and not it for them."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with alone():
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with alone():
            super().finish(metadata, results)


class _Reader(FileSystemReader):
    """Reads torch's description of a checkpoint, which is a pickle, without letting it make or call anything else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See the base class."""
        with (Path(self.path) / _METADATA).open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"its metadata is a {type(found).__name__}")
        return found


class _Unpickler(pickle.Unpickler):
    """Knows the classes that describe a checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of a name, where it is one of those."""
        described = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        if described and name in _DESCRIPTIONS:
            return super().find_class(module, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its metadata asks for {module}.{name}")


_PLAIN = (("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"))
_DESCRIPTIONS = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
    "_StorageInfo",
)
