"""The fields of DeepSpeed's JSON: what may stand there, the default, and why nothing comes of some."""

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
    word,
)

__all__ = ["ACTIVATIONS", "AMP", "AUTOCAST", "BF16", "CONFIG", "DATA_TYPES", "FP16", "OFFLOAD", "OPTIMIZER", "ZERO"]

_MASTERS = "what the optimizer updates and keeps stays float32"
_LOADER = "the data loader is yours"
_LOOKING = "graphopt memory, graphopt view and the log show what a step does"
_STAGE3 = "shard-parameters gathers parameters as time and memory allow, and all ranks of the group have shards"
_BUCKETS = "parameters are gathered in the buckets of data-parallel"
_STATE = "offload-state copies state in for its update, which stays on the device, as time and memory allow"
_CHECKPOINTS = "graphopt.checkpoint saves and loads"
_PARALLEL = "graphopt has data parallelism, and PartitionCheckpoints for a model that is parallel itself"
_MODEL = "the model is taken as it is: change it before it is handed over"

ACTIVATIONS = {
    "partition_activations": Known(truth, False),
    "cpu_checkpointing": Known(truth, False),
    "contiguous_memory_optimization": Known(truth, False),
    "number_checkpoints": Known(whole(1), None),
    "synchronize_checkpoint_boundary": Known(truth, False),
    "profile": Known(truth, False),
    "use_reentrant": Known(truth, None, "segments are recomputed inside of the program, in neither of the two ways"),
}
FP16 = {
    "enabled": Known(truth, False),
    "loss_scale": Known(number(0), 0.0),
    "initial_scale_power": Known(whole(), 16),
    "loss_scale_window": Known(whole(1), 1000),
    "hysteresis": Known(whole(1), 2),
    "consecutive_hysteresis": Known(truth, False),
    "min_loss_scale": Known(number(0), 1.0),
    "auto_cast": Known(truth, False),
    "fp16_master_weights_and_grads": Known(truth, False, _MASTERS),
    "fused_mode": Known(truth, True, "the optimizer that is given says whether it is fused"),
}
BF16 = {
    "enabled": Known(truth, False),
    "check_grad_overflow": Known(truth, False),
    "immediate_grad_update": Known(truth, False, "fuse-update updates as soon as a gradient is final"),
    "bf16_master_weights_and_grads": Known(truth, False, _MASTERS),
    "bf16_optimizer_states": Known(truth, False, _MASTERS),
}
AMP = {
    "enabled": Known(truth, False),
    "opt_level": Known(word("O0", "O1", "O2", "O3"), "O1"),
    "loss_scale": Known(anything, "dynamic"),
    "min_loss_scale": Known(number(0), None),
    "max_loss_scale": Known(number(0), 2.0**24),
    "cast_model_type": Known(anything, None, "level O2 casts to float16"),
    "patch_torch_functions": Known(truth, None, "casts are part of the program"),
    "keep_batchnorm_fp32": Known(anything, None, "normalisation stays float32 at both levels"),
    "master_weights": Known(truth, None, _MASTERS),
    "cast_model_outputs": Known(anything, None, "outputs keep the dtype that they have without the pass"),
    "num_losses": Known(whole(1), 1, "a step has one loss"),
    "verbosity": Known(whole(), 1, _LOOKING),
}
AUTOCAST = {
    "enabled": Known(truth, False),
    "dtype": Known(word("float16", "fp16", "half", "bfloat16", "bf16", "torch.float16", "torch.bfloat16"), "bfloat16"),
    "lower_precision_safe_modules": Known(texts, [], "mixed-precision{allow=...} takes paths of modules, not classes"),
}
OFFLOAD = {
    "device": Known(word("none", "cpu", "nvme"), "none"),
    "nvme_path": Known(text, None, "the environment variable GRAPHOPT_DISK names the folder"),
    "buffer_count": Known(whole(), None, _STATE),
    "buffer_size": Known(whole(), None, _STATE),
    "max_in_cpu": Known(whole(), None, _STATE),
    "pin_memory": Known(truth, False, _STATE),
    "pipeline": Known(truth, False, _STATE),
    "pipeline_read": Known(truth, False, _STATE),
    "pipeline_write": Known(truth, False, _STATE),
    "fast_init": Known(truth, False, _STATE),
    "ratio": Known(number(0), 1.0, _STATE),
    "super_offload": Known(truth, False, _STATE),
    "convert_grad_on_cpu": Known(truth, True, _STATE),
    "cpuadam_cores_perc": Known(number(0), 0.8, _STATE),
}
PERSISTENCE = "stage3_param_persistence_threshold"
"""Elements up to which parameters stay whole at stage 3."""

