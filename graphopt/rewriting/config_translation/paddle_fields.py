"""The fields of Paddle's ``DistributedStrategy``: what may stand there, the default, and why nothing comes of some."""

from __future__ import annotations

from graphopt.rewriting.config_translation.translation import (
    Known,
    anything,
    mapping,
    number,
    text,
    texts,
    truth,
    whole,
    wholes,
    word,
)

__all__ = [
    "ADAPTIVE",
    "AMP",
    "DGC",
    "GRADIENT_SCALE",
    "HYBRID",
    "LOCAL_SGD",
    "MERGE",
    "OPS",
    "RECOMPUTE",
    "SCALE",
    "SHARDING",
    "STRATEGY",
]

_PARALLEL = "graphopt has data parallelism, and PartitionCheckpoints for a model that is parallel itself"
_SERVER = "there are no parameter servers here"
_SEARCH = "nothing is searched for here but plans for memory (fit-memory)"
_KERNELS = "it chooses kernels, which are torch's here"
_FUSION = "it fuses ops or fixes their order; backend='inductor' fuses here"
_NETWORK = "torch's process group decides that here"

AMP = {
    "init_loss_scaling": Known(number(0), 32768.0),
    "incr_every_n_steps": Known(whole(1), 1000),
    "decr_every_n_nan_or_inf": Known(whole(1), 2),
    "incr_ratio": Known(number(0), 2.0),
    "decr_ratio": Known(number(0), 0.8),
    "use_dynamic_loss_scaling": Known(truth, True),
    "custom_white_list": Known(texts, []),
    "custom_black_list": Known(texts, []),
    "custom_black_varnames": Known(texts, []),
    "use_pure_fp16": Known(truth, False),
    "use_fp16_guard": Known(truth, True),
    "use_optimizer_fp16": Known(truth, False, "what the optimizer keeps stays float32"),
    "use_pure_bf16": Known(truth, False),
    "use_bf16": Known(truth, False),
}
SCALE = (
    "init_loss_scaling",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "incr_ratio",
    "decr_ratio",
    "use_dynamic_loss_scaling",
)
"""The fields of ``amp_configs`` that scale the loss; options of ``MixedPrecision`` have the same names."""

RECOMPUTE = {
    "checkpoints": Known(texts, []),
    "enable_offload": Known(truth, False),
    "checkpoint_shape": Known(wholes(1), [], "the capture knows the shapes of checkpoints"),
    "enable_tuning": Known(truth, False, "fit-memory chooses what to recompute, for a number of bytes"),
    "refined_ops_patterns": Known(anything, [], "fit-memory chooses among ops; recompute takes names of tensors"),
}
DGC = {
    "rampup_begin_step": Known(whole(), 0),
    "rampup_step": Known(whole(1), 1),
    "sparsity": Known(lambda found: [number(0)(item) for item in found.items()], []),
}
LOCAL_SGD = {"k_steps": Known(whole(1), 1), "begin_step": Known(whole(), 1)}
ADAPTIVE = {"init_k_steps": Known(whole(1), 1), "begin_step": Known(whole(), 1)}
MERGE = {"k_steps": Known(whole(1), 1), "avg": Known(truth, True)}
SHARDING = {
    "stage": Known(whole(), 1),
    "sharding_segment_strategy": Known(text, "segment_broadcast_MB", "buckets are those of data-parallel"),
    "segment_broadcast_MB": Known(number(0), 32.0, "parameters are gathered in the buckets of data-parallel"),
    "segment_anchors": Known(texts, [], "parameters are gathered in the buckets of data-parallel"),
    "sharding_degree": Known(whole(1), 8),
    "mp_degree": Known(whole(), 1, _PARALLEL),
    "dp_degree": Known(whole(), 1, "state is sharded over all ranks of the group"),
    "pp_degree": Known(whole(), 1, _PARALLEL),
    "hybrid_dp": Known(truth, False, "state is sharded over all ranks of the group"),
    "gradient_merge_acc_step": Known(whole(1), 1),
    "optimize_offload": Known(truth, False, "optimizer state stays on the device"),
    "pp_allreduce_in_optimize": Known(truth, False, _PARALLEL),
    "optimize_cast": Known(truth, False, "casts of a parameter are shared in any case"),
    "_dp_as_optimizer_sharding": Known(truth, False, "state is sharded over all ranks of the group"),
    "enable_tuning": Known(truth, False, _SEARCH),
    "use_calc_stream": Known(truth, False, _NETWORK),
}


