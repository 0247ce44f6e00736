"""Named streams of random numbers: states of the default generators that are put in place around a piece of code.

Programs and eager ops draw from the default generator of their device when they run. A stream therefore is a state of
these generators: ``using`` puts it in place and puts the previous one back afterwards. What a captured program replays
in backward it has saved itself, so backward need not run inside of the stream.

After the random-state tracker of Megatron-LM (Shoeybi et al., 2019, arXiv 1909.08053, section 3 on dropout).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from graphopt.errors import GraphoptError, check_type, did_you_mean, wrong_argument

__all__ = ["MODEL_PARALLEL", "REPLICATED", "RandomStreams"]

MODEL_PARALLEL = "model-parallel"
"""The stream that differs from rank to rank: for dropout on tensors that are split over the ranks."""

REPLICATED = "replicated"
"""The stream that is the same on every rank: for dropout on tensors that every rank holds."""

_OFFSET = 2718
"""Between the seeds of the two streams, as in Megatron-LM."""


class RandomStreams:
    """Streams of random numbers by name, for the CPU and every CUDA device.

    >>> streams = graphopt.RandomStreams.model_parallel(seed=1, rank=0)
    >>> with streams.using("model-parallel"):
    ...     first = torch.rand(3)  # other numbers on every rank
    >>> with streams.using("replicated"):
    ...     second = torch.rand(3)  # the same numbers on every rank

    A stream goes on where it was left. Streams are for one thread: a generator's state belongs to the process.
    """

    def __init__(self) -> None:
        self._states: dict[str, dict[str, torch.Tensor]] = {}
        self._active: list[str] = []

    @classmethod
    def model_parallel(cls, seed: int, rank: int) -> RandomStreams:
        """The two streams that tensor parallelism needs, ``model-parallel`` and ``replicated``.

        Args:
            seed: the same on every rank.
            rank: of this process in its model-parallel group; at least 0.

        Raises:
            ArgumentError: for a seed or a rank that is no whole number.
            GraphoptError: for a negative rank.
        """
        check_type("model_parallel's rank", rank, int, "a whole number, this process's rank in its group")
        if rank < 0:
            raise GraphoptError(f"rank is at least 0, got {rank}: this process does not belong to the group")
        streams = cls()
        streams.add(REPLICATED, seed)
        streams.add(MODEL_PARALLEL, seed + _OFFSET + rank)
        return streams

    @property
    def names(self) -> tuple[str, ...]:
        """The streams, in the order in which they were added."""
        return tuple(self._states)

    def add(self, name: str, seed: int) -> None:
        """Begin a stream.

        Args:
            name: not in use yet.
            seed: as for ``torch.manual_seed``; the stream starts as the default generators do after it.

        Raises:
            ArgumentError: for a name that is no text, and a seed that is no whole number.
            GraphoptError: for a name that is in use.
        """
        check_type("a stream's name", name, str, "text, such as 'dropout'", 'add("dropout", seed=1)')
        check_type("a stream's seed", seed, int, "a whole number, as for torch.manual_seed")
        if name in self._states:
            raise GraphoptError(f"there is a stream called {name!r} already; give the new one another name")
        self._states[name] = {
            device: torch.Generator(device=device).manual_seed(seed).get_state() for device in _devices()
        }

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Inside, the default generators draw from a stream; afterwards they are where they were.

        Streams can be nested, one within another. An error inside leaves everything in order: the stream goes on behind
        what was drawn.

        Raises:
            GraphoptError: for an unknown name, with the nearest ones; for a stream that is in use already.
        """
        if name not in self._states:
            hint = did_you_mean(name, self._states) or f"the streams are {', '.join(self._states) or 'none'}"
            raise GraphoptError(f"there is no stream called {name!r}; {hint}")
        if name in self._active:
            raise GraphoptError(f"the stream {name!r} is in use already: within itself it would repeat its numbers")
        outside = {device: _state(device) for device in _devices()}
        for device, state in self._states[name].items():
            _set_state(device, state)
        self._active.append(name)
        try:
            yield
        finally:
            self._active.remove(name)
            self._states[name] = {device: _state(device) for device in self._states[name]}
            for device, state in outside.items():
                _set_state(device, state)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """The states of all streams: by name, then by device (``cpu``, ``cuda:0``), a uint8 tensor each.

        Raises:
            GraphoptError: inside ``using``.
        """
        self._refuse_inside("state_dict()")
        return {name: {device: state.clone() for device, state in of.items()} for name, of in self._states.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Put the streams where they were when ``state_dict`` was called.

        Args:
            state: what ``state_dict`` returned, for the same streams and at least the devices of this machine.

        Raises:
            ArgumentError: for what is no state of streams.
            GraphoptError: where the streams are others, a device is missing, or a state is none; nothing is changed
                then. Inside ``using``.
        """
        self._refuse_inside("load_state_dict()")
        given: Any = state
        if not isinstance(given, Mapping) or not all(isinstance(of, Mapping) for of in given.values()):
            hint = "" if isinstance(given, Mapping) else "torch.load(path) gives it from a file"
            raise wrong_argument(
                "state", given, "what RandomStreams.state_dict() returned: streams, then devices", hint
            )
        missing, unknown = set(self._states) - set(state), set(state) - set(self._states)
        if missing or unknown:
            raise GraphoptError(
                f"the streams are {', '.join(self._states) or 'none'}, and those of the state are "
                f"{', '.join(state) or 'none'}: add the same streams before loading"
            )
        for name, of in state.items():
            for device, current in self._states[name].items():
                _check_state(name, device, of.get(device), current)
        self._states = {
            name: {device: state[name][device].clone() for device in own} for name, own in self._states.items()
        }

    def _refuse_inside(self, what: str) -> None:
        if self._active:
            raise GraphoptError(
                f"{what} inside of using({self._active[-1]!r}): the stream moves there; call it outside"
            )


def _check_state(name: str, device: str, given: Any, current: torch.Tensor) -> None:
    if given is None:
        raise GraphoptError(f"the state of the stream {name!r} has nothing for {device}: it is from another machine")
    if not isinstance(given, torch.Tensor) or given.dtype != torch.uint8 or given.shape != current.shape:
        raise GraphoptError(
            f"the state of the stream {name!r} for {device} is no generator state: it must be a uint8 tensor of "
            f"{current.numel()} elements"
        )


def _devices() -> list[str]:
    """Devices whose default generators a stream covers."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{index}" for index in range(count))]


def _state(device: str) -> torch.Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def _set_state(device: str, state: torch.Tensor) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)
