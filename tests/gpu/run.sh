#!/usr/bin/env bash
# Build the extension if this Python has none, then test and measure the CUDA backend on this machine.
#
#   tests/gpu/run.sh [OUT [PART]]   results go to OUT (default build/gpu); PYTHON chooses the interpreter
#
# PART is `all` (the default) or `several`: what needs two GPUs or more, alone.  With one GPU, `all` skips it.
# Needs a GPU, torch, pytest with pytest-timeout, nanobind, cmake and a C++20 compiler; no package index.
# Every step has its own limit of time, and a failed one does not keep the next from running.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
out=${1:-build/gpu}
part=${2:-all}
mkdir -p "$out"
export PYTHONUNBUFFERED=1
failed=()

step() { # name, seconds, command
  local name=$1 limit=$2
  shift 2
  echo "=== $name"
  timeout -k 10 "$limit" "$@" 2>&1 | tee "$out/$name.log"
  local code=${PIPESTATUS[0]}
  ((code == 0)) || failed+=("$name ($code)")
}

build() {
  cmake -S native -B build/gpu-native -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" >"$out/cmake.log" &&
    cmake --build build/gpu-native -j "$(nproc)" >>"$out/cmake.log" &&
    cmake --install build/gpu-native --prefix . >>"$out/cmake.log" || {
    tail -40 "$out/cmake.log"
    exit 1
  }
}

# The extension of an editable install, or one put beside the sources (git ignores it).
"$python" -c 'from shared import _native; _native.CudaReserve' 2>/dev/null || build

case $part in
  all)
    step tests 200 "$python" -m pytest -q tests/gpu tests/unit/memory/test_backend_contract.py
    step bench 260 "$python" -m tests.bench.cuda --json "$out/cuda.json"
    ;;
  several)
    step several 120 "$python" -m pytest -q tests/gpu/test_several_gpus.py tests/unit/memory/test_backend_contract.py
    step replicas 120 "$python" -m tests.bench.cuda --only-replicas --json "$out/replicas.json"
    ;;
  *)
    echo "no such part: $part" >&2
    exit 2
    ;;
esac

if ((${#failed[@]})); then
  echo "failed: ${failed[*]}"
  exit 1
fi
