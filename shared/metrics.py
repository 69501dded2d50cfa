"""The Prometheus registry of a daemon.

Names: `changeover_` + noun + unit; base units (seconds, bytes), counters end in `_total`.  Which daemon
a series is from, the scraped socket says (and `changeover_build_info`).  Labels have few values and
come from configuration or are bounded by what is resident (model, version, device, slot, state,
outcome), never from a request.
"""

from __future__ import annotations

import platform
from importlib import metadata

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
)

NAMESPACE = "changeover"

_DISTRIBUTION = "changeover"


def package_version() -> str:
    """The installed version of changeover; `unknown` where the source tree runs uninstalled."""
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def new_registry(daemon: str) -> CollectorRegistry:
    """A registry of its own, not the library's global one, with the metrics that each daemon has:
    `process_*`, `python_*` and `changeover_build_info{daemon, version, python}`."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    build = Info("build", "What runs here.", namespace=NAMESPACE, registry=registry)
    build.info({"daemon": daemon, "version": package_version(), "python": platform.python_version()})
    return registry


def loop_lag_histogram(registry: CollectorRegistry) -> Histogram:
    """`changeover_loop_lag_seconds`: how late timers of the event loop run."""
    return Histogram(
        "loop_lag_seconds",
        "How late timers of the event loop run.",
        namespace=NAMESPACE,
        registry=registry,
        buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5, 30),
    )
