"""Every call into torch's private modules, in one folder, checked against the version that is installed.

The rest of graphopt uses public torch only. What is private here is private because torch offers no public way:
capturing forward and backward as one graph, tracing an optimizer, replaying a random-number generator inside a graph,
and reading the allocator's own events. Each file of the folder is one subject; users of the folder take every name from
here. The first name that is used imports all of them (``every_name.py``), Dynamo and sympy among what comes along;
importing the folder does not, so that nobody waits for them before something is captured.

In reading order: ``every_name``, ``private_names``, ``versions``, ``c10d``,
``distributed_tensors``, ``fully_sharded``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from graphopt._torch.versions import FOLDER as FOLDER

# isort: split
# Torch has these without an import of its own, and other files make tables of them when they are imported.
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.utils import _pytree

from graphopt._torch.c10d import all_reduce as all_reduce
from graphopt._torch.c10d import all_reduce_ as all_reduce_
from graphopt._torch.c10d import broadcast as broadcast
from graphopt._torch.c10d import broadcast_ as broadcast_
from graphopt._torch.c10d import reduce_scatter_tensor as reduce_scatter_tensor
from graphopt._torch.c10d import wait_tensor as wait_tensor
from graphopt._torch.distributed_tensors import is_distributed as is_distributed
from graphopt._torch.private_names import ON_IMPORT, require_all

pytree = _pytree

if TYPE_CHECKING:
    from graphopt._torch.every_name import *
else:

    def __getattr__(name: str) -> object:
        """A name of the folder; the first one checks that torch has what programs need, and imports all of them."""
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        require_all(ON_IMPORT)
        found = vars(importlib.import_module(f"{__name__}.every_name"))
        globals().update({each: found[each] for each in found["__all__"]})
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        return globals()[name]