_STAGE3_FIELDS = {
    "prefetch_bucket_size": whole(),
    "model_persistence_threshold": whole(),
    "max_live_parameters": whole(),
    "max_reuse_distance": whole(),
    "gather_16bit_weights_on_model_save": truth,
    "gather_fp16_weights_on_model_save": truth,
    "module_granularity_threshold": whole(),
    "use_all_reduce_for_fetch_params": truth,
    "allgather_sequential": truth,
    "partition_stream_chunk_size": whole(),
}
ZERO = {
    "stage": Known(whole(), 0),
    "reduce_bucket_size": Known(whole(), None),
    "overlap_comm": Known(truth, True, "exchange runs beside backward"),
    "reduce_scatter": Known(truth, True, "shard-optimizer reduce-scatters gradients"),
    "contiguous_gradients": Known(truth, True, "gradients are packed into buckets"),
    "allgather_partitions": Known(truth, True, _BUCKETS),
    "allgather_bucket_size": Known(whole(), None, _BUCKETS),
    "use_multi_rank_bucket_allreduce": Known(truth, True, _BUCKETS),
    "round_robin_gradients": Known(truth, False, _STATE),
    "offload_optimizer": Known(mapping, {}),
    "offload_param": Known(mapping, {}),
    "cpu_offload": Known(truth, False),
    "cpu_offload_param": Known(truth, False, _STAGE3),
    "cpu_offload_params": Known(truth, False, _STAGE3),
    "cpu_offload_use_pin_memory": Known(truth, False, _STATE),
    "sub_group_size": Known(whole(), None, _STAGE3),
    "load_from_fp32_weights": Known(truth, True, _MASTERS),
    "elastic_checkpoint": Known(truth, False, _CHECKPOINTS),
    "ignore_unused_parameters": Known(truth, True, "a program knows which parameters get gradients"),
    "legacy_stage1": Known(truth, False, "there is one way to shard optimizer state"),
    "zero_hpz_partition_size": Known(whole(), 1, _STAGE3),
    "zero_quantized_weights": Known(truth, False, _STAGE3),
    "zero_quantized_nontrainable_weights": Known(truth, False, _STAGE3),
    "zero_quantized_gradients": Known(truth, False, "compress-gradients does not go together with shard-optimizer"),
    "zeropp_loco_param": Known(mapping, {}, "nothing is quantized"),
    "mics_shard_size": Known(whole(-1), -1, "state is sharded over all ranks of the group"),
    "mics_hierarchical_params_gather": Known(truth, False, _STAGE3),
    "memory_efficient_linear": Known(truth, True, _STAGE3),
    "pipeline_loading_checkpoint": Known(truth, False, _STAGE3),
    "override_module_apply": Known(truth, True, _STAGE3),
    "log_trace_cache_warnings": Known(truth, False, _STAGE3),
    "enable_sanity_checks": Known(truth, False, "programs are checked after each pass"),
    "save_muon_momentum_buffer_in_memory": Known(truth, False, _STAGE3),
    "leaf_module": Known(mapping, {}, _STAGE3),
    "zenflow": Known(mapping, {}, _STATE),
    PERSISTENCE: Known(whole(), None),
    **{f"stage3_{name}": Known(read, None, _STAGE3) for name, read in _STAGE3_FIELDS.items()},
    **{name: Known(read, None, _STAGE3) for name, read in _STAGE3_FIELDS.items()},
}
OPTIMIZER = {
    "type": Known(text, ""),
    "params": Known(mapping, {}),
    "legacy_fusion": Known(truth, False, "the optimizer that is given says whether it is fused"),
}
"""Also of ``scheduler``, which has the first two."""

DATA_TYPES = {
    "grad_accum_dtype": Known(word("fp32", "float32", "fp16", "bf16"), "fp32", "gradients are added up as they come"),
    "param_dtype": Known(text, None, "parameters keep their dtype"),
    "buffer_dtype": Known(text, None, "buffers keep their dtype"),
}

