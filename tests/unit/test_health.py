"""The event loop's pulse, and the health socket asked over real HTTP."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
import uvloop

from shared import health, http_server
from shared.errors import InvariantError, ResourceError
from shared.health import HealthServer, LoopPulse
from shared.metrics import loop_lag_histogram, new_registry
from shared.progress import NS_PER_S
from shared.verdict import OK, Verdict, combine

T = TypeVar("T")

BAD = Verdict(False, "no version serves", {"waiting": 3})


def _run(main: Callable[[], Awaitable[T]]) -> T:
    async def task() -> T:
        return await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(task())


def _server(
    path: Path, live: Callable[[], Verdict] = lambda: OK, ready: Callable[[], Verdict] = lambda: BAD
) -> HealthServer:
    return HealthServer(path, live, ready, new_registry("loaderd"))


def _client(path: Path, timeout_s: float = 30) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=timeout_s)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "health.sock"


# --- the pulse -----------------------------------------------------------------------------------


def test_a_pulse_that_is_too_old_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.health.time.monotonic_ns", lambda: 100 * NS_PER_S)
    pulse = LoopPulse(limit_s=5.0)
    assert pulse.verdict(104 * NS_PER_S).is_ok
    verdict = pulse.verdict(106 * NS_PER_S)
    assert not verdict.is_ok
    assert verdict.reason == "the event loop has not turned for 6.0 s"
    assert verdict.details == {"age_s": 6.0, "limit_s": 5.0}


def test_the_pulse_beats_and_measures_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoopPulse, "INTERVAL_S", 0.001)
    beats: list[int] = []
    lags: list[float] = []

    async def main() -> Verdict:
        enough = asyncio.Event()

        def on_beat(now_ns: int) -> None:
            beats.append(now_ns)
            if len(beats) == 3:
                enough.set()

        pulse = LoopPulse(on_beat=on_beat, observe_lag=lags.append)
        beating = asyncio.create_task(pulse.run())
        await enough.wait()
        beating.cancel()
        await asyncio.wait((beating,))
        return pulse.verdict(beats[-1] + 1)

    assert _run(main).is_ok
    assert beats == sorted(beats)
    assert len(lags) == len(beats)
    assert min(lags) >= 0


# --- over HTTP -----------------------------------------------------------------------------------


def test_live_and_ready_answer_apart(path: Path) -> None:
    async def main() -> None:
        async with _server(path), _client(path) as client:
            live = await client.get("/livez")
            assert (live.status_code, live.json()) == (200, {"status": "ok"})
            assert live.headers["cache-control"] == "no-store"
            ready = await client.get("/readyz")
            assert ready.status_code == 503
            assert ready.json() == {
                "status": "unavailable",
                "reason": "no version serves",
                "details": {"waiting": 3},
            }

    _run(main)


def test_verbose_lists_the_checks(path: Path) -> None:
    async def main() -> None:
        async with _server(path, ready=lambda: combine({"loop": OK, "engine": BAD})), _client(path) as client:
            answer = await client.get("/readyz?verbose")
            assert answer.status_code == 503
            assert answer.json()["checks"] == [
                {"name": "loop", "status": "ok"},
                {
                    "name": "engine",
                    "status": "unavailable",
                    "reason": "no version serves",
                    "details": {"waiting": 3},
                },
            ]
            assert "checks" not in (await client.get("/readyz")).json()

    _run(main)


def test_a_verdict_without_parts_has_no_list_of_them(path: Path) -> None:
    async def main() -> None:
        async with _server(path, live=lambda: OK, ready=lambda: BAD), _client(path) as client:
            assert (await client.get("/livez?verbose")).json() == {"status": "ok"}
            assert (await client.get("/readyz?verbose")).json().keys() == {"status", "reason", "details"}

    _run(main)


def test_verdicts_are_asked_anew_each_time(path: Path) -> None:
    verdicts = [OK, BAD, OK]

    async def main() -> list[int]:
        async with _server(path, live=lambda: verdicts.pop(0)), _client(path) as client:
            return [(await client.get("/livez")).status_code for _time in range(3)]

    assert _run(main) == [200, 503, 200]


def test_a_check_that_raises_is_not_health(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Verdict:
        raise RuntimeError("the check itself is broken")

    async def main() -> list[int]:
        async with _server(path, live=broken), _client(path) as client:
            return [(await client.get(where)).status_code for where in ("/livez", "/readyz")]

    assert _run(main) == [500, 503]
    assert "the check itself is broken" in caplog.text


def test_metrics_in_both_formats(path: Path) -> None:
    async def main() -> tuple[httpx.Response, httpx.Response]:
        registry = new_registry("loaderd")
        loop_lag_histogram(registry).observe(0.3)
        async with HealthServer(path, lambda: OK, lambda: OK, registry), _client(path) as client:
            openmetrics = {"accept": "application/openmetrics-text; version=1.0.0"}
            return await client.get("/metrics"), await client.get("/metrics", headers=openmetrics)

    plain, openmetrics = _run(main)
    assert plain.headers["content-type"].startswith("text/plain")
    assert 'changeover_build_info{daemon="loaderd",' in plain.text
    assert 'changeover_loop_lag_seconds_bucket{le="0.5"} 1.0' in plain.text
    assert "process_open_fds " in plain.text
    assert "python_info{" in plain.text
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")


def test_two_registries_of_one_process_do_not_meet() -> None:
    for daemon in ("loaderd", "inferd"):
        registry = new_registry(daemon)
        (build,) = [metric for metric in registry.collect() if metric.name == "changeover_build"]
        assert [sample.labels["daemon"] for sample in build.samples] == [daemon]


def test_the_index_lists_the_paths_and_nothing_can_be_changed(path: Path) -> None:
    async def main() -> None:
        async with _server(path), _client(path) as client:
            assert set((await client.get("/")).json()["paths"]) == {"/livez", "/readyz", "/metrics"}
            assert (await client.post("/livez")).status_code == 405
            assert (await client.get("/nothing")).status_code == 404
            assert (await client.head("/livez")).status_code == 200

    _run(main)


def test_curl_is_answered(path: Path) -> None:
    async def main() -> tuple[int | None, bytes]:
        async with _server(path):
            curl = await asyncio.create_subprocess_exec(
                "curl", "-sS", "--fail-with-body", "--max-time", "30",
                "--unix-socket", str(path), "http://localhost/readyz",
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, _err = await curl.communicate()
            return curl.returncode, out

    code, out = _run(main)
    assert code == 22  # curl's word for an HTTP error
    assert json.loads(out)["reason"] == "no version serves"


def test_a_loop_that_hangs_does_not_answer(path: Path) -> None:
    answers: list[str] = []

    def probe() -> None:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=0.2) as client:
            try:
                answers.append(str(client.get("/livez").status_code))
            except httpx.ReadTimeout:
                answers.append("timeout")

    async def main() -> None:
        async with _server(path):
            thread = threading.Thread(target=probe)
            thread.start()
            thread.join()  # the loop does not turn until the prober has given up
            await asyncio.to_thread(probe)

    _run(main)
    assert answers == ["timeout", "200"]


# --- the socket and the server's life ------------------------------------------------------------


def test_the_socket_lasts_as_long_as_the_server(path: Path) -> None:
    async def main() -> int:
        async with _server(path):
            return path.stat().st_mode & 0o777  # noqa: ASYNC240  a temporary directory

    assert _run(main) == 0o666
    assert not path.exists()


def test_a_second_server_is_refused_and_the_first_goes_on(path: Path) -> None:
    async def main() -> int:
        async with _server(path), _client(path) as client:
            with pytest.raises(ResourceError, match="another process listens"):
                async with _server(path):
                    pass
            return (await client.get("/livez")).status_code

    assert _run(main) == 200


def test_signals_stay_with_the_process_entry(path: Path) -> None:
    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def main() -> tuple[list[object], list[object]]:
        before = handlers()
        async with _server(path):
            return before, handlers()

    before, during = _run(main)
    assert during == before


@pytest.mark.parametrize("moment", ["startup", "main_loop"])
def test_a_server_that_fails_ends_the_body(path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_args: object, **_options: object) -> None:
        raise RuntimeError("server is gone")

    monkeypatch.setattr(http_server._Server, moment, fail)

    async def main() -> None:
        async with _server(path):
            await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="server is gone"):
        _run(main)
    assert not path.exists()


def test_a_server_that_ends_by_itself_ends_the_body(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def end(_server: object) -> None:
        return

    monkeypatch.setattr(http_server._Server, "main_loop", end)

    async def main() -> None:
        async with _server(path):
            await asyncio.Event().wait()

    with pytest.raises(InvariantError, match="HTTP server ended while the daemon still needs it"):
        _run(main)


def test_an_error_of_the_body_is_raised_as_it_is(path: Path) -> None:
    async def main() -> None:
        async with _server(path):
            raise ValueError("body")

    with pytest.raises(ValueError, match=r"^body$"):
        _run(main)
    assert not path.exists()


def test_connections_are_bounded_in_number(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CONNECTIONS", 2)

    async def ask() -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(path))
        try:
            writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def main() -> tuple[bytes, bytes]:
        async with _server(path):
            _reader, first = await asyncio.open_unix_connection(str(path))
            alone = await ask()
            _reader, second = await asyncio.open_unix_connection(str(path))
            crowded = await ask()
            first.close()
            second.close()
            return alone, crowded

    alone, crowded = _run(main)
    assert alone.startswith(b"HTTP/1.1 200 OK")
    assert crowded == b""


def test_connections_are_bounded_in_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CONNECTION_S", 0.05)

    async def main() -> bytes:
        async with _server(path):
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(b"GET /livez HTTP/1.1\r\nhost: ")
            said = await reader.read()
            writer.close()
            return said

    assert _run(main) == b""


def test_an_idle_connection_does_not_hold_up_the_end(path: Path) -> None:
    async def main() -> bytes:
        async with _server(path):
            reader, writer = await asyncio.open_unix_connection(str(path))
        said = await reader.read()
        writer.close()
        return said

    assert _run(main) == b""
