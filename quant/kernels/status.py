"""Which kernels this installation has, for `infer show` and error messages. Imports no torch."""

from __future__ import annotations

from infer.quant.kernels.native_abi import library_path, open_library


def cpu_kernel() -> str:
    """One line: the native kernels with their instruction set, or torch and why."""
    path = library_path()
    if not path.exists():
        return "torch (the native kernels were not built: no C++ compiler at installation)"
    try:
        isa: bytes = open_library(path).infer_isa()
    except OSError as error:
        reason = str(error).splitlines()[0]
        return f"torch (the native kernels cannot be loaded: {reason})"
    return f"native ({isa.decode()})"