_SWITCHES = {
    "amp": Known(truth, False),
    "recompute": Known(truth, None),
    "dgc": Known(truth, False),
    "localsgd": Known(truth, False),
    "adaptive_localsgd": Known(truth, False),
    "gradient_merge": Known(truth, False),
    "sharding": Known(truth, False),
}
_SECTIONS = {
    "amp_configs": Known(mapping, {}),
    "recompute_configs": Known(mapping, {}),
    "dgc_configs": Known(mapping, {}),
    "localsgd_configs": Known(mapping, {}),
    "adaptive_localsgd_configs": Known(mapping, {}),
    "gradient_merge_configs": Known(mapping, {}),
    "sharding_configs": Known(mapping, {}),
}
_EXCHANGE = {
    "fuse_all_reduce_ops": Known(truth, True),
    "fuse_grad_size_in_MB": Known(number(0), 32),
    "fp16_allreduce": Known(truth, False),
    "last_comm_group_size_MB": Known(number(0), 1, "data-parallel has first_bucket_mb, for the bucket that begins"),
    "fuse_grad_size_in_TFLOPS": Known(number(0), 50, "buckets are measured in bytes: fuse_grad_size_in_MB"),
    "fuse_grad_size_in_num": Known(whole(), 8, "buckets are measured in bytes: fuse_grad_size_in_MB"),
    "gradient_scale_configs": Known(mapping, {}),
    "sync_nccl_allreduce": Known(truth, True, _NETWORK),
    "nccl_comm_num": Known(whole(1), 1, _NETWORK),
    "use_hierarchical_allreduce": Known(truth, False, _NETWORK),
    "hierarchical_allreduce_inter_nranks": Known(whole(), 1, _NETWORK),
    "calc_comm_same_stream": Known(truth, False, _NETWORK),
    "heter_ccl_mode": Known(truth, False, _NETWORK),
    "find_unused_parameters": Known(
        truth, False, "a program knows which parameters get gradients, so nothing need be searched for"
    ),
    "fuse_grad_merge": Known(truth, False, "step.accumulate adds gradients up inside of the program"),
    "sync_batch_norm": Known(
        truth,
        False,
        "each rank has its own statistics; data-parallel{buffers=mean} averages the running ones",
    ),
}
_OTHERS = {
    "mode": Known(anything, "COLLECTIVE", _SERVER),
    "lars": Known(truth, False, "it is an optimizer: give one to optimize_step"),
    "lars_configs": Known(mapping, {}, "it is an optimizer: give one to optimize_step"),
    "lamb": Known(truth, False, "it is an optimizer: give one to optimize_step"),
    "lamb_configs": Known(mapping, {}, "it is an optimizer: give one to optimize_step"),
    "adam_d2sum": Known(truth, False, "it is a form of Adam: give the optimizer to optimize_step"),
    "pipeline": Known(truth, False, _PARALLEL),
    "pipeline_configs": Known(mapping, {}, _PARALLEL),
    "tensor_parallel": Known(truth, False, _PARALLEL),
    "tensor_parallel_configs": Known(mapping, {}, _PARALLEL),
    "hybrid_configs": Known(mapping, {}),
    "hybrid_parallel_order": Known(anything, None, _PARALLEL),
    "elastic": Known(truth, False, "torchrun restarts ranks here; graphopt.checkpoint keeps the state for that"),
    "auto": Known(truth, False, _SEARCH),
    "semi_auto": Known(truth, False, _SEARCH),
    "auto_search": Known(truth, False, _SEARCH),
    "split_data": Known(truth, True, "the data loader splits data"),
    "asp": Known(truth, False, "weights are not pruned"),
    "qat": Known(truth, False, "nothing is quantized"),
    "qat_configs": Known(mapping, {}, "nothing is quantized"),
    "a_sync": Known(truth, False, _SERVER),
    "a_sync_configs": Known(mapping, {}, _SERVER),
    "trainer_desc_configs": Known(mapping, {}, _SERVER),
    "downpour_table_param": Known(anything, [], _SERVER),
    "sparse_table_configs": Known(anything, {}, _SERVER),
    "fs_client_param": Known(mapping, {}, _SERVER),
    "is_fl_ps_mode": Known(truth, False, _SERVER),
    "with_coordinator": Known(truth, False, _SERVER),
    "is_with_coordinator": Known(truth, False, _SERVER),
    "cudnn_exhaustive_search": Known(truth, False, "set torch.backends.cudnn.benchmark"),
    "conv_workspace_size_limit": Known(whole(), 512, _KERNELS),
    "cudnn_batchnorm_spatial_persistent": Known(truth, False, _KERNELS),
    "without_graph_optimization": Known(truth, True, "only the passes that are given change a program"),
    "build_strategy": Known(mapping, {}, _FUSION),
    "execution_strategy": Known(mapping, {}, "one thread runs a program here"),
}
STRATEGY = {**_SWITCHES, **_SECTIONS, **_EXCHANGE, **_OTHERS}
"""All fields of a strategy. Where defaults of Paddle's versions differ, any value is named."""

