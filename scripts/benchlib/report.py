"""The figures of a run: as a dictionary for JSON, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchlib.client import Record
from benchlib.load import Run
from benchlib.slo import Slo, goodput

LATENCIES = {
    "ttft": "time to first token (TTFT)",
    "itl": "inter-token latency (ITL)",
    "tpot": "time per output token (TPOT)",
    "e2e": "end to end",
}
#: A client process that uses more than this of a core is itself the bottleneck.
BUSY_CLIENT = 0.9


def summarize(run: Run, slo: Slo | None = None) -> dict[str, Any]:
    """Returns the figures of a run, times of latency in milliseconds.

    The docstring of bench.py says what each figure means.
    """
    good = [record for record in run.records if record.error is None]
    output, prompt = (
        sum(record.tokens for record in good),
        sum(record.prompt_tokens or 0 for record in good),
    )
    gaps = [np.frombuffer(record.gaps, np.float64) for record in good if record.gaps]
    duration = run.duration_s or float("inf")  # nothing was sent
    counted = [record for record in good if record.output_tokens]
    return {
        "requests": {
            "sent": len(run.records),
            "succeeded": len(good),
            "failed": len(run.records) - len(good),
        },
        "errors": count_errors(run),
        "duration_s": run.duration_s,
        "tokens": {
            "prompt": prompt,
            "output": output,
            "output_chunks": sum(record.chunks for record in good),
            "chunks_per_token": _ratio(
                sum(record.chunks for record in counted), sum(record.tokens for record in counted)
            ),
            "cached_share": cached_share(good),
            "requests_without_usage": sum(record.output_tokens is None for record in good),
            "requests_shorter_than_asked": sum(
                record.tokens < record.max_tokens for record in good
            ),
        },
        "throughput": {
            "output_tokens_per_s": output / duration,
            "total_tokens_per_s": (output + prompt) / duration,
            "requests_per_s": len(good) / duration,
        },
        "latency_ms": {
            "ttft": percentiles([record.ttft for record in good if record.ttft is not None]),
            "itl": percentiles(np.concatenate(gaps) if gaps else []),
            "tpot": percentiles([record.tpot for record in good if record.tpot is not None]),
            "e2e": percentiles([record.e2e for record in good]),
        },
        "peak_in_flight": run.peak_in_flight,
        "client_cpu": run.client_cpu,
        "client_cpus": run.client_cpus,
        "goodput": goodput(run.records, run.duration_s, slo) if slo else None,
        "turns": _by_turn(good),
    }


def cached_share(records: Sequence[Record]) -> float | None:
    """Returns the fraction of prompt tokens that were prefix-cache hits, over the replies that
    report it; None without one."""
    reported = [record for record in records if record.cached_tokens is not None]
    return _ratio(
        sum(record.cached_tokens or 0 for record in reported),
        sum(record.prompt_tokens or 0 for record in reported),
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _by_turn(good: Sequence[Record]) -> list[dict[str, Any]]:
    """Returns the figures by turn of a conversation; empty for single requests."""
    turns = []
    for number in sorted({record.turn for record in good} - {0}):
        records = [record for record in good if record.turn == number]
        ttft = percentiles([record.ttft for record in records if record.ttft is not None])
        prompt = sum(record.prompt_tokens or 0 for record in records) / len(records)
        turns.append(
            {
                "turn": number,
                "requests": len(records),
                "prompt_tokens": prompt,
                "cached_share": cached_share(records),
                "ttft_ms": ttft,
            }
        )
    return turns


def percentiles(seconds: Sequence[float] | np.ndarray) -> dict[str, float] | None:
    """Returns mean, p50, p90 and p99 in milliseconds (linear between neighbours); None for no
    values."""
    if not len(seconds):
        return None
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99)) * 1000
    return {
        "mean": float(np.mean(seconds)) * 1000,
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
    }


def count_errors(run: Run) -> list[dict[str, Any]]:
    """Returns the kinds of failure, most frequent first, each with its first example."""
    kinds: dict[str, dict[str, Any]] = {}
    for record in run.records:
        if record.error is not None:
            kind = kinds.setdefault(
                record.error, {"kind": record.error, "count": 0, "example": record.example}
            )
            kind["count"] += 1
    return sorted(kinds.values(), key=lambda kind: -kind["count"])


def show(figures: dict[str, Any], title: str, console: Console) -> None:
    """Prints the figures as tables, and the failures."""
    totals = Table(title=title, title_justify="left", show_header=False)
    totals.add_column()
    totals.add_column(justify="right")
    for name, value in _totals(figures).items():
        totals.add_row(name, value)
    console.print(totals)
    latencies = Table("milliseconds")
    for name in ("mean", "p50", "p90", "p99"):
        latencies.add_column(name, justify="right")
    for key, label in LATENCIES.items():
        if figures["latency_ms"][key] is not None:
            latencies.add_row(
                label, *(f"{value:.2f}" for value in figures["latency_ms"][key].values())
            )
    if latencies.row_count:
        console.print(latencies)
    if figures["turns"]:
        _show_turns(figures["turns"], console)
    show_remarks(figures, console)


def _totals(figures: dict[str, Any]) -> dict[str, str]:
    requests, tokens, throughput = figures["requests"], figures["tokens"], figures["throughput"]
    rows = {
        "requests": f"{requests['succeeded']} of {requests['sent']} in "
        f"{figures['duration_s']:.2f} s",
        "most at a time": str(figures["peak_in_flight"]),
        "tokens": f"{tokens['prompt']} in, {tokens['output']} out ({tokens['output_chunks']} "
        f"chunks)",
        "chunks per token": number(tokens["chunks_per_token"], ".3f"),
        "prompt tokens cached": number(tokens["cached_share"], ".1%"),
        "output tokens/s": f"{throughput['output_tokens_per_s']:.2f}",
        "total tokens/s": f"{throughput['total_tokens_per_s']:.2f}",
        "requests/s": f"{throughput['requests_per_s']:.3f}",
        "client's CPU": ", ".join(f"{cpu:.0%}" for cpu in figures["client_cpus"]) + " of a core",
    }
    if figures["goodput"]:
        good = figures["goodput"]
        limits = ", ".join(f"{name} {limit:g}" for name, limit in good["limits_ms"].items())
        rows[f"goodput ({limits} ms)"] = (
            f"{good['share']:.1%}, {good['requests_per_s']:.3f} requests/s"
        )
        rows["above the limit"] = ", ".join(
            f"{name} {count}" for name, count in good["missed"].items()
        )
    return rows


def number(value: float | None, form: str) -> str:
    """Returns a figure for a table; a dash where there is none."""
    return "–" if value is None else format(value, form)


def _show_turns(turns: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table("turn", "requests", "prompt tokens", "cached", "TTFT mean ms", "TTFT p99 ms")
    for turn in turns:
        ttft = turn["ttft_ms"] or {}
        times = number(ttft.get("mean"), ".2f"), number(ttft.get("p99"), ".2f")
        counts = (
            str(turn["turn"]),
            str(turn["requests"]),
            f"{turn['prompt_tokens']:.0f}",
            number(turn["cached_share"], ".1%"),
        )
        table.add_row(*counts, *times)
    for column in table.columns:
        column.justify = "right"
    console.print(table)


def show_remarks(figures: dict[str, Any], console: Console, where: str = "") -> None:
    """Prints the remarks on the figures, and the failures, each line after `where`."""
    tokens = figures["tokens"]
    if tokens["requests_without_usage"]:
        console.print(
            f"{where}{tokens['requests_without_usage']} replies came without usage: their output "
            f"tokens are counted as chunks, "
            "and their prompt tokens are not counted.",
            style="yellow",
        )
    if tokens["requests_shorter_than_asked"]:
        console.print(
            f"{where}{tokens['requests_shorter_than_asked']} replies ended before their "
            f"max_tokens.",
            style="yellow",
        )
    if figures["client_cpu"] > BUSY_CLIENT:
        console.print(
            f"{where}A client process used {figures['client_cpu']:.0%} of a core: it measured "
            f"itself. Use more --processes.",
            style="yellow",
        )
    for error in figures["errors"]:
        console.print(
            f"{where}{error['count']} failed: {error['kind']}, such as: {error['example']}",
            style="red",
            markup=False,
        )
