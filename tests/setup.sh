# Sourced by examples/run.sh and tests/run.sh: makes the private environment .venv, then puts it first on PATH.
#
# The first call installs what tests/constraints.txt pins: 1.6 GB where pip finds a CPU build of torch 2.13.0, 5.3 GB
# with the build that brings CUDA's libraries, which is the one pip takes on Linux unless told of an index of CPU builds.
# Later calls only compare the pins and pyproject.toml with the copy kept from the last install.
# PYTHON=/path/to/python3.12 chooses the Python of a new environment, CONSTRAINTS=/path/to/a.txt other pins.
# shellcheck shell=bash

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
constraints=${CONSTRAINTS:-$root/tests/constraints.txt}

stop() {
    printf '%s\n' "$@" >&2
    exit 1
}

# The first Python that the pins are tested with. Running it also passes over names on PATH that lead nowhere.
find_python() {
    local candidate candidates=(python3 python3.12 python3.11)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    stop "This set-up needs Python 3.11 or 3.12. Found: $("${candidates[0]}" --version 2>/dev/null || echo none)." \
        "On Debian 12 and Ubuntu 24.04: apt-get install python3 python3-venv. Or say where one is:" \
        "PYTHON=/path/to/python3.12 bash $0"
}

# Makes .venv anew. The file made-by-setup goes in first: what lacks it is somebody else's and is left alone.
make_environment() {
    local python=$1 version=$2
    if [ -e "$venv" ] && [ ! -e "$venv/made-by-setup" ]; then
        stop "$venv exists, but this set-up did not make it. Move it away, then run this again."
    fi
    "$python" -c 'import venv; from ensurepip import version' 2>/dev/null ||
        stop "$python (Python $version) has no ensurepip, so it cannot make a virtual environment." \
            "On Debian and Ubuntu: apt-get install python$version-venv, then run this again."
    echo "set-up: making $venv with Python $version" >&2
    rm -rf "$venv"
    mkdir "$venv"
    echo "unfinished" >"$venv/made-by-setup"
    "$python" -m venv "$venv"
    echo "$version" >"$venv/made-by-setup"
}

# A user's PIP_USER, PYTHONPATH or PYTHONHOME would let other packages in, or send ours elsewhere.
install() {
    PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 \
        "$venv/bin/python" -m pip install -qq --constraint "$constraints" "$@"
}

# What the environment is made from; its place too, since an editable install points at the checkout.
recipe() {
    echo "$root"
    cat "$root/pyproject.toml" "$constraints" "$root/tests/setup.sh"
}

set_up() {
    local python version
    if recipe | cmp --silent - "$venv/installed" && "$venv/bin/python" -c '' 2>/dev/null; then
        return
    fi
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ "$(cat "$venv/made-by-setup" 2>/dev/null)" != "$version" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
        make_environment "$python" "$version"
    fi
    rm -rf "$venv/installed" "$venv/bitsandbytes"   # tests/run.sh --qlora makes the second
    # torch first and alone: nothing that comes after it may choose another build of it.
    echo "set-up: installing torch (the large part; minutes on a slow line)" >&2
    install torch
    echo "set-up: installing the other packages" >&2
    install hatchling editables
    install --no-build-isolation --editable "$root[peft,trl,test,docs,dev]"
    recipe >"$venv/installed"
    echo "set-up: done in $SECONDS s; the next run skips it" >&2
}

unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE   # without the last, every process would compile again
set_up
export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
export HF_HUB_OFFLINE=1   # nothing here needs a hub, and nothing may quietly come to need one
