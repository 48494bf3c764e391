"""Which device, how many threads, how much memory: asked of the system once, at start. torch is asked, and imported,
only where there may be CUDA."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from pathlib import Path

from infer.quant.kernels.device import CPU, Device
from infer.runtime.errors import UsageError


def resolve_device(name: str) -> Device:
    """ "auto" is CUDA where it works, else the CPU. Raises UsageError for what this machine does not have."""
    if name == "auto":
        if not cuda_is_possible():
            return CPU
        import torch

        return torch.device("cuda:0") if torch.cuda.is_available() else CPU
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise UsageError(f"--device {name!r} is not known; use auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return CPU
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: torch finds no usable CUDA device; use --device cpu or install a CUDA build"
        )
    number = int(index or 0)
    if number >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", number)


def cuda_is_possible() -> bool:
    """False where torch would find no CUDA or ROCm device: there is no driver, or this torch cannot talk to it."""
    if os.name != "posix":
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        if not os.path.exists("/dev/kfd"):
            return False
    return _torch_is_built_for_cards()


def _torch_is_built_for_cards() -> bool:
    """By its version file, without importing it; True when in doubt."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return True
    try:
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return True
    versions = dict(re.findall(r"^(cuda|hip)\b[^=\n]*= *(.+?) *$", text, re.MULTILINE))
    return any(versions.get(name) != "None" for name in ("cuda", "hip"))


def available_cores() -> int:
    """Physical cores among the processors this process may run on; at least 1."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:
        return max(1, os.cpu_count() or 1)
    cores = set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(((topology / "physical_package_id").read_text(), (topology / "core_id").read_text()))
        except OSError:
            cores.add((str(cpu), ""))
    return max(1, min(len(cores), _cpu_quota() or len(cores)))


def _cpu_quota() -> int | None:
    """Whole processors that a control group (v2) grants, None for no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def available_memory(device: Device) -> int:
    """Bytes that can still be allocated there."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(str(device))[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 8 << 30
