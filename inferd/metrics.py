"""inferd's own Prometheus metrics, computed from engine and slots when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inferd.engine.protocol import Engine
from inferd.link import LoaderdLink
from inferd.slots import Slots


class InferdMetrics(Collector):
    """Load, KV cache, slots and the link."""

    def __init__(self, registry: CollectorRegistry, engine: Engine, slots: Slots, link: LoaderdLink) -> None:
        self._engine = engine
        self._slots = slots
        self._link = link
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """One snapshot; called on the event loop's thread by the health server."""
        load = self._engine.load()
        gauges: tuple[tuple[str, str, float], ...] = (
            ("changeover_sequences_running", "Sequences in the running batch.", load.running),
            ("changeover_sequences_waiting", "Sequences that wait for a place.", load.waiting),
            ("changeover_kv_blocks", "KV cache blocks in all.", load.kv_blocks_total),
            ("changeover_kv_blocks_free", "KV cache blocks that are free.", load.kv_blocks_free),
            ("changeover_kv_blocks_cached", "Free blocks that hold prefixes.", load.kv_blocks_cached),
            ("changeover_epoch", "Newest commit carried out here.", self._slots.epoch),
            ("changeover_attached", "1 while a lease with loaderd is open.", int(self._link.is_attached)),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(name, text, value=value)
        counters: tuple[tuple[str, str, float], ...] = (
            ("changeover_engine_steps", "Steps of the engine.", load.steps),
            ("changeover_engine_tokens", "Tokens generated.", load.tokens_generated),
            ("changeover_decode_steps", "Steps right after another that only decoded.", load.decode_steps),
            ("changeover_decode_seconds", "What these steps took, all together.", load.decode_ns / 1e9),
            (
                "changeover_engine_preemptions",
                "Sequences that lost their blocks for a while.",
                load.preemptions,
            ),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(name, text, value=value)
        references = GaugeMetricFamily(
            "changeover_slot_references", "Requests that hold a slot's version.", labels=["slot", "state"]
        )
        for report in self._slots.reports():
            references.add_metric([str(report.slot), report.state], report.references)
        yield references
