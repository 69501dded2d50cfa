#!/usr/bin/env bash
# Build the extension if this Python has none, then test and measure the CUDA backend on this machine.
#
#   tests/gpu/run.sh [OUT [PART...]]   results go to OUT (default build/gpu); PYTHON chooses the interpreter
#
# Parts: `tests` (the whole suite, 7 minutes at most), `bench` (5), `points` (16 GB models: `memory`, where an
# inferd's goes, 4; `swaps`, a hundred of them, 6; `mixed`, what prompts do to the pace of others, 2), `several`
# (what needs two GPUs or more, alone; 9), and `all`, the default: `tests` and `bench`.
# Needs a GPU, torch, pytest with pytest-timeout, nanobind, cmake and a C++20 compiler; no package index:
# wheels of what this Python lacks can lie in a folder that WHEELS names.
# Every step has its own limit of time, and a failed one does not keep the next from running; what each had
# to say comes once more at the end.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
out=${1:-build/gpu}
shift || true
parts=("${@:-all}")
mkdir -p "$out"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
failed=()
told=()

step() { # name, seconds, command
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  echo "=== $name"
  timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1
  local code=$?
  ((code == 0)) || failed+=("$name ($code)")
  told+=("$name")
  echo "$name ended with $code after $((SECONDS - began)) s" | tee -a "$out/$name.log"
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

memory() { step footprint 240 "$python" -m tests.bench.footprint --json "$out/footprint.json"; }

mixed() { step mixed 120 "$python" -m tests.bench.mixed_steps --json "$out/mixed.json"; }

swaps() {
  local folder
  folder=$(mktemp -d /dev/shm/changeover-bench-XXXXXX)
  step swaps 340 "$python" -m tests.bench.swap --backend cuda --folder "$folder/models" \
    --only-swaps 100 --within-s 210 --max-sequences 8 --json "$out/swaps.json"
  rm -rf "$folder"
}

pushes() { # to all GPUs through loaderd
  local folder
  folder=$(mktemp -d /dev/shm/changeover-bench-XXXXXX)
  step pushes 240 "$python" -m tests.bench.several_gpus --folder "$folder/models" --json "$out/pushes.json"
  rm -rf "$folder"
}

if [[ -n ${WHEELS:-} ]]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl || exit 1
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi

# The extension of an editable install, or one put beside the sources (git ignores it).
"$python" -c 'from shared import _native; _native.CudaReleaseHold' 2>/dev/null || build

for part in "${parts[@]}"; do
  [[ $part == all ]] && set -- tests bench || set -- "$part"
  for each in "$@"; do
    case $each in
      tests)
        step tests 420 "$python" -m pytest -q --durations=15 tests/gpu tests/unit/memory/contract
        ;;
      bench)
        step bench 260 "$python" -m tests.bench.cuda --json "$out/cuda.json"
        ;;
      points)
        memory
        mixed
        swaps
        ;;
      mixed) mixed ;;
      memory) memory ;;
      swaps) swaps ;;
      several)
        step several 120 "$python" -m pytest -q tests/gpu/test_several_gpus.py tests/unit/memory/contract
        step daemons 300 "$python" -m pytest -q --durations=10 tests/gpu/test_daemons_on_several_gpus.py
        step replicas 120 "$python" -m tests.bench.cuda --only-replicas --json "$out/replicas.json"
        pushes
        ;;
      *)
        echo "no such part: $each" >&2
        exit 2
        ;;
    esac
  done
done

for name in "${told[@]}"; do
  echo
  echo "=== $name"
  grep -v '"level": "' "$out/$name.log" | tail -n 60 | cut -c1-300
done
if ((${#failed[@]})); then
  echo "failed: ${failed[*]}"
  exit 1
fi
