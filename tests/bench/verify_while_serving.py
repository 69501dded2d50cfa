"""Inter-token latency while loaderd hashes and loads, against the same traffic left alone; in one run.

    python -m tests.bench.verify_while_serving --backend cuda --folder /dev/shm/bench --json out.json
    python -m tests.bench.verify_while_serving --backend host --layers 8 --hidden 1024 --vocab 4096 …

Clients stream without end from one inferd and note when each token comes.  Quiet spells lie before, between
and after the work, so that what drifts shows.  `--throttle off` measures what the throttle is good for.
Makes two checkpoints of Llama-3-8B's shape (16 GB; smaller with --layers and --hidden), unsealed, so that a
push reads and hashes every byte.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import LlamaConfig

from shared.control import Verify, VerifyReport
from tests.bench.swap import kv_bytes_per_token, llama_config, make_checkpoints, spread
from tests.support.serving_host import MODEL, ServingHost, serving_host
from tests.support.traffic import ClientThreads

Result = dict[str, Any]

PROMPT_TOKENS = 32
"""At most."""

MORE_TOKENS = 37
"""By which each client's answers are longer than those of the one before."""


class TokenTimes(ClientThreads):
    """Clients that stream for ever; `gaps` has when a token came and how long after the one before."""

    def __init__(self, socket: Path, clients: int, tokens: int) -> None:
        super().__init__(socket, clients)
        self.tokens = tokens
        self.gaps: list[tuple[float, float]] = []

    def between(self, began: float, ended: float) -> list[float]:
        """Milliseconds between tokens that came in a span of time."""
        return [gap * 1e3 for at, gap in tuple(self.gaps) if began <= at < ended]

    def _run(self, number: int) -> None:
        transport = httpx.HTTPTransport(uds=str(self.socket))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=120) as http:
            turn = 0
            while not self._is_ending.is_set():
                turn += 1
                # Of different lengths, so that not all prompts are computed in the same step.
                tokens = self.tokens + MORE_TOKENS * number
                # Log-probabilities bring a chunk for every token, also for those that make no text.
                body = {
                    "model": MODEL,
                    "prompt": f"client {number}, turn {turn}",
                    "max_tokens": tokens,
                    "temperature": 0,
                    "stream": True,
                    "ignore_eos": True,
                    "logprobs": 0,
                }
                try:
                    self._stream(http, body)
                except httpx.HTTPError as error:
                    self.failures.append(f"{type(error).__name__}: {error}")

    def _stream(self, http: httpx.Client, body: Result) -> None:
        before: float | None = None
        with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                self.failures.append(f"{response.status_code}: {response.read().decode()}")
                return
            for line in response.iter_lines():
                if self._is_ending.is_set():
                    return
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                if before is not None:
                    self.gaps.append((now, now - before))
                before = now


@dataclass(slots=True)
class Bench:
    """The spells of one run."""

    host: ServingHost
    times: TokenTimes
    spell_s: float
    spells: list[tuple[str, Result]] = field(default_factory=list)

    @contextmanager
    def spell(self, name: str) -> Iterator[Result]:
        """Note the latency while the block runs, beside what the block notes itself."""
        noted: Result = {}
        sequence = len(self.host.history(1000))
        began = time.perf_counter()
        yield noted
        ended = time.perf_counter()
        happened = [entry.kind for entry in self.host.history(1000)[sequence:]]
        noted["seconds"] = ended - began
        noted["inter_token_ms"] = spread(self.times.between(began, ended) or [0.0])
        noted["throttled"] = happened.count("throttle.began")
        self.spells.append((name, noted))
        print(json.dumps({name: noted}), flush=True)

    def quiet(self) -> None:
        """Nothing but traffic."""
        with self.spell("quiet"):
            time.sleep(self.spell_s)

    def repeat(self, name: str, work: Callable[[], Result]) -> None:
        """Do something for at least a spell, again and again, with quiet before it."""
        self.quiet()
        with self.spell(name) as noted:
            end = time.perf_counter() + self.spell_s
            rounds = [work()]
            while time.perf_counter() < end:
                rounds.append(work())
            noted["rounds"] = rounds

    def verify(self) -> Result:
        """Hash what serves."""
        active = self.host.active()
        assert active is not None
        report = self.host.control.ask(Verify(name=active.ref.version), VerifyReport, 600)
        assert not report.damaged, report
        return {"gb_s": report.nbytes / report.seconds / 1e9, "seconds": report.seconds}

    def push(self) -> Result:
        """Load, verify, prepare and flip to the version that does not serve."""
        active = self.host.active()
        assert active is not None
        report = self.host.push("v2" if active.ref.version == "v1" else "v1")
        return {"load_s": report.load_s, "verify_s": report.verify_s, "prepare_s": report.prepare_s}


