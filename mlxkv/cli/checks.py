"""The checks of ``mlxkv doctor``. Each looks at one thing, changes nothing but probe files, and never raises."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..config import NAMES, SECRET, Settings, config_file, data_dir
from ..errors import ConfigError, MlxkvError
from .cache_text import size
from .options import Flags

if TYPE_CHECKING:
    from ..models.mtp import Found

NEEDED_MLX = (0, 32, 4)
NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "smb2",
    "afpfs",
    "webdav",
    "davfs",
    "fuse.sshfs",
    "9p",
    "ceph",
    "glusterfs",
}
OPEN_FILES = 1024
ONLY_RAM = "As it is nothing is kept on disk, only in RAM while a process runs."
DISK_LOW, DISK_FULL = 5 * 10**9, 512 * 10**6


@dataclass(frozen=True)
class Check:
    """One line of the report. ``cure`` says what to do; empty where nothing needs doing."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    cure: str = ""


def examine(flags: Flags, selftest: bool) -> Iterator[Check]:
    """All checks, one after the other. A configuration that cannot be read does not stop the others."""
    try:
        settings = flags.settings()
        problem = None
    except ConfigError as error:
        settings, problem = Settings(), Check("config", "fail", error.message, error.cure)
    yield problem or _config(settings)
    checks: list[Callable[[], Iterator[Check]]] = [_system, _device, _memory]
    checks += [lambda: _cache_folder(settings), lambda: _object_store(settings), _sessions, lambda: _model(settings)]
    if selftest:
        checks.append(_selftest)
    for check in checks:
        try:
            yield from check()
        except MlxkvError as error:
            yield Check(_name(check), "fail", error.message, error.cure)
        except Exception as error:
            yield Check(_name(check), "fail", f"{type(error).__name__}: {error}", "Report this with --debug.")


def _name(check: Callable[[], Iterator[Check]]) -> str:
    return getattr(check, "__name__", "check").strip("_<>").replace("lambda", "check")


def _config(settings: Settings) -> Check:
    file = config_file()
    read = f"{file}" if file.exists() else f"{file} (none)"
    given = [
        f"{name}={'…' if name in SECRET else getattr(settings, name)} ({settings.source(name)})"
        for name in NAMES
        if settings.source(name).kind != "default"
    ]
    return Check("config", "ok", "; ".join([read, *given]))


