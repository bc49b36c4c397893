# Shared by scripts/demo and scripts/test: find a Python, make the environment, get a model for tests. POSIX sh.
# The caller sets ROOT (the repository) before reading this file. Says what it does on stderr.
#
# Settings (environment): MLXKV_VENV    where the environment lives (default: .venv in the repository)
#                         MLXKV_PYTHON  the Python to make it with (default: the first suitable one found)
# Exit codes: 2 wrong use, 3 the machine lacks something or a download failed, 130 interrupted.

VENV=${MLXKV_VENV:-$ROOT/.venv}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
LOCK=$VENV.lock   # a folder, held while the environment changes
OPEN=$VENV.open   # exists while the environment is incomplete: found at start, it is made anew
SMOLLM2=$ROOT/models/SmolLM2-135M-Instruct
SUITABLE='import sys, platform
v = sys.version_info
mac = sys.platform == "darwin"
sys.exit(0 if (3, 11) <= v < (3, 16) and (not mac or platform.machine() == "arm64") else 1)'
UV_PYTHON_VERSION=3.12
HELD=

# A caller's Python settings must not leak into the environment that is made here.
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV CONDA_PREFIX __PYVENV_LAUNCHER__ 2>/dev/null || :
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0

say() { printf 'mlxkv: %s\n' "$*" >&2; }

# fail STEP CURE [CODE]
fail() {
    printf 'mlxkv: %s\n' "$1" >&2
    printf '       %s\n' "$2" >&2
    exit "${3:-3}"
}

cleanup() {
    [ -n "$HELD" ] || return 0
    [ -d "$VENV" ] || rm -f "$OPEN"
    rm -rf "$LOCK"
    HELD=
}
trap cleanup EXIT
trap 'cleanup; trap - EXIT; say "interrupted; the next run picks up from here"; exit 130' INT
trap 'cleanup; trap - EXIT; exit 143' TERM HUP

have() { command -v "$1" >/dev/null 2>&1; }

# ---- the machine -----------------------------------------------------------------------------------------------------

check_machine() {
    case $(uname -s) in
    Linux) ;;
    Darwin)
        if [ "$(uname -m)" != arm64 ]; then
            if [ "$(sysctl -n hw.optional.arm64 2>/dev/null || echo 0)" = 1 ]; then
                fail "this shell runs under Rosetta (x86_64); MLX needs a native one." \
                    "Run it as: arch -arm64 /bin/sh $0"
            fi
            fail "this Mac has an Intel processor; MLX needs Apple silicon (arm64)." \
                "mlxkv runs on Apple silicon with macOS 14 or later, and on Linux."
        fi
        macos=$(SYSTEM_VERSION_COMPAT=0 sw_vers -productVersion 2>/dev/null || echo 0)
        if [ "${macos%%.*}" -lt 14 ]; then
            fail "macOS $macos is too old; MLX needs macOS 14 or later." "Update macOS in System Settings > General."
        fi
        ;;
    *) fail "$(uname -s) is not supported." "mlxkv runs on macOS 14 or later (Apple silicon) and on Linux." ;;
    esac
}

# as_root COMMAND...: run it as root if that needs no password; else 1.
can_root() { [ "$(id -u)" = 0 ] || { have sudo && sudo -n true >/dev/null 2>&1; }; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

# apt_install PACKAGE...: quietly, with what apt knows first and a refreshed list second; its last words if both fail.
apt_install() {
    have apt-get && can_root || return 1
    say "installing $* with apt-get"
    apt_out=$(apt_get install -y --no-install-recommends "$@" 2>&1 </dev/null) && return 0
    apt_get update >/dev/null 2>&1 </dev/null || :
    apt_out=$(apt_get install -y --no-install-recommends "$@" 2>&1 </dev/null) && return 0
    printf '%s\n' "$apt_out" | tail -n 3 >&2
    return 1
}
apt_get() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o Acquire::Retries=0 -o Acquire::http::Timeout=20 \
        -o DPkg::Lock::Timeout=60 "$@"
}

# OpenBLAS makes prefill on a Linux CPU many times faster. It is never a reason to stop.
offer_openblas() {
    [ "$(uname -s)" = Linux ] || return 0
    case ${MLXKV_BLAS:-auto} in auto) ;; *) return 0 ;; esac
    for so in /usr/lib/*/libopenblas*.so* /usr/lib/*/openblas*/libopenblas*.so* /usr/lib/libopenblas*.so* \
        /usr/lib64/libopenblas*.so* /usr/local/lib/libopenblas*.so*; do
        [ ! -e "$so" ] || return 0
    done
    apt_install libopenblas0-pthread && return 0
    say "OpenBLAS is not installed: everything works, but a prompt is read many times slower. To install it:"
    if have apt-get; then
        say "    sudo apt-get install libopenblas0-pthread"
    else
        say "    your system's package of OpenBLAS (Fedora: openblas-threads, Arch: openblas)"
    fi
}

# ---- Python ----------------------------------------------------------------------------------------------------------

