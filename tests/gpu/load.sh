#!/usr/bin/env bash
# Measure loading into the GPU beside other loaders (tests/bench/load.py); the table is printed last.
#
#   tests/gpu/load.sh [OUT [OPTION…]]   results go to OUT (default build/gpu), options to `load run`
#
# PYTHON chooses the interpreter.  WHEELS names a folder of wheels, of loaders and of what they need, that are
# installed beside the interpreter's own packages first, in a folder of their own; no package index is asked.
# A loader that is not there is one line of the table.  Needs a GPU, torch, safetensors, nanobind, cmake and a
# C++20 compiler, and in /dev/shm and /var/tmp as much room as the model is large.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
out=${1:-build/gpu}
shift || true
mkdir -p "$out"
export PYTHONUNBUFFERED=1

if [[ -n ${WHEELS:-} ]]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
    --no-cache-dir --target "$site" "$WHEELS"/*.whl || exit 1
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi

# Always: it does nothing where nothing has changed, and an extension of older sources would be measured else.
cmake -S native -B build/gpu-native -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" >"$out/cmake.log" 2>&1 &&
  cmake --build build/gpu-native -j "$(nproc)" >>"$out/cmake.log" 2>&1 &&
  cmake --install build/gpu-native --prefix . >>"$out/cmake.log" 2>&1 || {
  tail -40 "$out/cmake.log"
  exit 1
}

# The run keeps to its own budget of time; the limit here is for one that does not.
timeout -k 20 570 "$python" -m tests.bench.load run --device cuda --out "$out" "$@"