def _system() -> Iterator[Check]:
    python = platform.python_version()
    yield Check("python", "ok" if sys.version_info >= (3, 11) else "fail", f"{python}  {sys.executable}")
    if sys.platform == "darwin":
        release = platform.mac_ver()[0]
        good = platform.machine() == "arm64" and int(release.partition(".")[0] or 0) >= 14
        cure = "" if good else "mlx needs Apple silicon and macOS 14 or later."
        yield Check("system", "ok" if good else "fail", f"macOS {release} {platform.machine()}", cure)
    else:
        yield Check("system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}")
    for name in ("mlxkv", "mlx", "mlx-lm"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(
                name, "warn" if name == "mlxkv" else "fail", "not installed", "pip install -e . in the checkout"
            )
            continue
        old = name == "mlx" and _numbers(version) < NEEDED_MLX
        yield Check(name, "fail" if old else "ok", version, "pip install -U mlx (0.32.4 or later)" if old else "")
    if sys.platform == "linux":
        compiler = shutil.which("g++")
        yield Check(
            "g++",
            "ok" if compiler else "warn",
            compiler or "not found: compiled CPU steps run unfused, slower, with the same values",
            "" if compiler else "apt-get install g++",
        )


def _device() -> Iterator[Check]:
    from .. import numerics

    now = numerics.current()
    yield Check("device", "ok", f"{now.device}, numerics {now.mode}")
    slow = bool(now.blas_hint)
    yield Check("blas", "warn" if slow else "ok", now.blas, now.blas_hint)


def _memory() -> Iterator[Check]:
    import mlx.core as mx

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Check("memory", "ok", f"{size(total)} RAM")
    if mx.metal.is_available():
        info = mx.device_info()
        most = size(int(info["max_recommended_working_set_size"]))
        yield Check("gpu memory", "ok", f"{info.get('device_name', 'GPU')}: {most} recommended at most")
        limit = _output(["sysctl", "-n", "iogpu.wired_limit_mb"])
        raised = limit not in ("", "0")
        yield Check(
            "wired limit",
            "warn" if raised else "ok",
            f"{limit} MB" if raised else "the system's own",
            "A raised limit has made Macs panic: sudo sysctl iogpu.wired_limit_mb=0 takes it back." if raised else "",
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = hard != resource.RLIM_INFINITY and hard < OPEN_FILES
    shown = f"{soft} open files, at most {'unlimited' if hard == resource.RLIM_INFINITY else hard}"
    yield Check("open files", "warn" if low else "ok", shown, f"Raise it: ulimit -Hn {OPEN_FILES}" if low else "")


def _cache_folder(settings: Settings) -> Iterator[Check]:
    folder = settings.cache_dir
    if not settings.cache:
        yield Check("cache", "warn", f"switched off by {settings.source('cache')}", "Nothing is remembered.")
        return
    there = _existing(folder)
    kind = _file_system(there)
    if kind in NETWORK:
        yield Check(
            "cache", "fail", f"{folder} is on a network file system ({kind})", "Choose a local one with --cache-dir."
        )
        return
    yield _writable(folder, there, settings.allow_unprotected)
    free = shutil.disk_usage(there).free
    status = "fail" if free < DISK_FULL else "warn" if free < DISK_LOW else "ok"
    cure = "" if status == "ok" else "Free some space, or choose another volume with --cache-dir."
    yield Check("disk", status, f"{size(free)} free{f' on {kind}' if kind else ''}", cure)


def _writable(folder: Path, there: Path, allow_unprotected: bool) -> Check:
    """Whether files can be made in the folder (or where it would be made), their modes stick, and locks work."""
    from ..cache.lock import LockRefused, probe_locks

    if not there.is_dir():
        return Check("cache", "fail", f"{there} is a file", "Choose a folder with --cache-dir.")
    try:
        handle, probe = tempfile.mkstemp(dir=there, prefix=".mlxkv-probe-")
        try:
            mode = stat.S_IMODE(os.stat(probe).st_mode)
            probe_locks(Path(probe), handle)
        finally:
            os.close(handle)
            os.unlink(probe)
    except LockRefused as refused:
        cure = f"Choose another with --cache-dir. {ONLY_RAM}"
        return Check("cache", "fail", f"{there}: {refused}", cure)
    except OSError as error:
        cure = f"Make it writable for you, or choose another with --cache-dir. {ONLY_RAM}"
        if sys.platform == "darwin" and isinstance(error, PermissionError):
            cure += " In a protected folder the terminal needs Full Disk Access."
        return Check("cache", "fail", f"{there}: {error.strerror}", cure)
    if mode & 0o077 and not allow_unprotected:
        return Check(
            "cache",
            "fail",
            f"on the volume of {folder} others could read what is cached (mode {mode:04o} instead of 0600)",
            "Choose another --cache-dir, or pass --allow-unprotected.",
        )
    if there != folder:
        return Check("cache", "ok", f"{folder} (made at first use)")
    open_to_others = stat.S_IMODE(folder.stat().st_mode) & 0o077
    cure = f"chmod 700 {folder}" if open_to_others else ""
    return Check("cache", "warn" if open_to_others else "ok", str(folder), cure)


def _object_store(settings: Settings) -> Iterator[Check]:
    """Whether the store answers, and an object can be put, read and removed there."""
    if settings.object_store is None:
        return
    from ..cache.objects.probe import probe

    found = probe(settings.object_store, settings.object_store_secret(), settings.object_timeout)
    yield Check("object store", found.status, found.detail, found.cure)
    if not settings.cache:
        yield Check("object store", "warn", "not used: the cache is switched off", "Leave out --no-cache.")


def _sessions() -> Iterator[Check]:
    folder = data_dir()
    there = _existing(folder)
    good = there.is_dir() and os.access(there, os.W_OK)
    yield Check("sessions", "ok" if good else "fail", str(folder), "" if good else f"Make {there} writable for you.")


def _model(settings: Settings) -> Iterator[Check]:
    try:
        name = settings.require_model()
    except ConfigError as error:
        yield Check("model", "warn", error.message, error.cure)
        return
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import hf_repo_to_path

    from ..cache.state import UnknownCache, members_of
    from ..models import folder, mtp
    from ..models.loading import open_network

    try:
        if not Path(name).exists():
            try:
                path = hf_repo_to_path(name)
            except (OSError, ValueError):
                folder_like = name.count("/") != 1 or name.startswith((".", "/"))
                missing = "there is no such folder" if folder_like else "not downloaded yet; the first run does it"
                yield Check("model", "fail" if folder_like else "warn", f"{name}: {missing}")
                return
        else:
            path = folder.resolve(name)
        found, opened = mtp.open_head(path, folder.check(path))
    except MlxkvError as error:
        yield Check("model", "fail", error.message, error.cure)
        return
    weights = sum(file.stat().st_size for file in folder.weight_files(path))
    yield Check("model", "ok", f"{path} ({size(weights)} of weights)")
    network, config = open_network(path, found.names)  # reads headers; no weight is evaluated
    caches = make_prompt_cache(network)
    architecture = config.get("model_type", "?")
    try:
        counts: dict[str, int] = {}
        for member in members_of(caches):
            counts[member.kind] = counts.get(member.kind, 0) + 1
    except UnknownCache as error:
        yield Check("state", "warn", f"{architecture}: {error.message}", "It runs, but nothing will be remembered.")
        return
    yield Check("state", "ok", f"{architecture}: {', '.join(f'{n} {kind}' for kind, n in counts.items())}")
    if settings.store_bits is not None:
        n = sum(member.packable for member in members_of(caches))
        what = f"{settings.store_bits}: rows of {n} layers, where 32 divides their width"
        none = f"{settings.store_bits}, which changes nothing: no layer keeps rows that can be stored quantised"
        yield Check("store bits", "ok" if n else "warn", what if n else none)
    yield _head(found)
    yield _drafts(settings, network, config, found)
    width = (config.get("text_config") or config).get("linear_key_head_dim")
    if isinstance(width, int) and width % 32:
        slow = f"key heads are {width} wide, no multiple of 32: Metal's gated-delta kernel cannot be used"
        yield Check("recurrent kernel", "warn", slow, "It runs with plain operations, slower.")


def _head(found: Found) -> Check:
    if not found.usable:
        if not (found.names or found.reason):
            return Check("MTP head", "ok", "none in this checkpoint")
        what = "found, not used" if found.names else "none that can be read"
        return Check("MTP head", "warn", f"{what}: {found.reason}", "It runs without its head.")
    layers = f"{found.n_layers} layers" if found.n_layers > 1 else "1 layer"
    drafts = "any number of drafts" if found.most_drafts is None else f"{found.most_drafts} draft in a row"
    where = ", ".join(file.name for file in found.files)
    what = f"{found.family}, {layers} ({len(found.names)} tensors in {where}), {drafts}"
    return Check("MTP head", "ok", f"found: {what}")


def _drafts(settings: Settings, network: Any, config: dict[str, Any], found: Found) -> Check:
    """What would draft with these settings, or why nothing does, and which layers keep it from that."""
    from mlx_lm.models.cache import make_prompt_cache

    from ..cache.rewind import check_drafts, most_drafts
    from ..cache.ring import with_rings
    from ..decode.drafting import NO_HEAD, choose, examine, most_at_a_time
    from ..decode.options import Options
    from ..models.spans import install

    given = settings.engine_options()
    options = Options(model="", **{key: given[key] for key in ("draft", "draft_model", "draft_depth", "ring_spare")})
    journals, _ = install(network)
    rewinds, state, journal = examine(
        network, lambda: with_rings(make_prompt_cache(network), settings.ring_spare), journals
    )
    stuck = [member for member in state.members or () if most_drafts(member, journal) == 0]
    head = None if found.usable else found.reason or NO_HEAD
    try:
        name, why = choose(options, head=head, rewinds=rewinds)
        most = most_at_a_time(options, config, rewinds, found.most_drafts if name == "mtp" else None)
        if name != "off" and not rewinds.again:
            check_drafts(state.members or [], max(most, settings.draft_depth or 1), journal)
    except ConfigError as error:
        return Check("drafts", "fail", error.message + _layers(stuck), error.cure)
    if name == "off":
        possible = settings.draft != "off" and (rewinds.again or not rewinds.why_not)
        other = "; --draft ngram or --draft-model would" if possible else ""
        other += ", and run accepted tokens again" if possible and rewinds.again else ""
        return Check("drafts", "ok", f"none: {why}{other}{_layers(stuck)}")
    who = {"mtp": "by its own head", "ngram": "by look-up in the text", "model": f"by {settings.draft_model}"}[name]
    many = f"{settings.draft_depth} at a time" if settings.draft_depth else f"1 to {most} at a time, as many as pay"
    slow = f"; accepted tokens are run again{_layers(stuck)}" if rewinds.again else ""
    return Check("drafts", "ok", f"{who}, {many}{slow}")


def _layers(stuck: Sequence[Any]) -> str:
    """The layers whose state cannot be taken back, by kind."""
    kinds: dict[str, list[str]] = {}
    for member in stuck:
        kinds.setdefault(member.kind, []).append(member.label)
    named = "; ".join(f"{kind}: {', '.join(labels)}" for kind, labels in kinds.items())
    return f" (layers that take nothing back: {named})" if named else ""


def _selftest() -> Iterator[Check]:
    from .. import selftest

    for found in selftest.run():
        yield Check(
            f"selftest {found.name}", "ok" if found.ok else "fail", found.detail, "" if found.ok else found.cure
        )


def _existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _file_system(path: Path) -> str:
    """The type of the file system that holds ``path``; "" where it cannot be told."""
    path = path.resolve()
    mounts: list[tuple[str, str]] = []
    if sys.platform == "linux":
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, where, kind, *_ = line.split(" ")
            mounts.append((where.replace("\\040", " "), kind))
    else:
        for line in _output(["mount"]).splitlines():
            where, _, rest = line.partition(" on ")[2].rpartition(" (")
            mounts.append((where, rest.partition(",")[0].strip(") ")))
    fits = [(where, kind) for where, kind in mounts if path.is_relative_to(where)]
    return max(fits, key=lambda fit: len(fit[0]), default=("", ""))[1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=3).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
