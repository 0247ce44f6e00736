"""How a tensor lies in a storage of its own: what ``prefetch`` is told of what it makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graphopt.errors import GraphoptError

__all__ = ["Layout", "StoredTensor"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in its storage.

    Attributes:
        size: of the tensor.
        stride: in elements.
        storage_offset: where it begins, in elements.
        itemsize: bytes of an element.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    itemsize: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """That of a tensor with data."""
        return Layout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.element_size())


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and its storage, without data.

    Attributes:
        size: of the tensor.
        stride: of the tensor, in elements, as many as sizes.
        storage_offset: where it begins in the storage, in elements.
        storage_size: elements of the whole storage.
        dtype: of the elements.
        device: of the storage.
    """

    size: Sequence[int]
    stride: Sequence[int]
    storage_offset: int
    storage_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.storage_size * self.dtype.itemsize

    def check(self) -> None:
        """Raise ``GraphoptError`` where the tensor does not fit into the storage."""
        if len(self.size) != len(self.stride):
            raise GraphoptError(f"graphopt::prefetch: {len(self.size)} sizes and {len(self.stride)} strides")
        steps = zip(self.size, self.stride, strict=True)
        needed = self.storage_offset + 1 + sum((n - 1) * step for n, step in steps)
        if 0 not in self.size and needed > self.storage_size:
            raise GraphoptError(
                f"graphopt::prefetch: size {list(self.size)}, stride {list(self.stride)} and offset "
                f"{self.storage_offset} reach over {needed} elements, and the storage is to have {self.storage_size}; "
                "pass developer: give the storage size of the tensor that was offloaded"
            )

    def laid_out(self, layout: Layout) -> StoredTensor:
        """The same tensor in another layout, where that is one of its size and within its storage."""
        if tuple(self.size) != layout.size or self.dtype.itemsize != layout.itemsize:
            return self
        other = replace(self, stride=layout.stride, storage_offset=layout.storage_offset)
        steps = zip(layout.size, layout.stride, strict=True)
        needed = layout.storage_offset + 1 + sum((n - 1) * step for n, step in steps)
        return other if needed <= self.storage_size or 0 in layout.size else self

    def allocate(self) -> torch.Tensor:
        """The tensor on a new storage, whose values are undefined."""
        storage = torch.empty(self.storage_size, dtype=self.dtype, device=self.device).untyped_storage()
        # set_ and not as_strided: a view that autograd knows of keeps another tensor alive.
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.storage_offset, self.size, self.stride)
