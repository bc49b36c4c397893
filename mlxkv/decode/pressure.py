"""How short of memory macOS says that the whole machine is, and what is then given up (``reference/metal.md`` 12)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

#: ``kern.memorystatus_vm_pressure_level``
NORMAL, WARNING, CRITICAL = 1, 2, 4

_NAME = b"kern.memorystatus_vm_pressure_level"


@cache
def _sysctl() -> Callable[..., int] | None:
    if sys.platform != "darwin":
        return None
    call = ctypes.CDLL(None, use_errno=True).sysctlbyname
    call.argtypes = (
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_void_p,
        ctypes.c_size_t,
    )
    call.restype = ctypes.c_int
    return call


def read_level() -> int:
    """The level now; NORMAL on other systems and where it cannot be read. A system call of about a microsecond."""
    call = _sysctl()
    if call is None:
        return NORMAL
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    if call(_NAME, ctypes.byref(value), ctypes.byref(size), None, 0) != 0:
        return NORMAL
    return value.value


def ram_allowed(level: int, budget: int) -> int:
    """Bytes that the RAM tier may hold of its ``budget``: half from WARNING on, none from CRITICAL on."""
    if level >= CRITICAL:
        return 0
    return budget // 2 if level >= WARNING else budget


def admits(level: int) -> bool:
    """Whether new requests may start."""
    return level < CRITICAL
