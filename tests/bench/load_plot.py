"""A report as a picture: the loaders' rates at each place, and the limits as lines."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from tests.bench.load_report import OURS, PLACES, Report, Verification, limits, rows

_OURS, _OTHERS, _LIMIT = "#1b6ca8", "#9aa5b1", "#c0392b"


def draw(report: Report, target: Path) -> None:
    """Write an SVG that is the same for the same report."""
    table = [row for row in rows(report) if row.is_right]
    places = [place for place in PLACES if any(row.place == place for row in table)]
    heights = [sum(row.place == place for row in table) for place in places]
    # Text stays text; ids and metadata do not change from one drawing to the next.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "changeover", "font.size": 9}):
        figure = Figure(
            figsize=(8, 1.0 + sum(0.3 * height + 0.75 for height in heights)), layout="constrained"
        )
        axes = figure.subplots(len(places), 1, height_ratios=heights, squeeze=False)[:, 0]
        for axis, place in zip(axes, places, strict=True):
            here = sorted((row for row in table if row.place == place), key=lambda row: row.gb_s)
            labels = [
                row.loader + ("" if row.verification is Verification.NONE else f", {row.verification}")
                for row in here
            ]
            colours = [_OURS if row.loader == OURS else _OTHERS for row in here]
            bars = axis.barh(labels, [row.gb_s for row in here], color=colours)
            axis.bar_label(bars, fmt="%.1f", padding=3)
            ceilings = limits(report, place)
            for (name, value), style in zip(sorted(ceilings.items()), ("--", ":", "-."), strict=False):
                axis.axvline(value, color=_LIMIT, linestyle=style, label=f"{name}, {value:.1f}")
            if ceilings:
                axis.legend(loc="lower right", fontsize=8)
            axis.set_xlim(0, 1.12 * max([row.gb_s for row in here] + list(ceilings.values())))
            axis.set_title(place, loc="left", fontweight="bold")
            axis.spines[["top", "right"]].set_visible(False)
        axes[-1].set_xlabel("GB/s, median")
        machine = report["machine"]
        figure.suptitle(
            f"{report['model']['bytes'] / 1e9:.1f} GB in {report['model']['shards']} shards, "
            f"{machine.get('gpu', machine['cpu'])}, {machine['cores']} cores, {report['date']}"
        )
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
