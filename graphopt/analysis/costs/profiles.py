"""What a device can do: the form of a profile, and the published figures of common devices."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from graphopt.analysis.allocator.rules import PLAIN, AllocatorRules
from graphopt.analysis.costs.device_names import DEVICE_FOLDER, DEVICES, is_profile_file, near_devices
from graphopt.analysis.costs.profile_file import read_profile, write_profile
from graphopt.errors import GraphoptError, wrong_argument

__all__ = ["EFFICIENCY", "PROFILES", "SLOWEST", "DeviceProfile", "device_profile"]

EFFICIENCY = 0.75
"""The share of the published peaks that programs get, in `PROFILES`.

Vendors state what the clock and the units allow; large matrix products, copies and transfers reach between 60 and 90 %
of it. 0.75 is also what torch's own estimate of run times takes (``torch.utils._runtime_estimation``).
"""

SLOWEST = 1.45
"""How many times as long as predicted by a profile of `PROFILES` a step may take.

Nine published runs took between 1.01 and 1.42 times as long (``tests/benchmarks/predictions.py``): kernels reach less
than `EFFICIENCY` where they are small, exchanges slow down what they run beside, and a device may be held to fewer
watts than its data sheet has.
"""

_MAY_BE_ZERO = (
    "overhead",
    "peer_bandwidth",
    "network_bandwidth",
    "disk_bandwidth",
    "context_bytes",
    "network_latency",
    "peer_latency",
)


@dataclass(frozen=True)
class DeviceProfile:
    """What a device can do, for estimating times without running anything.

    Attributes:
        name: for people.
        flops: floating-point operations per second of matrix products by dtype (``"float32"``, ``"bfloat16"``);
            ``"float32"`` must be there and stands for dtypes that are not; ``"tf32"`` is that of float32 where its
            products may be less precise (``torch.set_float32_matmul_precision``).
        attention: of torch's kernels for attention in 16 bits, which do not reach the rate of matrix products:
            ``"forward"`` and ``"backward"`` operations per second on long sequences, and ``"tokens"``, the length at
            which they reach half of it; empty where it is not known.
        memory_bandwidth: bytes per second that ops read and write in the device's memory.
        overhead: seconds that every op takes beyond that.
        host_bandwidth: bytes per second between the device and the host's memory, in each direction.
        memory_bytes: bytes of the device's memory.
        kind: type of the device as torch names it (``"cuda"`` also for ROCm, ``"cpu"``).
        peer_bandwidth: bytes per second between two devices of one host, in each direction; 0 where it is not known.
        network_bandwidth: bytes per second and device between hosts, in each direction; 0 where it is not known.
        devices_per_host: how many devices share a host.
        network_latency: seconds of each round of a collective between hosts.
        peer_latency: the same between two devices of one host.
        allocator: how torch's allocator for this device lays out blocks.
        workspaces: bytes that libraries keep for themselves out of the allocator's memory, by library (``"cublas"``).
        context_bytes: bytes that the device's driver and libraries take outside of the allocator.
        sources: where the figures are published.
        disk_bandwidth: bytes per second between the device and a disk of its host; 0 where it is not known.
        temporaries: bytes that calls allocate for themselves while they run, by their text, for ops whose libraries
            choose that on the device (convolutions, linear algebra); ``graphopt profile --calls`` measures them.

    Raises:
        GraphoptError: for a figure that is not positive (``overhead`` and what may be unknown may be 0), or without
            ``"float32"``.

    Example:
        >>> import pathlib, tempfile
        >>> from graphopt.analysis.costs.profiles import DeviceProfile
        >>> mine = DeviceProfile("mine", {"float32": 2e12}, 1e11, 1e-6, 1e10, 16 * 10**9)
        >>> path = mine.save(pathlib.Path(tempfile.mkdtemp()) / "mine.toml")
        >>> DeviceProfile.load(path) == mine
        True
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    overhead: float
    host_bandwidth: float
    memory_bytes: int
    kind: str = "cpu"
    peer_bandwidth: float = 0.0
    network_bandwidth: float = 0.0
    devices_per_host: int = 1
    allocator: AllocatorRules = PLAIN
    workspaces: Mapping[str, int] = field(default_factory=dict, hash=False)
    context_bytes: int = 0
    sources: tuple[str, ...] = ()
    disk_bandwidth: float = 0.0
    temporaries: Mapping[str, int] = field(default_factory=dict, hash=False)
    network_latency: float = 50e-6
    peer_latency: float = 0.0
    attention: Mapping[str, float] = field(default_factory=dict, hash=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DeviceProfile:
        """The profile in a ``.toml`` file, whose fields are the attributes.

        With ``efficiency``, a share, the file's rates and bandwidths are those of a data sheet, and are multiplied by
        it. Files may come from strangers: values are checked and none is evaluated, and sizes are limited.

        Raises:
            GraphoptError: for a file that cannot be read or is no profile, with the place in it.
        """
        arguments = read_profile(path)
        try:
            return cls(**arguments)
        except GraphoptError as error:
            raise GraphoptError(f"{str(path)!r} is no profile of a device: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the profile to a ``.toml`` file that ``load`` reads, and return its path.

        Raises:
            GraphoptError: for a file of another kind, or one that cannot be written.
        """
        return write_profile(path, {attribute.name: getattr(self, attribute.name) for attribute in fields(self)})

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise GraphoptError(f"the profile {self.name!r} lacks flops['float32'], which other dtypes fall back to")
        figures = {f"flops[{dtype!r}]": value for dtype, value in self.flops.items()}
        figures |= {"memory_bandwidth": self.memory_bandwidth, "host_bandwidth": self.host_bandwidth}
        figures["memory_bytes"] = self.memory_bytes
        if self.attention:
            figures |= {f"attention[{part!r}]": self.attention.get(part, 0.0) for part in ("forward", "backward")}
        wrong = [f"{key} is {value!r}" for key, value in figures.items() if not 0 < value < math.inf]
        figures = {name: getattr(self, name) for name in _MAY_BE_ZERO}
        figures |= {f"workspaces[{library!r}]": size for library, size in self.workspaces.items()}
        figures["attention['tokens']"] = self.attention.get("tokens", 0.0)
        figures |= {f"temporaries[{call!r}]": size for call, size in self.temporaries.items()}
        wrong += [f"{key} is {value!r}" for key, value in figures.items() if not 0 <= value < math.inf]
        wrong += [f"devices_per_host is {self.devices_per_host!r}"] if self.devices_per_host < 1 else []
        if wrong:
            raise GraphoptError(f"the profile {self.name!r} needs positive figures: {', '.join(wrong)}")

    @property
    def usable_bytes(self) -> int:
        """Bytes that are left for tensors, beside what the driver and libraries take."""
        return self.memory_bytes - self.context_bytes - sum(self.workspaces.values())

    def attention_flops(self, dtype: torch.dtype, tokens: int, *, backward: bool) -> float:
        """Floating-point operations per second of attention in ``dtype`` over sequences of so many tokens."""
        if not self.attention or dtype.itemsize != 2:
            return self.peak_flops(dtype)
        most = self.attention["backward" if backward else "forward"]
        return most * tokens / (tokens + self.attention.get("tokens", 0.0))

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Floating-point operations per second in ``dtype``, with torch's precision for float32 as it is now."""
        if dtype is torch.float32 and "tf32" in self.flops and torch.get_float32_matmul_precision() != "highest":
            return self.flops["tf32"]
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])


