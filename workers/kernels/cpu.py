"""What this CPU offers to the kernels, and the switch that Linux wants before matrix tiles work."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

import llvmlite.binding

_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA, _SYS_ARCH_PRCTL = 0x1023, 18, 158

IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_FEATURES = llvmlite.binding.get_host_cpu_features() if IS_X86 else {}
HAS_AVX512 = bool(_FEATURES.get("avx512f"))
HAS_AVX512_BF16 = bool(_FEATURES.get("avx512bf16"))
COMPILES_AMX = bool(_FEATURES.get("amx-bf16"))


@functools.cache
def has_amx() -> bool:
    """Whether bfloat16 matrix tiles may be used; asks the kernel once per process."""
    if not COMPILES_AMX or sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0
