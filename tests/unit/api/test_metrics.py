"""Metrics know versions while they are resident, and nothing that a client made up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from inferd.api.metrics import ApiMetrics, version_label

from .serving import MODEL, V1, V2, CountedAdmission, Served, fake_engine, serve

HI = [{"role": "user", "content": "hi"}]


def series(registry: CollectorRegistry, version: str) -> set[str]:
    return {
        sample.name
        for metric in registry.collect()
        for sample in metric.samples
        if sample.labels.get("version") == version
    }


@pytest.fixture
def fresh() -> Iterator[Served]:
    with serve(fake_engine(V1, V2), CountedAdmission(V1, V2)) as served:
        yield served


def test_requests_tokens_and_latencies_are_counted_by_version(fresh: Served) -> None:
    client = fresh.openai()
    usage = client.chat.completions.create(model=MODEL, messages=HI, n=2).usage  # type: ignore[arg-type]
    fresh.admission.current = 1
    client.completions.create(model=MODEL, prompt="a", max_tokens=3)
    fresh.stop()  # a request is counted when it is over, which is after its client has the answer
    assert usage is not None
    one, two = version_label(V1), version_label(V2)
    assert one == "v1@sha256:111111111111"
    requests = "inferd_api_requests_total"
    assert fresh.metric(requests, endpoint="chat", outcome="2xx", version=one) == 1
    assert fresh.metric(requests, endpoint="completions", outcome="2xx", version=two) == 1
    assert fresh.metric("inferd_api_tokens_total", kind="prompt", version=one) == usage.prompt_tokens
    assert fresh.metric("inferd_api_tokens_total", kind="completion", version=one) == usage.completion_tokens
    first = "inferd_api_time_to_first_token_seconds_count"
    assert fresh.metric(first, endpoint="chat", version=one) == 2  # one per choice
    assert fresh.metric("inferd_api_inter_token_seconds_count", version=two) == 2  # between three tokens


def test_what_clients_send_is_no_label(fresh: Served) -> None:
    client = fresh.http()
    client.get("/v1/made-up")
    client.post("/v1/completions", json={"model": "made-up", "prompt": "made-up", "user": "made-up"})
    client.get("/v1/models/made-up", headers={"x-request-id": "made-up", "x-session-id": "made-up"})
    labels = {
        value
        for metric in fresh.registry.collect()
        for sample in metric.samples
        for value in sample.labels.values()
    }
    assert labels <= {"other", "completions", "models", "4xx", "none"}


def test_a_forgotten_version_leaves_no_series_and_does_not_come_back() -> None:
    registry = CollectorRegistry()
    metrics = ApiMetrics(registry)
    for tag in (V1, V2):
        metrics.admit(tag)
        metrics.answered("chat", "2xx", tag)
        metrics.tokens("prompt", 5, tag)
        metrics.first_token("chat", 0.1, tag)
        metrics.next_tokens(2, 0.1, tag)
    kept = series(registry, version_label(V2))
    metrics.forget_version(V1)
    assert series(registry, version_label(V1)) == set()
    assert series(registry, version_label(V2)) == kept
    metrics.answered("chat", "2xx", V1)  # an answer that ends late
    assert series(registry, version_label(V1)) == set()
    assert registry.get_sample_value(
        "inferd_api_requests_total", {"endpoint": "chat", "outcome": "2xx", "version": "none"}
    )
    metrics.admit(V1)
    metrics.answered("chat", "2xx", V1)
    assert series(registry, version_label(V1))


def test_forgetting_goes_through_the_application(fresh: Served) -> None:
    fresh.openai().completions.create(model=MODEL, prompt="a")
    assert series(fresh.registry, version_label(V1))
    fresh.api.forget_version(V1)
    assert series(fresh.registry, version_label(V1)) == set()
