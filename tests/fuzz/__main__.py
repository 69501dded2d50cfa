"""Fuzzing from a shell: for hours, or one case again."""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.fuzzer import FuzzFailure, make_case, run
from tests.fuzz.targets import TARGETS

_ROUND = 10_000


def main() -> int:
    """Run what the command line asks for; 1 if a case broke a rule."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all unless given"
    )
    parser.add_argument("--seed", type=int, help="run this one case of each target, and show it")
    parser.add_argument("--start", type=int, default=0, help="the first seed of a long run")
    parser.add_argument("--cases", type=int, default=1_000_000, help="of each target (%(default)s)")
    options = parser.parse_args()
    unknown = set(options.targets) - set(TARGETS)
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}")
    try:
        for target in (TARGETS[name] for name in options.targets or TARGETS):
            if options.seed is not None:
                print(f"{target.name}: {make_case(target, options.seed)!r}")
                is_accepted = run(target, (options.seed,)).accepted
                print("accepted" if is_accepted else "refused")
                continue
            accepted, began = 0, time.monotonic()
            for first in range(options.start, options.start + options.cases, _ROUND):
                accepted += run(
                    target, range(first, min(first + _ROUND, options.start + options.cases))
                ).accepted
            elapsed_s = time.monotonic() - began
            print(f"{target.name}: {options.cases} cases, {accepted} accepted, {elapsed_s:.1f} s", flush=True)
    except FuzzFailure as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