GRADIENT_SCALE = {
    "scale_strategy": Known(word("avg", "sum", "customized"), "avg", "data-parallel takes the mean over the ranks"),
    "scale_gradient": Known(truth, False, "gradients are divided once, where they are added up"),
}

HYBRID = {
    "dp_degree": Known(whole(-1), -1, "every rank holds a whole model, and all of them share the batch"),
    "mp_degree": Known(whole(), 1, _PARALLEL),
    "pp_degree": Known(whole(), 1, _PARALLEL),
    "sharding_degree": Known(whole(), 1, "switch sharding on for that"),
    "sep_degree": Known(whole(), 1, _PARALLEL),
    "cp_degree": Known(whole(), 1, _PARALLEL),
    "ep_degree": Known(whole(), 1, _PARALLEL),
    "moe_sharding_degree": Known(whole(), 1, _PARALLEL),
    "order": Known(anything, None, _PARALLEL),
    "mp_configs": Known(mapping, {}, _PARALLEL),
    "pp_configs": Known(mapping, {}, _PARALLEL),
    "sharding_configs": Known(mapping, {}, "switch sharding on for that"),
    "enable_optimizer_timer": Known(truth, False, "graphopt memory and graphopt view show times"),
    "split_norm_comm": Known(truth, False, _NETWORK),
}

OPS = {
    "elementwise_add": "add",
    "elementwise_sub": "sub",
    "elementwise_mul": "mul",
    "elementwise_div": "div",
    "elementwise_pow": "pow",
    "elementwise_max": "maximum",
    "elementwise_min": "minimum",
    "matmul_v2": "matmul",
    "reduce_mean": "mean",
    "reduce_sum": "sum",
    "reduce_prod": "prod",
    "lookup_table": "embedding",
    "lookup_table_v2": "embedding",
    "softmax_with_cross_entropy": "cross_entropy_loss",
    "c_softmax_with_cross_entropy": "cross_entropy_loss",
    "flash_attn": "scaled_dot_product_attention",
    "conv2d_transpose": "conv_transpose2d",
    "depthwise_conv2d": "conv2d",
    "reshape2": "reshape",
    "transpose2": "permute",
    "concat": "cat",
    "p_norm": "norm",
}
"""Ops that torch calls otherwise."""
