"""loaderd's Prometheus metrics, computed from its state when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loaderd.deployment import Deployment, Host
from loaderd.slab_table import SlabTable


class LoaderdMetrics(Collector):
    """Weight memory, versions by state, epochs and leases."""

    def __init__(
        self,
        registry: CollectorRegistry,
        slabs: SlabTable,
        host: Host,
        deployments: Mapping[str, Deployment],
    ) -> None:
        self._slabs = slabs
        self._host = host
        self._deployments = deployments
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """One snapshot; called on the event loop's thread by the health server."""
        yield GaugeMetricFamily(
            "changeover_weight_bytes", "Bytes of all slabs.", value=self._slabs.used_bytes
        )
        yield GaugeMetricFamily(
            "changeover_weight_peak_bytes", "Most bytes of slabs at a time.", value=self._slabs.peak_bytes
        )
        yield from self._device()
        versions = GaugeMetricFamily("changeover_versions", "Versions by state.", labels=["model", "state"])
        counts: dict[tuple[str, str], int] = {}
        for version in self._host.versions:
            key = (version.ref.model, str(version.state))
            counts[key] = counts.get(key, 0) + 1
        for (model, state), count in sorted(counts.items()):
            versions.add_metric([model, state], count)
        yield versions
        epochs = GaugeMetricFamily("changeover_epoch", "Newest commit of a model.", labels=["model"])
        leases = GaugeMetricFamily("changeover_leases", "Attached inferds of a model.", labels=["model"])
        for model, deployment in sorted(self._deployments.items()):
            epochs.add_metric([model], deployment.epoch)
            leases.add_metric([model], len(deployment.leases()))
        yield epochs
        yield leases

    def _device(self) -> Iterator[Metric]:
        """The device's memory, and what NVML said last; no series for what is not known."""
        device = self._host.device
        usage = self._host.backend.usage(device)
        yield GaugeMetricFamily(
            "changeover_weight_free_bytes", "Bytes that new slabs could take.", value=usage.free_bytes
        )
        reading = self._host.gpus.reading(device)
        for noun, text, value in (
            ("total_bytes", "Memory of the device.", usage.total_bytes),
            ("pool_bytes", "Memory kept for weights, in slabs or reserved.", usage.pool_bytes),
            ("pool_reserved_bytes", "Of the pool, not in a slab.", usage.reserved_bytes),
            ("largest_free_bytes", "What one new slab could take.", usage.largest_free_bytes),
            ("fragmentation_ratio", "Share of free memory that one slab cannot take.", usage.fragmentation),
            ("nvml_free_bytes", "What NVML says is free.", reading.free_bytes),
            ("uncorrected_errors", "ECC errors since the driver was loaded.", reading.uncorrected_errors),
        ):
            if value is not None:
                gauge = GaugeMetricFamily(f"changeover_device_{noun}", text, labels=["device"])
                gauge.add_metric([device], value)
                yield gauge
