"""The whole demo with the generated model: real daemons, real clients, every expectation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_the_demo_passes_with_the_generated_model_and_reports_what_it_measured(tmp_path: Path) -> None:
    report_path = tmp_path / "out" / "report.json"
    result = subprocess.run(
        [sys.executable, "-m", "demo", "--build", str(tmp_path / "build"), "--model", "tiny"],
        cwd=ROOT,
        env={**os.environ, "DEMO_REPORT": str(report_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(report_path.read_text())
    assert report["passed"] is True
    assert "generated" in report["model"]
    assert report["requests_failed"] == 0
    assert report["requests_mixed_version"] == 0
    assert report["requests_total"] >= 40
    assert (report["swaps"], report["rollbacks"], report["refused"]) == (3, 5, 3)
    assert report["flip_us"]["count"] == 3
    assert report["rollback_us"]["count"] == 5
    assert report["itl_ms_quiet"]["count"] > 0
    assert report["itl_ms_push"]["count"] > 0
    assert 0 < report["version_weight_bytes"] <= report["peak_weight_bytes"]
    assert report["versions"]
    assert all(version["requests"] > 0 for version in report["versions"])