# On a Mac without the command line tools /usr/bin/python3 is a stub that opens a window: not even tried there.
is_stub() { [ "$1" = /usr/bin/python3 ] && [ "$(uname -s)" = Darwin ] && ! xcode-select -p >/dev/null 2>&1; }

# Sets PY to the first suitable Python, or to nothing; OLD_PY to one that runs but does not suit.
find_python() {
    PY=
    OLD_PY=
    if [ -n "${MLXKV_PYTHON:-}" ]; then
        "$MLXKV_PYTHON" -c "$SUITABLE" >/dev/null 2>&1 ||
            fail "MLXKV_PYTHON=$MLXKV_PYTHON is not a Python from 3.11 to 3.15 (on a Mac: arm64)." \
                "Name another one, or unset MLXKV_PYTHON to let this script look for one."
        PY=$MLXKV_PYTHON
        return 0
    fi
    for name in python3 python3.13 python3.12 python3.11 python3.14 python3.15 /opt/homebrew/bin/python3 \
        /usr/local/bin/python3 /usr/bin/python3 /Library/Frameworks/Python.framework/Versions/Current/bin/python3; do
        found=$(command -v "$name" 2>/dev/null) || continue
        ! is_stub "$found" || continue
        if "$found" -c "$SUITABLE" >/dev/null 2>&1; then
            PY=$found
            return 0
        fi
        [ -n "$OLD_PY" ] || ! "$found" -c 'import venv, ensurepip.__main__' >/dev/null 2>&1 || OLD_PY=$found
    done
}

# Sets UV to uv's path, or to nothing.
find_uv() {
    UV=
    for name in uv "${HOME:-/nonexistent}/.local/bin/uv" "${HOME:-/nonexistent}/.cargo/bin/uv" /opt/homebrew/bin/uv \
        /usr/local/bin/uv; do
        if UV=$(command -v "$name" 2>/dev/null) && "$UV" --version >/dev/null 2>&1; then return 0; fi
    done
    UV=
}

