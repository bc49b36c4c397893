"""How numbers are computed: which BLAS MLX uses on a Linux CPU, and the modes ``fast`` and ``exact``.

MLX's Linux wheel multiplies matrices with the reference BLAS, 20 to 60 times slower than OpenBLAS. A library that is in
the process's global symbol scope before ``mlx.core`` is imported takes its place; afterwards nothing can. So
``prepare()`` runs before the first import of MLX, and this module itself imports none of it.

``MLXKV_NUMERICS=fast|exact`` (default fast). ``exact`` is for proofs: float32, reference BLAS, token-by-token
recurrences, so that on a CPU a row depends neither on its company nor on how its prompt was cut.
``MLXKV_BLAS=auto|none|<path of a library>`` (default auto; Linux only).
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from .errors import ConfigError

INSTALL_HINT = (
    "Install OpenBLAS for prompts 20 times faster: apt-get install libopenblas0-pthread (Debian, Ubuntu) or "
    "dnf install openblas (Fedora)."
)
# Names without a 64: those take 64-bit integers and would read MLX's arguments wrongly.
_PLACES = (
    "/usr/lib/*/openblas-pthread/libopenblas.so.0",
    "/usr/lib/*/openblas-openmp/libopenblas.so.0",
    "/usr/lib/*/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib64/libopenblas.so.0",
    "/usr/lib/libopenblas.so*",
)
#: how long OpenBLAS's threads spin for more work, as a power of two in clock cycles: some 0.1 ms. By its own default of
#: about 0.1 s they take a core of the steps after a prompt or a cycle (0.90 to 0.95 of their speed on two cores), and
#: prompts are read no faster for it.
SPIN = {"OPENBLAS_THREAD_TIMEOUT": "18"}
_FOREIGN = ("openblas_get_config", "mkl_get_version", "bli_info_get_version_str", "nvpl_blas_get_version")


@dataclass(frozen=True)
class Numerics:
    """What this process computes with.

    ``mode`` is "fast" or "exact", ``device`` "cpu" or "gpu", ``blas`` the name of what multiplies matrices ("openblas
    0.3.21", "reference", "accelerate", "metal", "cuda"), ``blas_hint`` what to do for a faster one (may be empty).
    """

    mode: str
    device: str
    blas: str
    blas_hint: str
    mlx_version: str

    def identity(self) -> dict[str, str]:
        """The part that goes into a cache key. The BLAS and MLX's version count in ``exact`` alone: there bits must
        agree, in ``fast`` they are metadata of a record."""
        same = {"mode": self.mode, "device": self.device}
        if self.mode == "exact":
            same |= {"blas": self.blas, "mlx": self.mlx_version}
        return same


@dataclass(frozen=True)
class _Prepared:
    mode: str
    blas: str
    hint: str


_prepared: _Prepared | None = None


def prepare() -> None:
    """Read the environment and load the BLAS. The first call decides; later ones do nothing.

    Raises ConfigError for a value that is not allowed, a library that does not load, or a combination that cannot work.
    """
    global _prepared
    if _prepared is None:
        _prepared = _decide()


def mode() -> str:
    """The numerics mode, fast or exact."""
    prepare()
    assert _prepared is not None
    return _prepared.mode


def current() -> Numerics:
    """What this process computes with. Imports MLX."""
    prepare()
    assert _prepared is not None
    import mlx.core as mx

    gpu = mx.default_device().type == mx.DeviceType.gpu
    blas, hint = _prepared.blas, _prepared.hint
    if gpu:
        blas, hint = ("metal" if mx.metal.is_available() else "cuda"), ""
    return Numerics(_prepared.mode, "gpu" if gpu else "cpu", blas, hint, metadata.version("mlx"))


@cache
def unpacked_products() -> bool:
    """Whether MLX's BLAS multiplies small matrices in place, without packing them first: OpenBLAS's kernels for x86
    with AVX-512, which it chose for this processor."""
    if not current().blas.startswith("openblas"):
        return False
    process = ctypes.CDLL(None)
    if not hasattr(process, "openblas_get_corename"):
        return False
    get = process.openblas_get_corename
    get.restype = ctypes.c_char_p
    return (get() or b"").decode("ascii", "replace").lower() in ("skylakex", "cooperlake", "sapphirerapids")


def _decide() -> _Prepared:
    chosen = os.environ.get("MLXKV_NUMERICS", "").strip() or "fast"
    if chosen not in ("fast", "exact"):
        raise ConfigError(f"MLXKV_NUMERICS is {chosen!r}.", "Allowed are fast (the default) and exact.")
    wish = os.environ.get("MLXKV_BLAS", "").strip() or "auto"
    named = wish not in ("auto", "none")
    if named and not os.path.isabs(os.path.expanduser(wish)) and os.sep not in wish:
        raise ConfigError(
            f"MLXKV_BLAS is {wish!r}.", "Allowed are auto (the default), none, or the path of a BLAS library."
        )
    if chosen == "exact" and named:
        raise ConfigError(
            "MLXKV_NUMERICS=exact computes with the reference BLAS, and MLXKV_BLAS names another.",
            "Unset one of them.",
        )
    if sys.platform != "linux":
        return _Prepared(chosen, "accelerate", "")
    present = _in_global_scope()
    if chosen == "exact":
        if present:
            raise ConfigError(
                f"MLXKV_NUMERICS=exact computes with the reference BLAS, but {present} is already loaded.",
                "Start without LD_PRELOAD of a BLAS, or use MLXKV_NUMERICS=fast.",
            )
        return _Prepared(chosen, "reference", "")
    if "mlx.core" in sys.modules:  # too late for anything but what was preloaded
        if present and "blas" in os.environ.get("LD_PRELOAD", ""):
            return _Prepared(chosen, present, "")
        hint = "Import mlxkv before mlx, so that it can load OpenBLAS."
        return _Prepared(chosen, "reference (mlx was imported before mlxkv)", hint)
    if named:
        return _Prepared(chosen, _load(os.path.expanduser(wish)), "")
    if present:
        return _Prepared(chosen, present, "")
    if wish == "none":
        return _Prepared(chosen, "reference", "")
    for path in _candidates():
        try:
            return _Prepared(chosen, _load(path), "")
        except ConfigError:
            continue
    return _Prepared(chosen, "reference", INSTALL_HINT)


def _candidates() -> list[str]:
    """Libraries to try, best first. ``ctypes.util.find_library`` would start a compiler; known places are enough."""
    site = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    places = [*_PLACES, *(os.path.join(s, "cmeel.prefix", "lib", "libopenblas.so*") for s in sorted(site) if s)]
    return [path for place in places for path in sorted(glob.glob(place))]


def _load(path: str) -> str:
    """Put a BLAS into the global symbol scope; gives back its name and version. Raises ConfigError."""
    cure = "MLXKV_BLAS must be auto, none or the path of a BLAS library that loads."
    try:
        with _environment(SPIN):  # read once, by the first one that loads it
            library = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
        if not hasattr(library, "cblas_sgemm"):
            raise ConfigError(f"{path} has no cblas_sgemm, so it is no BLAS that MLX can use.", cure)
        if "USE64BITINT" in _openblas_config(library):
            raise ConfigError(f"{path} takes 64-bit integers; MLX passes 32-bit ones.", cure)
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ConfigError(f"The BLAS library {path} does not load: {error}.", cure) from error
    if "cmeel.prefix" in path and "OPENBLAS_NUM_THREADS" not in os.environ:
        library.openblas_set_num_threads(1)  # this build's threads spin against each other on a busy machine
    return _name(library) or os.path.basename(path)


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """What the user has set stays; children are not told."""
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def _in_global_scope() -> str:
    """The name of a BLAS that any later library would bind to; "" if there is none."""
    process = ctypes.CDLL(None)
    if not hasattr(process, "cblas_sgemm"):
        return ""
    return _name(process) or next((name for name in _FOREIGN if hasattr(process, name)), "another BLAS")


def _name(library: ctypes.CDLL) -> str:
    words = _openblas_config(library).split()
    return f"openblas {words[1]}" if len(words) > 1 and words[0] == "OpenBLAS" else ""


def _openblas_config(library: ctypes.CDLL) -> str:
    if not hasattr(library, "openblas_get_config"):
        return ""
    get = library.openblas_get_config
    get.restype = ctypes.c_char_p
    return (get() or b"").decode("ascii", "replace")
