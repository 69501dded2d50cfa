#!/bin/sh
# Build the stress tests of the native core twice, with ThreadSanitizer and with AddressSanitizer +
# UndefinedBehaviorSanitizer, and run them.  Fails on any report, and where a planted violation is
# not found.  Needs cmake, a C++20 compiler with sanitizers, and nothing of Python.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
violation=3 # check.hpp
report=66   # what a sanitizer is told to exit with

# The address space layout of recent kernels is too random for some versions of ThreadSanitizer.
fixed_layout=
if setarch "$(uname -m)" -R true 2>/dev/null; then fixed_layout="setarch $(uname -m) -R"; fi

export TSAN_OPTIONS="halt_on_error=1 exitcode=$report"
export ASAN_OPTIONS="detect_leaks=1 exitcode=$report"
export UBSAN_OPTIONS="print_stacktrace=1 exitcode=$report"

build() { # name, sanitizers
  cmake -S "$root/native" -B "$root/build/stress-$1" -DCHANGEOVER_BINDING=OFF -DCHANGEOVER_STRESS=ON \
    -DCHANGEOVER_SANITIZE="$2" -DCMAKE_BUILD_TYPE=RelWithDebInfo >"$root/build/stress-$1.log" 2>&1 &&
    cmake --build "$root/build/stress-$1" -j 2 >>"$root/build/stress-$1.log" 2>&1 || {
    cat "$root/build/stress-$1.log" >&2
    exit 1
  }
}

passes() { # build, test, arguments
  kind=$1 && test=$2 && shift 2
  echo "$kind: $test"
  $fixed_layout "$root/build/stress-$kind/stress/$test" "$@" || {
    echo "$kind: $test failed with $?" >&2
    exit 1
  }
}

is_found() { # build, test with a planted violation
  code=0
  $fixed_layout "$root/build/stress-$1/stress/$2" >"$root/build/stress-$1-$2.log" 2>&1 || code=$?
  case $code in
    "$violation" | "$report") echo "$1: $2: planted violation found (exit $code)" ;;
    *)
      cat "$root/build/stress-$1-$2.log" >&2
      echo "$1: the violation planted in $2 was not found (exit $code)" >&2
      exit 1
      ;;
  esac
}

mkdir -p "$root/build"
build tsan thread
build asan address,undefined

for kind in tsan asan; do
  passes $kind slot_rules
  passes $kind version_slot_race 1000
  passes $kind host_slab_faults
  passes $kind extent_reader_faults "$root/build"
  for lack in io-uring cachestat probes; do
    passes $kind extent_reader_faults "$root/build" without-$lack
  done
  for subject in slab filling replica; do passes $kind cuda_${subject}_faults; done
  passes $kind digest_edges
  passes $kind sha256_kernel
  is_found $kind broken_slot_race
done
for order in acquire release acq_rel; do is_found tsan "relaxed_${order}_slot_race"; done
echo "the native core holds"