_LOOP = {
    "train_batch_size": Known(whole(1), None),
    "train_micro_batch_size_per_gpu": Known(whole(1), None),
    "gradient_accumulation_steps": Known(whole(1), None),
    "managed_gradient_accumulation": Known(truth, True, "step.accumulate counts the batches"),
    "optimizer": Known(mapping, {}),
    "scheduler": Known(mapping, {}),
    "gradient_clipping": Known(number(0), 0.0),
    "zero_allow_untested_optimizer": Known(
        truth, False, "optimizers have to work element by element, which is checked"
    ),
    "zero_force_ds_cpu_optimizer": Known(truth, True, "the optimizer that is given runs"),
    "dataloader_drop_last": Known(truth, False, _LOADER),
    "data_efficiency": Known(mapping, {}, _LOADER),
    "curriculum_learning": Known(mapping, {}, _LOADER),
    "vocabulary_size": Known(whole(), None, "the model is taken as it is"),
    "elasticity": Known(mapping, {}, "torchrun restarts ranks; graphopt.checkpoint loads into another number of them"),
}
_PRECISION = {
    "fp16": Known(mapping, {}),
    "bf16": Known(mapping, {}),
    "bfloat16": Known(mapping, {}),
    "amp": Known(mapping, {}),
    "torch_autocast": Known(mapping, {}),
    "data_types": Known(mapping, {}),
}
_EXCHANGE = {
    "zero_optimization": Known(anything, {}),
    "allgather_size": Known(whole(), None, _BUCKETS),
    "communication_data_type": Known(word("fp32", "fp16", "bf16", "none"), None),
    "seq_parallel_communication_data_type": Known(text, None, _PARALLEL),
    "seq_parallel_comm_data_type": Known(text, None, _PARALLEL),
    "prescale_gradients": Known(truth, False, "sums are divided where the mean is taken"),
    "gradient_predivide_factor": Known(number(0), 1.0, "sums are divided where the mean is taken"),
    "gradient_allreduce_op": Known(word("mean", "avg", "sum"), "mean", "data-parallel takes the mean over the ranks"),
    "sparse_gradients": Known(truth, False, "gradients of embeddings are exchanged as dense ones"),
    "disable_allgather": Known(truth, False, _BUCKETS),
    "comms_logger": Known(mapping, {}, _LOOKING),
    "comms_config": Known(mapping, {}, _LOOKING),
}
_MEMORY = {
    "activation_checkpointing": Known(mapping, {}),
    "aio": Known(mapping, {}, "offload{tier=disk} has its own reads and writes"),
    "memory_breakdown": Known(truth, False, _LOOKING),
}
_LOOKING_FIELDS = {
    "steps_per_print": Known(anything, None, _LOOKING),
    "wall_clock_breakdown": Known(truth, False, _LOOKING),
    "dump_state": Known(truth, False, _LOOKING),
    "log_level": Known(anything, None, "GRAPHOPT_LOG says what is logged"),
    "timers": Known(mapping, {}, _LOOKING),
    "flops_profiler": Known(mapping, {}, _LOOKING),
    "tensorboard": Known(mapping, {}, _LOOKING),
    "wandb": Known(mapping, {}, _LOOKING),
    "comet": Known(mapping, {}, _LOOKING),
    "csv_monitor": Known(mapping, {}, _LOOKING),
    "monitor_config": Known(mapping, {}, _LOOKING),
    "autotuning": Known(mapping, {}, "graphopt plan says what fits, and which exchange pays"),
}
_MODEL_FIELDS = {
    "sparse_attention": Known(mapping, {}, _MODEL),
    "progressive_layer_drop": Known(mapping, {}, _MODEL),
    "compression_training": Known(mapping, {}, _MODEL),
    "quantize_training": Known(mapping, {}, _MODEL),
    "weight_quantization": Known(mapping, {}, _MODEL),
    "eigenvalue": Known(mapping, {}, _MODEL),
    "hybrid_engine": Known(mapping, {}, "a step trains, and does not generate"),
    "pipeline": Known(mapping, {}, _PARALLEL),
    "tensor_parallel": Known(mapping, {}, _PARALLEL),
    "expert_parallel": Known(mapping, {}, _PARALLEL),
    "sequence_parallel_size": Known(whole(1), 1, _PARALLEL),
    "data_parallel_size": Known(whole(1), None, "all ranks of the group share the batch"),
    "mesh_param": Known(anything, None, _PARALLEL),
    "use_data_before_expert_parallelism": Known(truth, False, _PARALLEL),
    "use_data_before_expert_parallel": Known(truth, False, _PARALLEL),
    "compile": Known(mapping, {}, "backend= says what runs a program"),
    "graph_harvesting": Known(truth, False, "backend= says what runs a program"),
}
_SAVING = {
    "checkpoint": Known(mapping, {}, _CHECKPOINTS),
    "nebula": Known(mapping, {}, _CHECKPOINTS),
    "datastates_ckpt": Known(mapping, {}, _CHECKPOINTS),
}
CONFIG = {**_LOOP, **_PRECISION, **_EXCHANGE, **_MEMORY, **_LOOKING_FIELDS, **_MODEL_FIELDS, **_SAVING}
"""All fields of a whole configuration."""