# uv_venv PYTHON: make $VENV, with pip in it. uv does not read pip's settings: it is handed the index and certificates.
uv_venv() {
    [ -n "${UV_DEFAULT_INDEX:-}" ] || [ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="$PIP_INDEX_URL"
    [ -n "${SSL_CERT_FILE:-}" ] || [ -z "${PIP_CERT:-}" ] || export SSL_CERT_FILE="$PIP_CERT"
    say "making $VENV with uv"
    "$UV" venv --quiet --seed --python "$1" "$VENV" || return 1
}

# A Python that is too old can still install uv, which can bring a newer Python.
uv_from_old_python() {
    [ -n "$OLD_PY" ] || return 1
    say "$OLD_PY is too old for mlx-lm (3.11 or later); getting uv, which can bring a newer one"
    rm -rf "$VENV.uv"
    if "$OLD_PY" -m venv "$VENV.uv" && "$VENV.uv/bin/python" -m pip install -q uv; then
        UV=$VENV.uv/bin/uv
        return 0
    fi
    rm -rf "$VENV.uv"
    return 1
}

# Make $VENV (absent until now) with a working pip.
make_venv() {
    find_python
    find_uv
    if [ -z "$PY" ]; then
        if [ -n "$UV" ] || uv_from_old_python; then
            uv_ok=0
            uv_venv "$UV_PYTHON_VERSION" && uv_ok=1
            rm -rf "$VENV.uv"
            [ $uv_ok = 0 ] || return 0
            fail "uv could not make an environment with Python $UV_PYTHON_VERSION (its message is above)." \
                "Check the network, or install Python 3.11 or later: $(python_cure)"
        fi
        fail "no Python from 3.11 to 3.15 was found, and no uv." "Install one: $(python_cure)"
    fi
    if "$PY" -c 'import venv, ensurepip.__main__' >/dev/null 2>&1; then
        std_venv
        return 0
    fi
    # Debian cuts ensurepip out of Python and puts it into python3-venv.
    if [ -n "$UV" ]; then
        uv_venv "$PY" || fail "uv could not make $VENV (its message is above)." "Check the network and try again."
        return 0
    fi
    if "$PY" -c 'import venv, pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (22, 3))' \
        >/dev/null 2>&1; then
        say "making $VENV with $PY and its pip"
        "$PY" -m venv --without-pip "$VENV" && "$PY" -m pip --python "$VENV/bin/python" install -q pip && return 0
        rm -rf "$VENV"
    fi
    minor=$("$PY" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ "$("$PY" -c 'import sys; print(sys.prefix)')" = /usr ] && apt_install "python$minor-venv"; then
        std_venv
        return 0
    fi
    fail "$PY cannot make an environment: its ensurepip module is missing." \
        "Debian and Ubuntu: sudo apt-get install python$minor-venv   (or install uv), then run this again."
}

std_venv() {
    say "making $VENV with $("$PY" -c 'import sys; print("Python %d.%d.%d" % sys.version_info[:3])')"
    "$PY" -m venv "$VENV" || fail "$PY could not make $VENV (its message is above)." \
        "Look for a full disk or a folder that may not be written; or name another Python with MLXKV_PYTHON."
}

python_cure() {
    if [ "$(uname -s)" = Darwin ]; then
        echo "https://www.python.org/downloads/macos/, or: brew install python, or uv from https://docs.astral.sh/uv/"
    elif have apt-get; then
        echo "sudo apt-get install python3 python3-venv, or uv from https://docs.astral.sh/uv/"
    else
        echo "your system's package of python3, or uv from https://docs.astral.sh/uv/"
    fi
}

# ---- the environment -------------------------------------------------------------------------------------------------

alive() { kill -0 "$1" 2>/dev/null || [ -d "/proc/$1" ]; }

# One set-up at a time. A lock whose owner is gone is taken over.
take_lock() {
    waited=0
    until mkdir "$LOCK" 2>/dev/null; do
        [ -d "$LOCK" ] || fail "cannot write beside $VENV." \
            "Make that folder writable, or name another place with MLXKV_VENV=/some/folder/venv."
        owner=$(cat "$LOCK/pid" 2>/dev/null || :)
        if { [ -n "$owner" ] && ! alive "$owner"; } || { [ -z "$owner" ] && [ $waited -ge 5 ]; }; then
            rm -rf "$LOCK"
            continue
        fi
        [ $waited -gt 0 ] || say "waiting for another set-up of $VENV (process ${owner:-unknown})"
        sleep 1
        waited=$((waited + 1))
    done
    HELD=1
    echo $$ >"$LOCK/pid"
}

# What an installation depends on: the project's description, where it lies, and the interpreter.
stamp_of() {
    cksum <"$ROOT/pyproject.toml"
    echo "$ROOT"
    "$VENV/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null
}

# is_ready demo|test: the environment is whole and was installed for just this. The test extras contain the demo's needs.
is_ready() {
    [ ! -e "$OPEN" ] || return 1
    for stamp in "$VENV/.mlxkv-test" "$VENV/.mlxkv-$1"; do
        if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(stamp_of)" ]; then return 0; fi
    done
    return 1
}

# ensure_env demo|test: after it, $VENV/bin/python runs mlxkv (test: and the suite). Quick and offline if it did before.
ensure_env() {
    ! is_ready "$1" || return 0
    check_machine
    take_lock
    if is_ready "$1"; then # by the run that was waited for
        cleanup
        return 0
    fi
    if [ -e "$OPEN" ]; then
        [ ! -d "$VENV" ] || say "$VENV was left half-made; making it anew"
        rm -rf "$VENV"
    elif [ -d "$VENV" ] && ! "$VENV/bin/python" -c "$SUITABLE" >/dev/null 2>&1; then
        [ -f "$VENV/.mlxkv-made" ] || # only what these scripts made is ever removed
            fail "$VENV has no Python from 3.11 to 3.15 that works." \
                "Remove it, or name another place with MLXKV_VENV=/some/folder/venv."
        say "the Python of $VENV is gone; making it anew"
        rm -rf "$VENV"
    fi
    fresh=
    if [ ! -d "$VENV" ]; then
        fresh=1
        : >"$OPEN"
        make_venv
        : >"$VENV/.mlxkv-made"
    fi
    offer_openblas
    install_mlxkv "$1"
    cleanup
}

# install_mlxkv demo|test: editable, with pip, so that pip's configuration on this machine holds.
install_mlxkv() {
    extras=
    [ "$1" = demo ] || extras="[$1]"
    say "installing mlxkv$extras and what it needs (the first time this takes a few minutes)"
    # Cut short, an installation leaves unknown pieces: open until done, so that the next run starts afresh.
    [ ! -f "$VENV/.mlxkv-made" ] || : >"$OPEN"
    rm -f "$VENV"/.mlxkv-demo "$VENV"/.mlxkv-test
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$VENV/bin/python" -m ensurepip >/dev/null 2>&1 ||
        fail "$VENV has no pip." "Remove it, or name another place with MLXKV_VENV=/some/folder/venv."
    (cd "$ROOT" && "$VENV/bin/python" -m pip install -q -e ".$extras" </dev/null) || {
        [ -n "$fresh" ] || rm -f "$OPEN" # pip gave up by itself: what was there before still is
        fail "installing mlxkv failed (pip's message is above)." \
            "Check the network and the free disk space (2 GB), then run this again. For a proxy or a mirror: pip config."
    }
    stamp=$VENV/.mlxkv-$1
    stamp_of >"$stamp.tmp"
    mv "$stamp.tmp" "$stamp"
    rm -f "$OPEN"
}

# ---- models -------------------------------------------------------------------------------------------------------

# fetch_smollm2: after it, $SMOLLM2 is a complete folder (the script renames it into place when done).
fetch_smollm2() {
    [ ! -f "$SMOLLM2/config.json" ] || return 0
    "$VENV/bin/python" "$ROOT/scripts/fetch_smollm2.py" --out "$SMOLLM2" >&2 || exit $?
}
