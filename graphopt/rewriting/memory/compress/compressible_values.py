"""Which values that backward reads may be stored in a few bits: decided by the calls that read them.

Backward may read a value with noise where what it computes is linear in the value, or a smooth function of it: operands
of products and convolutions, inputs of activations and of norms. It may not where it reads what the value decides: a
mask, an index, which of two is larger; or what a sum was divided by, as statistics are. What ``relu`` has made decides
by its zeros alone: it may be stored so that these are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.layers.dropout import masked_dropout
from graphopt.ir.ops.storage.quantize import is_dense
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program

__all__ = ["KeptValue", "kept_values"]

_aten = torch.ops.aten
_THRESHOLD = _aten.threshold_backward.default

_READ_SMOOTHLY: dict[str, tuple[int, ...]] = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (0, 1, 2),
    "baddbmm": (0, 1, 2),
    "convolution_backward": (1, 2),
    "gelu_backward": (1,),
    "silu_backward": (1,),
    "mish_backward": (1,),
    "softplus_backward": (1,),
    "tanh_backward": (1,),
    "sigmoid_backward": (1,),
    "glu_backward": (1,),
    "_softmax_backward_data": (1,),
    "_log_softmax_backward_data": (1,),
    "nll_loss_backward": (1,),
    "nll_loss2d_backward": (1,),
    "native_layer_norm_backward": (1,),
    "native_group_norm_backward": (1,),
    "native_batch_norm_backward": (1,),
    "cudnn_batch_norm_backward": (0,),
    "miopen_batch_norm_backward": (0,),
    "_fused_rms_norm_backward": (1,),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 2, 3, 4),
    "_scaled_dot_product_flash_attention_backward": (1, 2, 3, 4),
    "_scaled_dot_product_efficient_attention_backward": (1, 2, 3),
    "_scaled_dot_product_cudnn_attention_backward": (1, 2, 3, 4),
    "avg_pool2d_backward": (1,),
    "_adaptive_avg_pool2d_backward": (1,),
    "max_pool2d_with_indices_backward": (1,),
    "add": (0, 1),
    "sub": (0, 1),
    "mul": (0, 1),
    "div": (0,),
    "neg": (0,),
    "sum": (0,),
    "mean": (0,),
    "_to_copy": (0,),
    "clone": (0,),
}
"""By op of backward: which arguments it reads as numbers that may be a little off, or for their shape alone."""

_EXPONENTIALS = ("_log_softmax_backward_data",)
"""What reads a value's exponential, of which a few levels are no approximation: e to a fifteenth of 20 is 3.8."""

_LEAST_BITS = 8
"""Of a value whose exponential is read."""


@dataclass(frozen=True, slots=True)
class KeptValue:
    """A value of forward that waits for backward.

    Attributes:
        node: the call that made it, or the ``getitem`` of its result.
        after: the last call of forward that reads it.
        before: the first call behind forward that reads it.
        bytes: of its storage.
        obstacle: why it is not to be stored in a few bits; empty where it can be.
        zeros: whether its zeros are to be kept; no element is negative then.
    """

    node: fx.Node
    after: fx.Node
    before: fx.Node
    bytes: int
    obstacle: str = ""
    zeros: bool = False


def kept_values(program: Program, bits: int) -> Iterator[KeptValue]:
    """The floating-point values that forward makes and backward reads, in program order.

    Args:
        program: is only read.
        bits: that an element is to be stored in.
    """
    order = {node: place for place, node in enumerate(program.nodes)}
    of_parameters = _of_parameters(program)
    for node in program.phase_nodes(Phase.FORWARD):
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or node in of_parameters:
            continue
        if schema.storage_root(node) is not node or (schema.hands_on(node) and not schema.is_own_tensor(node)):
            continue
        readers = sorted(schema.readers(node), key=lambda reader: order[reader])
        later = [reader for reader in readers if info(reader).phase is not Phase.FORWARD]
        if not any(not schema.hands_on(reader) for reader in later):
            continue
        after = max([node, *(r for r in readers if r not in set(later))], key=lambda reader: order[reader])
        zeros = node.target is _aten.relu.default and any(reader.target is _THRESHOLD for reader in later)
        found = KeptValue(node, after, later[0], storage_bytes(value), zeros=zeros)
        yield replace(found, obstacle=_obstacle(found, readers, order, bits))


def _of_parameters(program: Program) -> set[fx.Node]:
    """The calls that read parameters alone: casts and views of them, which are no activations."""
    found = {node for node, _ in program.inputs_of("parameter")}
    for node in program.phase_nodes(Phase.FORWARD):
        if node.all_input_nodes and all(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _obstacle(kept: KeptValue, readers: list[fx.Node], order: dict[fx.Node, int], bits: int) -> str:
    aliases = {kept.node, *(reader for reader in readers if schema.hands_on(reader))}
    if any(user.op == "output" for alias in aliases for user in alias.users):
        return "it is a result of the program"
    if order[kept.before] < order[kept.after]:
        return "backward begins before forward has read it for the last time"
    reasons = (_reader_obstacle(reader, aliases, kept.zeros, bits) for reader in readers)
    return _layout_obstacle(kept) or next(filter(None, reasons), "")


def _layout_obstacle(kept: KeptValue) -> str:
    value = value_of(kept.node)
    if value.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its dtype is {str(value.dtype).removeprefix('torch.')}"
    if any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):
        return "its size varies from call to call"
    if not is_dense(value) or value.numel() * value.element_size() != kept.bytes:
        return "it is not dense"
    return ""


def _reader_obstacle(reader: fx.Node, aliases: set[fx.Node], zeros: bool, bits: int) -> str:
    if aliases.intersection(schema.mutated_inputs(reader)):
        return f"{schema.op_name(reader)} writes to it"
    phase = info(reader).phase
    if phase is Phase.FORWARD or reader in aliases:
        return ""
    if phase is not Phase.BACKWARD:
        return f"it is read in {phase.value}, by {schema.op_name(reader)}"
    if zeros and reader.target is _THRESHOLD and reader.args[2] == 0:
        return ""
    if bits < _LEAST_BITS and schema.op_name(reader) in _EXPONENTIALS:
        return f"{schema.op_name(reader)} reads its exponential, for which {bits} bits are too few"
    return "" if _reads_smoothly(reader, aliases) else f"{schema.op_name(reader)} reads it"


def _reads_smoothly(reader: fx.Node, aliases: set[fx.Node]) -> bool:
    if reader.target is masked_dropout:
        allowed: tuple[int, ...] = (0,)
    elif reader.target is _aten.pow.Tensor_Scalar:
        exponent = reader.args[1]
        allowed = (0,) if isinstance(exponent, (int, float)) and exponent >= 1 else ()
    elif isinstance(reader.target, _torch.OpOverload):
        allowed = _READ_SMOOTHLY.get(schema.op_name(reader), ())
    else:
        allowed = ()
    positions = {place for place, given in enumerate(reader.args) if aliases.intersection(schema.nodes_in(given))}
    named = any(aliases.intersection(schema.nodes_in(given)) for given in reader.kwargs.values())
    return not named and positions <= set(allowed)
