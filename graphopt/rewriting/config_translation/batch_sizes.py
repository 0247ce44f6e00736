"""DeepSpeed's three batch sizes: whether they fit together, and how many batches make one update."""

from __future__ import annotations

from graphopt.rewriting.config_translation.translation import Findings, Section

__all__ = ["batch_sizes"]

_WHOLE, _BATCH, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def batch_sizes(config: Section, findings: Findings, ranks: int | None) -> int:
    """How many batches make one update; 1 where nothing says so.

    Args:
        config: with the three fields, of which two say the third.
        findings: take what does not fit, and what is to be done.
        ranks: how many share a batch; None where that is not known.
    """
    whole, batch, steps = config[_WHOLE], config[_BATCH], config[_STEPS]
    if whole is not None:
        steps = _from_whole(config, findings, (whole, batch, steps), ranks)
    config.note(_BATCH, "is for your data loader")
    if _STEPS not in config and (steps or 1) > 1:
        findings.warn(f"{_WHOLE} is not honoured by passes: call step.accumulate({steps})")
        config.use(_WHOLE)
    config.note(_WHOLE, "is for your data loader, and takes all ranks and accumulated batches together")
    if (steps or 1) == 1:
        config.note(_STEPS, "is 1: every batch makes an update")
    elif _STEPS in config:
        config.use(_STEPS)
        findings.warn(f"{_STEPS} is not honoured by passes: call step.accumulate({steps})")
    return steps or 1


def _from_whole(
    config: Section, findings: Findings, sizes: tuple[int, int | None, int | None], ranks: int | None
) -> int | None:
    """The batches of one update, where the samples of one update are given."""
    whole, batch, steps = sizes
    per_step = (batch or 1) * (steps or 1) * (ranks or 1)
    if whole % per_step:
        named = {_BATCH: batch, _STEPS: steps, "the number of ranks": ranks}
        factors = " times ".join(f"{name} ({value})" for name, value in named.items() if value is not None)
        config.problem(_WHOLE, f"expected a multiple of {factors}, found {whole}")
        return steps
    left = whole // per_step
    if batch is not None and steps is None:
        if ranks is None and left > 1:
            findings.warn(f"{_WHOLE} is divided as for one rank: give ranks= where there are more")
        return left
    if batch is not None and ranks is not None and left != 1:
        config.problem(
            _WHOLE, f"expected {_BATCH} ({batch}) times {_STEPS} ({steps}) times {ranks} ranks, found {whole}"
        )
    elif batch is not None and ranks is None and left > 1:
        findings.note(f"{_WHOLE} is right for {left} ranks")
    return steps
