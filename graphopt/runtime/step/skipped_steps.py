"""Watching for training that only skips: too many steps in a row with gradients that are not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from graphopt.errors import GraphoptError
from graphopt.rewriting.precision.scaling import SCALE, SKIPPED, CheckedGradients, LossScaling
from graphopt.runtime.state.state_store import StateStore

__all__ = ["SkipWatch"]


class SkipWatch:
    """Looks at the count of skipped steps where that costs nothing.

    On a CPU after each step. On other devices every ``max_skipped`` steps, at a copy that is started behind the step
    and read at a later one, when it has arrived: nothing waits for the device, and the error can come up to
    ``max_skipped`` steps late.

    Args:
        store: holds the counts.
        scaling: says how many skipped steps are too many.
    """

    def __init__(self, store: StateStore, scaling: LossScaling) -> None:
        self._store = store
        self._limit = scaling.max_skipped
        self._steps = 0
        self._copies: list[torch.Tensor] = []
        self._checked: list[CheckedGradients] = []
        self._arrived: torch.cuda.Event | None = None

    def skipped_last(self) -> bool:
        """Whether the last step was skipped; waits for the device."""
        return bool(self._store[SKIPPED])

    def look(self, notes: Iterable[tuple[CheckedGradients, torch.Tensor]]) -> None:
        """To be called behind each step.

        Args:
            notes: what the step checked, each with the tensor in which it is noted.

        Raises:
            GraphoptError: naming the first gradient that is not finite, after too many skipped steps in a row.
        """
        if self._limit is None:
            return
        self._steps += 1
        found = list(notes)
        sources = [self._store[SKIPPED], self._store[SCALE], *(flags for _, flags in found)]
        checked = [item for item, _ in found]
        if sources[0].device.type == "cpu":
            self._judge(sources, checked)
            return
        if self._arrived is not None and self._arrived.query():  # type: ignore[no-untyped-call]
            self._arrived = None
            self._judge(self._copies, self._checked)
        if self._arrived is None and self._steps % self._limit == 0:
            self._checked = checked
            self._copies = [torch.empty_like(source, device="cpu", pin_memory=True) for source in sources]
            for copy, source in zip(self._copies, sources, strict=True):
                copy.copy_(source, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(sources[0].device))

    def _judge(self, values: list[torch.Tensor], checked: list[CheckedGradients]) -> None:
        count, scale, *notes = values
        assert self._limit is not None
        if int(count) < self._limit:
            return
        flagged = [zip(item.sites, flags.tolist(), strict=True) for item, flags in zip(checked, notes, strict=True)]
        bad = [site for sites in flagged for site, flag in sites if flag]
        total = sum(len(item.sites) for item in checked)
        if bad:
            many = f"the first of {len(bad)} gradients that are" if len(bad) > 1 else "the one gradient that is"
            which = f"{many} not finite (of {total}, in the order of backward) is that of {bad[0]}"
        else:
            which = "every gradient that this program computed is finite: another rank's is not, or one from outside"
        raise GraphoptError(
            f"{int(count)} steps in a row were skipped because gradients are not finite, and the loss scale is "
            f"{float(scale):.6g} now\n  where: {which}\n  what to do: look at what the model computes there (a "
            "division by zero, a logarithm, a value beyond the dtype), lower the learning rate, or keep that module in "
            "float32; "
            "max_skipped= sets how many skipped steps are too many"
        )
