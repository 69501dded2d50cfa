"""loaderd's Prometheus metrics, computed from its state when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loaderd.deployment import Deployment
from loaderd.host import Host
from loaderd.scrub import Scrub
from loaderd.slab_table import SlabTable


class LoaderdMetrics(Collector):
    """Weight memory, versions by state, epochs and leases."""

    def __init__(
        self,
        registry: CollectorRegistry,
        slabs: SlabTable,
        host: Host,
        deployments: Mapping[str, Deployment],
        scrub: Scrub,
    ) -> None:
        self._scrub = scrub
        self._slabs = slabs
        self._host = host
        self._deployments = deployments
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """One snapshot; called on the event loop's thread by the health server."""
        yield from self._devices()
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
        yield from self._pace()

    def _pace(self) -> Iterator[Metric]:
        """What copies and digests may do, and what they found."""
        pace = self._host.pace
        yield GaugeMetricFamily(
            "changeover_throttled", "1 while latency holds copies back.", value=int(pace.is_throttled)
        )
        yield GaugeMetricFamily(
            "changeover_copy_limit_bytes_per_second",
            "What may be copied and hashed; 0 while latency without it is measured.",
            value=pace.bytes_per_s,
        )
        yield CounterMetricFamily(
            "changeover_paced_bytes",
            "Bytes copied, and bytes hashed.",
            value=pace.admitted_bytes,
        )
        yield CounterMetricFamily("changeover_scrub_rounds", "Scrubs that ended.", value=self._scrub.rounds)
        damaged = GaugeMetricFamily(
            "changeover_damaged_tensors", "Tensors whose resident bytes changed.", labels=["model", "state"]
        )
        counts: dict[tuple[str, str], int] = {}
        for version in self._host.versions:
            if version.is_resident:
                key = (version.ref.model, str(version.state))
                counts[key] = counts.get(key, 0) + len(self._host.versions.damaged(version))
        for (model, state), count in sorted(counts.items()):
            damaged.add_metric([model, state], count)
        yield damaged

    def _devices(self) -> Iterator[Metric]:
        """The memory of each device, and what NVML said last; no sample for what is not known."""
        gauges: dict[str, GaugeMetricFamily] = {}
        for device in self._host.devices.all:
            usage = self._host.backend.usage(device)
            reading = self._host.gpus.reading(device)
            for noun, text, value in (
                ("weight_bytes", "Bytes of all slabs.", self._slabs.used_bytes(device)),
                ("weight_peak_bytes", "Most bytes of slabs at a time.", self._slabs.peak_bytes(device)),
                ("weight_free_bytes", "Bytes that new slabs could take.", usage.free_bytes),
                ("device_total_bytes", "Memory of the device.", usage.total_bytes),
                ("device_pool_bytes", "Memory kept for weights, in slabs or reserved.", usage.pool_bytes),
                ("device_pool_reserved_bytes", "Of the pool, not in a slab.", usage.reserved_bytes),
                ("device_largest_free_bytes", "What one new slab could take.", usage.largest_free_bytes),
                (
                    "device_fragmentation_ratio",
                    "Share of free memory that one slab cannot take.",
                    usage.fragmentation,
                ),
                ("device_nvml_free_bytes", "What NVML says is free.", reading.free_bytes),
                (
                    "device_uncorrected_errors",
                    "ECC errors since the driver was loaded.",
                    reading.uncorrected_errors,
                ),
            ):
                name = f"changeover_{noun}"
                gauge = gauges.setdefault(name, GaugeMetricFamily(name, text, labels=["device"]))
                if value is not None:
                    gauge.add_metric([device], value)
        yield from gauges.values()
