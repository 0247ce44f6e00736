"""A nested state as text and tensors: what is written to a file holds no Python object, and nothing is executed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphopt.errors import GraphoptError
from graphopt.ir.files.checked_json import Field

__all__ = ["Packed", "pack", "unpack"]

_PLAIN = (str, int, float, bool, type(None))
_DEEPEST = 50


@dataclass(frozen=True, slots=True)
class Packed:
    """A state that is taken apart.

    Attributes:
        structure: all but the tensors, as JSON; has the digest of each tensor, so that a damaged one is noticed.
        tensors: by path, as they are in the state.
        digests: of what is in each tensor, by path.
    """

    structure: str
    tensors: dict[str, torch.Tensor]
    digests: dict[str, str]


def pack(state: Any, *, digests: bool = True) -> Packed:
    """The structure of a state, and its tensors by path.

    Args:
        state: mappings, lists and tuples of tensors, texts, numbers, truth values and None.
        digests: of the tensors, which takes reading them.

    Raises:
        GraphoptError: for anything else in it, naming the place.
    """
    packed = Packed("", {}, {})
    structure = _packed(state, "", packed, 0, _digest if digests else _no_digest)
    return replace(packed, structure=json.dumps(structure))


def _packed(value: Any, path: str, packed: Packed, depth: int, digest: Callable[[torch.Tensor], str]) -> Any:
    if depth > _DEEPEST:
        raise GraphoptError(f"the state is nested more than {_DEEPEST} levels deep, at {path[:200]}")
    if isinstance(value, torch.Tensor):
        return _packed_tensor(value, path, packed, digest)
    if isinstance(value, float):  # of numpy too
        return {"value": float(value)}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int)) or isinstance(key, bool):
                raise GraphoptError(f"a checkpoint cannot hold the key {key!r:.80} at {path or 'the top'}: use text")
        entries = [[key, _packed(item, f"{path}/{key}", packed, depth + 1, digest)] for key, item in value.items()]
        return {"counter" if isinstance(value, Counter) else "mapping": entries}
    if type(value) in (list, tuple):
        items = [_packed(item, f"{path}/{index}", packed, depth + 1, digest) for index, item in enumerate(value)]
        return {type(value).__name__: items}
    if type(value) in _PLAIN:
        return {"value": value}
    raise GraphoptError(
        f"a checkpoint cannot hold the {type(value).__name__} at {path or 'the top'}: it takes tensors, texts, "
        "numbers, truth values, None, and mappings, lists and tuples of them"
    )


def _packed_tensor(
    value: torch.Tensor, path: str, packed: Packed, digest: Callable[[torch.Tensor], str]
) -> dict[str, Any]:
    if value.layout is not torch.strided or type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise GraphoptError(f"a checkpoint cannot hold the {type(value).__name__} ({value.layout}) at {path}")
    if path in packed.tensors:
        raise GraphoptError(f"two tensors of the state would both be called {path!r}: use other keys")
    packed.tensors[path] = value.detach()
    packed.digests[path] = digest(value.detach())
    return {"tensor": path, "stride": list(value.stride()), "digest": packed.digests[path]}


def _digest(tensor: torch.Tensor) -> str:
    """Of dtype, shape and bits."""
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _no_digest(tensor: torch.Tensor) -> str:
    """What stands for the digest of a tensor that is not looked at."""
    del tensor
    return ""


def unpack(structure: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that ``pack`` took apart.

    Raises:
        GraphoptError: where the text is not of this form, or a tensor is missing.
    """
    try:
        return _unpacked(Field(json.loads(structure)), tensors)
    except (ValueError, RecursionError) as error:
        raise GraphoptError(f"the structure of the state cannot be read: {error}") from None


def _unpacked(found: Field, tensors: Mapping[str, torch.Tensor]) -> Any:
    if "tensor" in found:
        path = found["tensor"].text()
        if path not in tensors:
            raise found.error(f"the tensor {path!r} is missing")
        digest = found["digest"].text()
        if digest and digest != _digest(tensors[path]):
            raise found.error(f"the tensor {path!r} is damaged: it is not what was saved")
        return _with_strides(tensors[path], found)
    name, value = found.only_entry()
    if name == "value":
        return value.value
    if name in ("mapping", "counter"):
        pairs = [list(pair.items()) for pair in value.items()]
        entries = {key.value: _unpacked(item, tensors) for key, item in pairs}
        return entries if name == "mapping" else Counter(entries)
    if name in ("list", "tuple"):
        items = [_unpacked(item, tensors) for item in value.items()]
        return items if name == "list" else tuple(items)
    raise found.error(f"{name!r} means nothing here")


def _with_strides(tensor: torch.Tensor, found: Field) -> torch.Tensor:
    """The tensor as it lay in memory: optimizers keep their state as their parameters are laid out."""
    strides = tuple(item.whole(0) for item in found["stride"].items())
    if len(strides) != tensor.dim() or strides == tensor.stride():
        return tensor
    size = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, strides, strict=True))
    if size != tensor.numel():  # a part of a larger tensor, or an expanded one
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
