"""What this CPU offers to the kernels, and the switch that Linux wants before matrix tiles work."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

import llvmlite.binding

_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA, _SYS_ARCH_PRCTL = 0x1023, 18, 158
_HUGE_PAGE, _MADV_HUGEPAGE = 2**21, 14

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


def ask_for_huge_pages(address: int, num_bytes: int) -> None:
    """Ask Linux to back memory that nobody has touched yet with huge pages; only a hint.

    Weights and KV are read in strides of many rows or pages at once, and each would otherwise need
    an address look-up of its own.
    """
    start = -(-address // _HUGE_PAGE) * _HUGE_PAGE
    length = (address + num_bytes) // _HUGE_PAGE * _HUGE_PAGE - start
    if sys.platform == "linux" and length > 0:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
