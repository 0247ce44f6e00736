"""The joint graph that ``torch.compile`` hands to a partitioner, and the two graphs that torch's own code makes of it.

A partitioner is a setting of inductor. Which values are kept is all that differs between one and another: what belongs
to forward and to backward, and how both are written, is torch's own here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import OpOverload

from graphopt._torch.private_names import PARTITIONER, require

__all__ = ["JointSplit", "as_partitioner", "is_free_to_go", "is_fusible"]

_SAVED = "MUST_SAVE"


@dataclass(frozen=True)
class JointSplit:
    """A joint graph on its way into two.

    Attributes:
        joint: the graph.
        outputs: how many of its results are forward's.
        info: what torch knows of its nodes.
    """

    joint: fx.GraphModule
    outputs: int
    info: Any

    @classmethod
    def of(cls, joint: fx.GraphModule, outputs: int, static: Sequence[int] | None) -> JointSplit:
        """Prepare a joint graph as torch's own partitioner does, up to the choice of what is kept.

        Regions of ``torch.utils.checkpoint`` are marked in the graph. The marks go: what is recomputed is chosen
        for all of it.

        Args:
            joint: as a partitioner gets it; it is changed.
            outputs: how many of its results are forward's.
            static: which inputs stay where they are from call to call.
        """
        from torch._functorch import config, partitioners
        from torch._functorch.compile_utils import fx_graph_cse

        joint.graph.eliminate_dead_code()
        if config.cse:
            joint.graph = fx_graph_cse(joint.graph)
        joint.recompile()
        for node in filter(is_free_to_go, joint.graph.nodes):
            node.meta.pop("recompute", None)
        if not config.unsafe_allow_optimization_of_collectives:
            partitioners.force_save_collectives(joint)
        partitioners.force_save_effectful_ops(joint)
        partitioners.force_save_bw_mutation_src(joint)
        return cls(joint, outputs, partitioners.classify_nodes(joint, list(static or ()), outputs))

    @staticmethod
    def marked(joint: fx.GraphModule) -> bool:
        """Whether a graph has regions of ``torch.utils.checkpoint``."""
        return any("recompute" in node.meta and is_free_to_go(node) for node in joint.graph.nodes)

    @property
    def has_backward(self) -> bool:
        """Whether anything depends on gradients."""
        return bool(self.info.required_bw_nodes)

    def is_backward(self, node: fx.Node) -> bool:
        """Whether a node needs gradients, or is an effect of backward."""
        return node in self.info.required_bw_nodes

    def is_forward(self, node: fx.Node) -> bool:
        """Whether forward's results need a node."""
        return bool(self.info.is_required_fw(node))

    def is_static(self, node: fx.Node) -> bool:
        """Whether an input stays where it is from call to call, as parameters do."""
        return node in self.info.static_lifetime_input_nodes

    def results(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """What forward and what backward return."""
        flat = pytree.tree_leaves(self.joint.graph.output_node().args)
        found = [leaf if isinstance(leaf, fx.Node) else None for leaf in flat]
        forward, backward = found[: self.outputs], found[self.outputs :]
        return [node for node in forward if node is not None], [node for node in backward if node is not None]

    def changed(self) -> set[fx.Node]:
        """The inputs that forward writes to, by its own calls or by what torch runs behind it."""
        output = self.joint.graph.output_node()
        descriptions = [getattr(found, "mutated_input", None) for found in output.meta.get("desc", ())]
        inputs = self.joint.graph.find_nodes(op="placeholder")
        behind = {node for node in inputs if node.meta.get("desc") is not None and node.meta["desc"] in descriptions}
        copies = self.joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        return behind.union(node.args[0] for node in copies if isinstance(node.args[0], fx.Node))

    def kept_by_torch(self) -> list[fx.Node]:
        """What torch's own partitioner keeps where nothing says otherwise."""
        from torch._functorch import partitioners

        far = 10**9
        for node in reversed(self.joint.graph.nodes):
            near = 0 if node.op != "output" and not self.is_forward(node) else far
            if near and node.op != "output":
                near = min((user.dist_from_bw + 1 for user in node.users), default=far)
            node.dist_from_bw = min(near, far)
        return list(partitioners.choose_saved_values_set(self.joint.graph, self.info, memory_budget=1.0))

    def split(self, kept: Sequence[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward, where ``kept`` is handed from one to the other and backward makes the rest again."""
        from torch._functorch import partitioners
        from torch._functorch._aot_autograd.graph_compile import is_opaque_node
        from torch._functorch.compile_utils import raise_getitems

        sizes = [node for node in kept if is_size(node)]
        others = [node for node in kept if is_opaque_node(node)]
        tensors = [node for node in kept if node not in {*sizes, *others}]
        forward, backward = partitioners._extract_fwd_bwd_modules(
            self.joint,
            tensors,
            saved_sym_nodes=sizes,
            saved_opaque_nodes=others,
            num_fwd_outputs=self.outputs,
            static_lifetime_input_nodes=self.info.static_lifetime_input_nodes,
        )
        backward = raise_getitems(partitioners.reordering_to_mimic_autograd_engine(backward))
        forward = partitioners.thread_graphsafe_rng_from_hops(raise_getitems(forward), is_backward=False)
        return forward, partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)

    def without_backward(self, static: Sequence[int] | None) -> tuple[fx.GraphModule, fx.GraphModule]:
        """What torch makes of a graph in which nothing depends on gradients."""
        from torch._functorch import partitioners

        forward, backward = partitioners.default_partition(
            self.joint,
            [],
            num_fwd_outputs=self.outputs,
            static_lifetime_input_indices=list(static or ()),
            static_lifetime_input_nodes=self.info.static_lifetime_input_nodes,
        )
        return forward, backward

    def may_repeat(self, node: fx.Node) -> bool:
        """Whether a call computes the same again, and does nothing else."""
        target: Any = node.target
        if not is_free_to_go(node) or not isinstance(target, OpOverload):
            return False
        return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable


def is_fusible(node: fx.Node) -> bool:
    """Whether inductor computes a call element by element, together with what is around it."""
    return bool(_kinds().is_fusible(node))


def is_free_to_go(node: fx.Node) -> bool:
    """Whether torch has not marked a value as one that is to be kept for backward."""
    return getattr(node.meta.get("recompute"), "name", "") != _SAVED


@functools.cache
def _kinds() -> Any:
    require(PARTITIONER)
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


def is_size(node: fx.Node) -> bool:
    """Whether a node stands for a number of a graph for any size."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def as_partitioner(split: Callable[..., tuple[fx.GraphModule, fx.GraphModule]], identity: str) -> Any:
    """An object for inductor's setting ``custom_partitioner_fn``.

    Args:
        split: called with the joint graph and keyword arguments of torch's; torch pickles it, for keys of its caches.
        identity: another one for whatever splits in another way; torch keeps compiled code by it.

    Raises:
        TorchVersionError: where the installed torch lacks what it takes.
    """
    require(PARTITIONER)
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        """Divides joint graphs within a budget."""

        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
            """Forward and backward."""
            del joint_inputs
            return split(gm, **kwargs)

        def uuid(self) -> str:
            """What tells it from other ones."""
            return identity

        def __reduce__(self) -> Any:
            return as_partitioner, (split, identity)

        def __repr__(self) -> str:
            return identity

    return Partitioner()
