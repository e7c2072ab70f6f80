#!/usr/bin/env bash
# Make .venv, or install more into it:  tools/venv.sh REQUIREMENTS_FILE...
# INTO=FOLDER installs into a folder of its own, without what the packages need: PYTHONPATH=FOLDER finds them.
# Takes the first Python 3.11 or newer that it finds, or the system's where that is much faster;
# PYTHON=/path/to/python chooses another.
set -euo pipefail
cd "$(dirname "$0")/.."

CPU_TORCH=https://download.pytorch.org/whl/cpu
CPU_TORCH_SECONDS=5  # an index that does not answer within this long is done without
VENV_PYTHON=.venv/bin/python
PIP_LOG=.venv/pip.log
NO_NEWS="is ignored: it is neither a file nor a directory"

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Can make an environment, and compile against its headers, as torch.compile does.
complete() {
    "$1" -c 'import ensurepip, os, sysconfig, venv
raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null
}

# Microseconds of a core for a loop of plain Python, the least of nine.
loop_takes() {
    "$1" -c 'import time
def loop(counts, words):
    start = time.process_time()
    for i in range(20000):
        words[i % 100] = str(i)
        counts["all"] += len(words[i % 100])
    return time.process_time() - start
print(int(1e6 * min(loop({"all": 0}, {}) for _ in range(9))))'
}

# The first takes more than 1.3 times as long as the second: the least of three each, in turns, as other programs disturb both.
much_slower() {
    local its=() others=()
    for _ in 1 2 3; do
        its+=("$(loop_takes "$1")")
        others+=("$(loop_takes "$2")")
    done
    [ $((10 * $(least "${its[@]}"))) -gt $((13 * $(least "${others[@]}"))) ]
}
least() { printf '%s\n' "$@" | sort -n | head -n 1; }

# A Python that was built without profiles of itself was seen to take 1.6 times as long as a distribution's, and
# what surrounds the matrix products of a step is Python.
faster_than() {
    local found=$1 other
    for other in ${SYSTEM_PYTHONS:-/usr/bin/python3}; do
        [ "$other" -ef "$found" ] && continue
        if new_enough "$other" && complete "$other" && much_slower "$found" "$other"; then
            echo "$found takes more than 1.3 times as long as $other, which is taken; PYTHON=$found takes the first" >&2
            echo "$other"
            return
        fi
    done
    echo "$found"
}

find_python() {
    local candidate found
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        new_enough "$candidate" || continue
        found=$(command -v "$candidate")
        if [ -n "${PYTHON:-}" ]; then echo "$found"; else faster_than "$found"; fi
        return
    done
    local asked=${PYTHON:-python3}
    echo "error: Python 3.11 or newer is needed; $asked is $("$asked" --version 2>/dev/null || echo "not a Python that runs")." >&2
    echo "Install one, or say where it is: make venv PYTHON=/path/to/python3.12" >&2
    return 1
}

# A folder that was copied, half made, or whose Python is gone is no environment.
usable() {
    new_enough "$VENV_PYTHON" &&
        "$VENV_PYTHON" -c 'import os, pip, sys; sys.exit(not os.path.samefile(sys.prefix, ".venv"))' 2>/dev/null
}

# GPU=1 is for a login node, whose jobs have what it has not.
wants_gpu() { if [ -n "${GPU:-}" ]; then [ "$GPU" = 1 ]; else nvidia-smi >/dev/null 2>&1; fi; }

# Repeats the last line of a file, with the seconds so far, for as long as this script runs.
say_every() {
    local began=$SECONDS
    while sleep "$1" >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        echo "  $((SECONDS - began)) s: $(tail -n 1 "$2" | cut -c 1-100)"
    done
}

# On a terminal pip shows its own progress; elsewhere its last line stands every ten seconds. A file index that lacks a package is no news.
pip_install() {
    local pip=("$VENV_PYTHON" -m pip install --disable-pip-version-check "$@") status=0
    if [ -t 1 ]; then
        "${pip[@]}" 2> >(grep -v "$NO_NEWS" >&2)
        return
    fi
    : >"$PIP_LOG"
    say_every "${SAY_EVERY:-10}" "$PIP_LOG" &
    local sayer=$!
    PYTHONUNBUFFERED=1 "${pip[@]}" --progress-bar off >"$PIP_LOG" 2> >(grep -v "$NO_NEWS" >&2) || status=$?
    kill "$sayer" && wait "$sayer" 2>/dev/null || true
    return "$status"
}

if ! usable; then
    python=$(find_python)
    echo "making .venv with $python ($("$python" --version))"
    "$python" -m venv --clear .venv
fi

# PyPI's torch for Linux brings CUDA, gigabytes of it. Without a GPU, take PyTorch's own CPU build where that index can be reached.
if [ "$(uname)" = Linux ] && ! wants_gpu && ! "$VENV_PYTHON" -m pip show -qq torch 2>/dev/null &&
    "$VENV_PYTHON" -c "import urllib.request as u; u.urlopen('$CPU_TORCH/torch/', timeout=$CPU_TORCH_SECONDS)" 2>/dev/null; then
    echo "installing PyTorch for the CPU"
    pip_install "$(grep '^torch==' requirements/cpu.txt)" --extra-index-url "$CPU_TORCH"
fi

for requirements in "$@"; do
    echo "installing $requirements (minutes, the first time)"
    pip_install ${INTO:+--no-deps --upgrade --target "$INTO"} -r "$requirements"
done
