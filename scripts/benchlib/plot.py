"""Figures as a PNG file.

Called by `bench.py --plot`; matplotlib, an extra of this project, is imported only here, and only
then.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchlib.client import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "--plot needs matplotlib, which is not installed: pip install 'matplotlib>=3.9'"
#: Inches of a panel, and dots an inch.
_WIDTH, _HEIGHT, _DPI = 5.5, 4.2, 110
_BINS = 60


def is_available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot_sweep(points: Sequence[dict[str, Any]], kind: str, title: str, file: Path) -> None:
    """Draws throughput, TTFT and ITL over the points of a sweep; see `sweep.show_sweep` for what a
    point holds."""
    figure, panels = _panels(title, 3)
    # evenly spaced: values double, as a rule, and may be infinite
    labels = [f"{point['value']:g}" for point in points]
    throughput = [point["throughput"]["output_tokens_per_s"] for point in points]
    panels[0].plot(labels, throughput, marker="o", label="output tokens/s")
    panels[0].set(title="throughput", xlabel=kind, ylabel="output tokens/s")
    panels[0].set_ylim(bottom=0)
    for panel, key in zip(panels[1:], ("ttft", "itl"), strict=True):
        for which in ("p50", "p90", "p99"):
            panel.plot(
                labels,
                [(point["latency_ms"][key] or {}).get(which, np.nan) for point in points],
                marker="o",
                label=which,
            )
        limits = {
            point["goodput"]["limits_ms"].get(key) for point in points if point["goodput"]
        } - {None}
        for limit in limits:
            panel.axhline(limit, linestyle="--", color="gray", label=f"limit, {limit:g} ms")
        panel.set(title=key.upper(), xlabel=kind, ylabel="ms")
        panel.set_ylim(bottom=0)
        panel.legend()
    figure.savefig(file, format="png", dpi=_DPI)


def plot_run(records: Sequence[Record], title: str, file: Path) -> None:
    """Draws the distributions of TTFT and ITL over all successful requests, and the output tokens a
    second over time."""
    good = [record for record in records if record.error is None]
    figure, panels = _panels(title, 3)
    gaps = [np.frombuffer(record.gaps, np.float64) for record in good if record.gaps]
    ttft = np.array([record.ttft for record in good if record.ttft is not None])
    _histogram(panels[0], ttft, "TTFT", "requests")
    _histogram(panels[1], np.concatenate(gaps) if gaps else np.empty(0), "ITL", "chunks")
    if any(record.tokens for record in good):
        seconds, rates = tokens_over_time(good)
        panels[2].step(seconds, rates, where="post")
    panels[2].set(title="throughput", xlabel="s", ylabel="output tokens/s")
    panels[2].set_ylim(bottom=0)
    figure.savefig(file, format="png", dpi=_DPI)


def tokens_over_time(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the beginnings of equal spans of time in seconds from the first request's sending,
    and the output tokens a second in each.

    A request's tokens are spread evenly over its chunks; the tokens of a reply that was not
    streamed come at its end.
    """
    begin = min(record.sent for record in records)
    times, weights = [], []
    for record in records:
        arrived = [record.e2e] if record.ttft is None else np.cumsum([record.ttft, *record.gaps])
        times.append(record.sent - begin + np.asarray(arrived))
        weights.append(np.full(len(arrived), record.tokens / len(arrived)))
    end = max(record.sent + record.e2e for record in records) - begin
    counts, edges = np.histogram(
        np.concatenate(times), bins=_BINS, range=(0.0, end), weights=np.concatenate(weights)
    )
    return edges[:-1], counts / (edges[1] - edges[0])


def _panels(title: str, count: int) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and looks for a display

    figure = Figure(figsize=(_WIDTH * count, _HEIGHT), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, count)
    for panel in panels:
        panel.grid(alpha=0.3)
    return figure, panels


def _histogram(panel: Axes, seconds: np.ndarray, name: str, unit: str) -> None:
    panel.set(title=name, xlabel="ms", ylabel=unit)
    if not len(seconds):
        return
    panel.hist(seconds * 1000, bins=_BINS)
    for which in (50, 99):
        value = np.percentile(seconds, which) * 1000
        panel.axvline(
            value,
            linestyle="--",
            color="gray" if which == 50 else "black",
            label=f"p{which} {value:.1f} ms",
        )
    panel.legend()