PROFILES: Mapping[str, DeviceProfile] = {name: DeviceProfile.load(DEVICE_FOLDER / f"{name}.toml") for name in DEVICES}
"""The devices whose published figures are known, one file each in the folder ``devices``, with its sources.

Rates are dense, times the file's ``efficiency``, which is ``EFFICIENCY``. Matrix products in float16, bfloat16, float64
and float8 run on tensor cores (float64 not on the V100). Those in float32 do not, as torch has it by default;
``"tf32"`` is their rate after ``torch.set_float32_matmul_precision("high")``. Bytes of memory are what torch reports.
"""


def device_profile(device: str | os.PathLike[str] | DeviceProfile) -> DeviceProfile:
    """The profile that is given, that has the name that is given, or that is in a file.

    Args:
        device: a profile, one of ``PROFILES``, or the path of a ``.toml`` file.

    Raises:
        ArgumentError: for something else, with the near names.
        GraphoptError: for a file that is no profile, with the place in it.

    Example:
        >>> from graphopt.analysis.costs.profiles import device_profile
        >>> device_profile("h200").memory_bytes
        150109224960
    """
    if isinstance(device, DeviceProfile):
        return device
    if isinstance(device, os.PathLike) or (isinstance(device, str) and is_profile_file(device)):
        return DeviceProfile.load(device)
    if isinstance(device, str) and device in PROFILES:
        return PROFILES[device]
    wanted = f"a DeviceProfile, a .toml file with one, or one of {', '.join(map(repr, PROFILES))}"
    near = near_devices(device) if isinstance(device, str) else []
    raise wrong_argument("device", device, wanted, f"did you mean {', '.join(map(repr, near))}?" if near else "")
