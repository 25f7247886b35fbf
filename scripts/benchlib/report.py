"""The figures of a run: as a dictionary for JSON, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchlib.load import Run

LATENCIES = {
    "ttft": "time to first token (TTFT)",
    "itl": "inter-token latency (ITL)",
    "tpot": "time per output token (TPOT)",
    "e2e": "end to end",
}


def summarize(run: Run) -> dict[str, Any]:
    """Returns the figures of a run, times of latency in milliseconds. What they mean: the docstring of bench.py."""
    good = [record for record in run.records if record.error is None]
    output, prompt = sum(record.tokens for record in good), sum(record.prompt_tokens or 0 for record in good)
    gaps = [np.frombuffer(record.gaps, np.float64) for record in good if record.gaps]
    return {
        "requests": {"sent": len(run.records), "succeeded": len(good), "failed": len(run.records) - len(good)},
        "errors": count_errors(run),
        "duration_s": run.duration_s,
        "tokens": {
            "prompt": prompt,
            "output": output,
            "output_chunks": sum(record.chunks for record in good),
            "requests_without_usage": sum(record.output_tokens is None for record in good),
            "requests_shorter_than_asked": sum(record.tokens < record.max_tokens for record in good),
        },
        "throughput": {
            "output_tokens_per_s": output / run.duration_s,
            "total_tokens_per_s": (output + prompt) / run.duration_s,
            "requests_per_s": len(good) / run.duration_s,
        },
        "latency_ms": {
            "ttft": percentiles([record.ttft for record in good if record.ttft is not None]),
            "itl": percentiles(np.concatenate(gaps) if gaps else []),
            "tpot": percentiles([record.tpot for record in good if record.tpot is not None]),
            "e2e": percentiles([record.e2e for record in good]),
        },
        "peak_in_flight": run.peak_in_flight,
        "client_cpu": run.client_cpu,
    }


def percentiles(seconds: Sequence[float] | np.ndarray) -> dict[str, float] | None:
    """Returns mean, p50, p90 and p99 in milliseconds (linear between neighbours); None for no values."""
    if not len(seconds):
        return None
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99)) * 1000
    return {"mean": float(np.mean(seconds)) * 1000, "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def count_errors(run: Run) -> list[dict[str, Any]]:
    """Returns the kinds of failure, most frequent first, each with its first example."""
    kinds: dict[str, dict[str, Any]] = {}
    for record in run.records:
        if record.error is not None:
            kind = kinds.setdefault(record.error, {"kind": record.error, "count": 0, "example": record.example})
            kind["count"] += 1
    return sorted(kinds.values(), key=lambda kind: -kind["count"])


def show(figures: dict[str, Any], title: str, console: Console) -> None:
    """Prints the figures as two tables, and the failures."""
    requests, tokens, throughput = figures["requests"], figures["tokens"], figures["throughput"]
    totals = Table(title=title, title_justify="left", show_header=False)
    totals.add_column()
    totals.add_column(justify="right")
    for name, value in {
        "requests": f"{requests['succeeded']} of {requests['sent']} in {figures['duration_s']:.2f} s",
        "most at a time": str(figures["peak_in_flight"]),
        "tokens": f"{tokens['prompt']} in, {tokens['output']} out ({tokens['output_chunks']} chunks)",
        "output tokens/s": f"{throughput['output_tokens_per_s']:.2f}",
        "total tokens/s": f"{throughput['total_tokens_per_s']:.2f}",
        "requests/s": f"{throughput['requests_per_s']:.3f}",
        "client's CPU": f"{figures['client_cpu']:.0%} of a core",
    }.items():
        totals.add_row(name, value)
    console.print(totals)
    latencies = Table("milliseconds")
    for name in ("mean", "p50", "p90", "p99"):
        latencies.add_column(name, justify="right")
    for key, label in LATENCIES.items():
        if figures["latency_ms"][key] is not None:
            latencies.add_row(label, *(f"{value:.2f}" for value in figures["latency_ms"][key].values()))
    if latencies.row_count:
        console.print(latencies)
    _show_remarks(figures, console)


def _show_remarks(figures: dict[str, Any], console: Console) -> None:
    tokens = figures["tokens"]
    if tokens["requests_without_usage"]:
        console.print(
            f"{tokens['requests_without_usage']} replies came without usage: their output tokens are counted as chunks, "
            "and their prompt tokens are not counted.",
            style="yellow",
        )
    if tokens["requests_shorter_than_asked"]:
        console.print(f"{tokens['requests_shorter_than_asked']} replies ended before their max_tokens.", style="yellow")
    for error in figures["errors"]:
        console.print(f"{error['count']} failed: {error['kind']}, such as: {error['example']}", style="red", markup=False)
