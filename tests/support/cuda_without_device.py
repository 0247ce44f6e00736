"""Programs on CUDA where there is none: a guard and hooks that do nothing, built here, in a process of its own.

Values without data can then be on ``cuda:0`` and ``cuda:1``, and captures and passes treat them as on a machine that
has these devices. Nothing can run there.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["COMPILER", "build", "run_on_cuda"]

COMPILER = shutil.which("g++") or shutil.which("clang++")
"""What builds it; None where no compiler is here."""

_ROOT = Path(__file__).parents[2]

_BEFORE = """
import ctypes, json, os, sys, warnings
for name in ("libc10.so", "libtorch_cpu.so"):
    ctypes.CDLL(os.path.join({libraries!r}, name), ctypes.RTLD_GLOBAL)
library = ctypes.CDLL({library!r}, ctypes.RTLD_GLOBAL)  # before torch looks for a device
import torch
library.install_guard()
import torch.cuda.amp.common
torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
torch.cuda._lazy_init = lambda: None
torch.cuda.device_count = lambda: 2
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_name = lambda device=None: "a CUDA device without a device"
torch.cuda.mem_get_info = lambda device=None: (80 * 10**9, 80 * 10**9)
torch.cuda.memory_stats = lambda device=None: dict()
torch.cuda.get_rng_state = lambda device=None: torch.zeros(16, dtype=torch.uint8)
torch.cuda.set_rng_state = lambda state, device=None: None
torch.cuda.amp.common.amp_definitely_not_available = lambda: False
warnings.simplefilter("error")
"""
_BEHIND = """
print("\\n" + json.dumps(found), flush=True)
os._exit(0)  # torch's threads for the devices would not end
"""


def build(folder: Path) -> Path:
    """The library, built into a folder."""
    assert COMPILER is not None
    torch = _torch_folder()
    library = folder / "cuda_without_device.so"
    source = Path(__file__).with_suffix(".cpp")
    headers = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    links = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    command = [COMPILER, "-shared", "-fPIC", "-std=c++20", "-O0", *headers, str(source), *links, "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return library


def run_on_cuda(library: Path, code: str) -> Any:
    """What code leaves in ``found``, which has to be data for JSON; warnings are errors."""
    before = _BEFORE.format(libraries=str(_torch_folder() / "lib"), library=str(library))
    run = subprocess.run(
        [sys.executable, "-c", before + code + _BEHIND], capture_output=True, text=True, check=False, cwd=_ROOT
    )
    assert run.returncode == 0, run.stderr[-6000:]
    return json.loads(run.stdout.strip().splitlines()[-1])


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
