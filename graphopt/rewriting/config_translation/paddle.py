"""Paddle's strategies as passes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphopt.errors import GraphoptError
from graphopt.ir.files.checked_json import Field
from graphopt.rewriting.config_translation import paddle_fields as known
from graphopt.rewriting.config_translation.config_document import configuration
from graphopt.rewriting.config_translation.translation import (
    Findings,
    Known,
    Section,
    Translation,
    make,
    number_of_ranks,
)
from graphopt.rewriting.pass_ import Pass

__all__ = ["from_paddle"]

_SPARSITY = (0.999,)
"""What Paddle sends where ``dgc_configs`` has no ``sparsity``."""

_STAGES = 3


def from_paddle(config: Mapping[str, Any] | str | Path, *, ranks: int | None = None) -> Translation:
    """The passes that do what Paddle's ``DistributedStrategy`` asks for.

    =============================================== ========================================================
    field                                           what becomes of it
    =============================================== ========================================================
    ``amp``, ``amp_configs``                        ``MixedPrecision``, pure modes at level ``O2``
    ``recompute``, ``recompute_configs``            ``Recompute``, with ``enable_offload`` also ``Offload``
    ``dgc``, ``dgc_configs``                        ``DeepGradientCompression``
    ``localsgd``, ``adaptive_localsgd``             ``LocalSGD``, ``AdaptiveLocalSGD``
    ``sharding``, ``sharding_configs``              ``ShardOptimizer``; ``ShardParameters`` at stage 3
    ``fp16_allreduce``                              ``CompressGradients("fp16")``
    ``fuse_all_reduce_ops``, ``fuse_grad_size_in_MB`` ``DataParallel(bucket_mb=...)``
    ``gradient_merge``, ``gradient_merge_configs``  ``accumulate`` of the result
    =============================================== ========================================================

    ``DataParallel`` is there where one of these needs it, and where several ranks train. Every other field is named in
    ``notes`` of the result with the reason, and where it asks for something that is not done, in a warning of the
    logger ``graphopt``. A section without its switch is not read, as in Paddle, but for ``recompute_configs``.

    Args:
        config: a strategy, or the path of its JSON, TOML or YAML file; or ``recompute_configs`` alone.
        ranks: how many train; by default as many as the process group has.

    Raises:
        GraphoptError: for a file that cannot be read, an unknown field (with the nearest ones), a value of another type
            or out of range, no checkpoints, and methods that exclude each other. All problems at once, with their
            paths.

    Example:
        >>> config = {"recompute_configs": {"checkpoints": ["net.0", "net.1"], "enable_offload": True}}
        >>> graphopt.configs.from_paddle(config)
        [Recompute(checkpoints=('net.0', 'net.1')), Offload(...)]
        >>> found = graphopt.configs.from_paddle({"dgc": True, "dgc_configs": {"rampup_begin_step": 1000}})
        >>> str(graphopt.Pipeline(found))
        'data-parallel,deep-gradient-compression{sparsity=0.999 rampup-begin-step=1000 rampup-step=1}'
    """
    ranks = number_of_ranks(ranks)
    whole = configuration(config)
    if whole and set(whole) <= set(known.RECOMPUTE):
        whole = {"recompute_configs": whole}
        title = "recompute_configs"
    else:
        title = "Paddle's strategy"
    findings = Findings()
    strategy = Section(Field(whole), known.STRATEGY, findings)
    parts = _Parts(strategy, findings, ranks)
    passes = parts.recompute() + parts.amp()
    exchange = parts.exchange()
    passes += parts.data_parallel(needed=bool(exchange) or (ranks or 1) > 1) + exchange
    accumulate = parts.accumulate()
    parts.others()
    strategy.settle()
    return findings.finish(title, passes, accumulate)


class _Parts:
    """The parts of a strategy, each of which becomes passes."""

    def __init__(self, strategy: Section, findings: Findings, ranks: int | None) -> None:
        self._strategy = strategy
        self._findings = findings
        self._ranks = ranks
        self._merged: dict[str, int] = {}

    def _section(self, switch: str, fields: Mapping[str, Known]) -> Section | None:
        """The section of a switch that is on; None, with a word on it, where it is off."""
        name = f"{switch}_configs"
        if self._strategy[switch]:
            self._strategy.use(switch)
            return Section(self._strategy.field(name), fields, self._findings)
        if self._strategy[name]:
            self._findings.warn(f"{name} is not honoured: {switch} is not true, and then it is not read, as in Paddle")
        Section(self._strategy.field(name), fields, Findings(problems=self._findings.problems))
        return None

    def _made(self, place: str, name: str, **options: Any) -> list[Pass]:
        """A pass, or a problem where it refuses its options."""
        try:
            return [make(name, **options)]
        except GraphoptError as error:
            self._findings.problems.append(f"$.{place}: {error}")
            return []

    # --- memory and precision ----------------------------------------------------------------------------------------

    def recompute(self) -> list[Pass]:
        """``recompute`` with its checkpoints, and where they wait."""
        strategy = self._strategy
        if strategy["recompute"] is None and "recompute_configs" in strategy:
            section: Section | None = Section(strategy.field("recompute_configs"), known.RECOMPUTE, self._findings)
        else:
            section = self._section("recompute", known.RECOMPUTE)
            strategy.note("recompute", "is off, and so it is here")
        if section is None:
            return []
        names = section.use("checkpoints")
        if not names:
            section.problem("checkpoints", "expected a list of names of tensors, with at least one")
        section.warn("checkpoint_shape", "it is not needed, since the capture knows the shapes of checkpoints")
        passes = self._made("recompute_configs", "recompute", checkpoints=tuple(names))
        if section["enable_offload"]:
            section.use("enable_offload")
            passes += self._made("recompute_configs", "offload", min_bytes=0)
        section.settle()
        return passes

    def amp(self) -> list[Pass]:
        """``amp`` with its lists, and how the loss is scaled."""
        section = self._section("amp", known.AMP)
        if section is None:
            return []
        half, brain = section["use_pure_fp16"], section["use_bf16"] or section["use_pure_bf16"]
        pure = half or section["use_pure_bf16"]
        if half and brain:
            section.problem("use_pure_fp16", "expected one of float16 and bfloat16, found both")
        for name in ("use_pure_fp16", "use_bf16", "use_pure_bf16"):
            if section[name]:
                section.use(name)
        options: dict[str, Any] = {"dtype": "bfloat16" if brain else "float16", "level": "O2" if pure else "O1"}
        self._guard(section, pure=pure)
        options["allow"] = self._ops(section, "custom_white_list")
        options["deny"] = (*self._ops(section, "custom_black_list"), *section.use("custom_black_varnames"))
        if brain:
            for name in known.SCALE:
                section.warn(name, "the loss is not scaled in bfloat16")
        else:
            options |= {name: section.use(name) for name in known.SCALE}
        section.settle()
        return self._made("amp_configs", "mixed-precision", **options)

    def _guard(self, section: Section, *, pure: bool) -> None:
        if not pure or not section["use_fp16_guard"]:
            section.note("use_fp16_guard", "is taken as false: no regions are guarded, and all of a model is cast")
            return
        section.use("use_fp16_guard")
        self._findings.warn(
            "amp_configs.use_fp16_guard is not honoured: there are no guarded regions here, and level O2 casts all of "
            "the model; name in custom_black_list what is to stay float32"
        )

    def _ops(self, section: Section, name: str) -> tuple[str, ...]:
        """Ops by the names that torch has for them."""
        found: list[str] = section.use(name)
        others = {op: known.OPS[op] for op in found if op in known.OPS}
        if others:
            changed = ", ".join(f"{op} is {ours}" for op, ours in others.items())
            self._findings.note(f"amp_configs.{name} is taken with torch's names of ops: {changed}")
        return tuple(dict.fromkeys(known.OPS.get(op) or op for op in found))

    # --- several ranks -----------------------------------------------------------------------------------------------

    def exchange(self) -> list[Pass]:
        """What takes the place of exchanging whole gradients, or divides the update."""
        passes = self._compression() + self._local_steps() + self._sharding()
        if not self._strategy["fp16_allreduce"]:
            return passes
        if passes:
            names = " and ".join(current.name for current in passes)
            self._strategy.warn("fp16_allreduce", f"compress-gradients does not go together with {names}")
            return passes
        self._strategy.use("fp16_allreduce")
        return self._made("fp16_allreduce", "compress-gradients", how="fp16")

    def _compression(self) -> list[Pass]:
        section = self._section("dgc", known.DGC)
        if section is None:
            return []
        options = {name: section.use(name) for name in ("rampup_begin_step", "rampup_step")}
        sparsity = tuple(section.use("sparsity")) or _SPARSITY
        self._findings.note(
            "dgc: momentum belongs to the pass (deep-gradient-compression{momentum=...}); Paddle takes the optimizer's"
        )
        return self._made("dgc_configs", "deep-gradient-compression", sparsity=sparsity, **options)

    def _local_steps(self) -> list[Pass]:
        passes: list[Pass] = []
        for switch, name, fields in (
            ("localsgd", "local-sgd", known.LOCAL_SGD),
            ("adaptive_localsgd", "adaptive-local-sgd", known.ADAPTIVE),
        ):
            section = self._section(switch, fields)
            if section is not None:
                passes += self._made(f"{switch}_configs", name, **{field: section.use(field) for field in fields})
        return passes

    def _sharding(self) -> list[Pass]:
        section = self._section("sharding", known.SHARDING)
        if section is None:
            return []
        if section["stage"] > _STAGES:
            section.problem("stage", f"expected 1, 2 or {_STAGES}, found {section['stage']}")
        elif section["stage"] == _STAGES - 1:
            section.warn("stage", "gradients are scattered as buckets are complete; those that are merged are whole")
        degree = section["sharding_degree"]
        if degree == self._ranks:
            section.note("sharding_degree", "is the number of ranks, over all of which state is sharded")
        section.warn("sharding_degree", f"state is sharded over all {self._ranks or ''} ranks".replace("  ", " "))
        if section["gradient_merge_acc_step"] > 1:
            self._merged["sharding_configs.gradient_merge_acc_step"] = section.use("gradient_merge_acc_step")
        section.note("stage", "is what shard-optimizer and shard-parameters do")
        section.settle()
        return self._made("sharding", "shard-parameters" if section["stage"] == _STAGES else "shard-optimizer")

    def data_parallel(self, *, needed: bool) -> list[Pass]:
        """The exchange of gradients in buckets, where it is asked for, or others need it."""
        strategy = self._strategy
        fused, size = "fuse_all_reduce_ops", "fuse_grad_size_in_MB"
        if strategy[size] == 0:
            strategy.note(fused, "adds nothing to fuse_grad_size_in_MB 0: each gradient is exchanged on its own")
            strategy.note(size, "exchanges each gradient on its own")
        elif not strategy[fused]:
            strategy.warn(size, "fuse_all_reduce_ops is off, and each gradient is exchanged on its own")
        scale = Section(strategy.field("gradient_scale_configs"), known.GRADIENT_SCALE, self._findings)
        scale.settle()
        asked = fused in strategy or size in strategy
        fuses, megabytes = strategy.use(fused), float(strategy.use(size))
        bucket = megabytes if fuses else 0.0
        return self._made(size, "data-parallel", bucket_mb=bucket) if needed or asked else []

    # --- the loop, and the rest --------------------------------------------------------------------------------------

    def accumulate(self) -> int:
        """Batches for one update, which the user tells the step."""
        section = self._section("gradient_merge", known.MERGE)
        if section is not None:
            self._merged["gradient_merge_configs.k_steps"] = section.use("k_steps")
            if section["k_steps"] == 1:
                self._findings.note("gradient_merge is on with k_steps 1: every batch makes an update")
            if not section["avg"]:
                section.warn("avg", "step.accumulate takes the mean; multiply the loss by k_steps for the sum")
            section.note("avg", "is what step.accumulate does")
        steps = {count for count in self._merged.values() if count > 1}
        if len(steps) > 1:
            self._findings.problems.append(
                " and ".join(f"$.{path} ({count})" for path, count in self._merged.items())
                + ": expected the same number of batches"
            )
        for path, count in self._merged.items():
            if count > 1:
                self._findings.warn(f"{path} is not honoured by passes: call step.accumulate({count})")
            else:
                self._findings.note(f"{path} is 1: every batch makes an update")
        return max(steps, default=1)

    def others(self) -> None:
        """Fields of which it depends on the value what is to be said."""
        strategy = self._strategy
        if strategy["mode"] in ("COLLECTIVE", 1):
            strategy.note("mode", "is what data-parallel does")
        if strategy["hybrid_configs"]:
            Section(strategy.field("hybrid_configs"), known.HYBRID, self._findings).settle()