def measure(host: ServingHost, config: LlamaConfig, options: argparse.Namespace) -> Result:
    """All spells on running daemons."""
    # All answers at once, on both versions while one takes over from the other: what would wait for room in
    # the cache would be taken for slow decoding.
    tokens = 2 * options.clients * (PROMPT_TOKENS + options.tokens + MORE_TOKENS * options.clients)
    host.start_inferd(
        "a",
        more=f'backend = "{options.backend}"\nlog_level = "warning"',
        kv_cache_bytes=tokens * kv_bytes_per_token(config),
    )
    host.push("v1")
    with TokenTimes(host.api_socket(), options.clients, options.tokens) as times:
        bench = Bench(host, times, options.spell_s)
        host.awaited(lambda: len(times.gaps) > 50 * options.clients, "traffic to flow", 300)
        bench.repeat("verify", bench.verify)
        bench.repeat("push", bench.push)
        bench.quiet()
    if times.failures:
        raise SystemExit(f"{len(times.failures)} requests failed, the first with {times.failures[0]}")
    metrics = host.get(host.run_dir.inferd_health("a"), "/metrics").text
    if "changeover_engine_preemptions_total 0.0" not in metrics:
        raise SystemExit("sequences waited for room in the KV cache: the latencies show nothing")
    return {"spells": bench.spells, "ratios": ratios(bench.spells)}


def ratios(spells: list[tuple[str, Result]]) -> Result:
    """Each spell of work over the mean of the quiet ones before and after it."""
    found: Result = {}
    for before, (name, spell), after in zip(spells, spells[1:], spells[2:], strict=False):
        if name != "quiet":
            quiet = [each["inter_token_ms"] for _, each in (before, after)]
            found[name] = {
                mark: spell["inter_token_ms"][mark] * 2 / (quiet[0][mark] + quiet[1][mark])
                for mark in ("p50", "p99")
            }
    return found


def show(result: Result) -> None:
    """A short table."""
    print(f"{'spell':8} {'s':>6} {'tokens':>7} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}  rounds, throttled")
    for name, spell in result["spells"]:
        ms = spell["inter_token_ms"]
        print(
            f"{name:8} {spell['seconds']:6.1f} {ms['count']:7d} {ms['p50']:8.2f} {ms['p99']:8.2f} "
            f"{ms['max']:8.2f}  {len(spell.get('rounds', ()))}, {spell['throttled']}"
        )
    for name, ratio in result["ratios"].items():
        print(f"{name} / quiet: p50 {ratio['p50']:.3f}, p99 {ratio['p99']:.3f}")


def main() -> None:
    """Measure, print a short table and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.verify_while_serving")
    parser.add_argument("--backend", choices=("host", "cuda"), default="host")
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints go (tmpfs)")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--spell-s", type=float, default=20.0)
    parser.add_argument("--throttle", default="0.15", help='the share, or "off"')
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = llama_config(options.layers, options.hidden, options.vocab)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    nbytes = make_checkpoints(options.folder, config, device)
    if device == "cuda":
        torch.cuda.empty_cache()
    share = '"off"' if options.throttle == "off" else str(float(options.throttle))
    loaderd = f'backend = "{options.backend}"\nlog_level = "warning"\nthrottle_above_share = {share}'
    with serving_host(options.folder, loaderd) as host:
        host.start_loaderd()
        result = {"bytes": nbytes, "throttle": options.throttle, **measure(host, config, options)}
    show(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
