"""Two result files of `bench.py` beside each other. Called by `bench.py --compare`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchlib.report import LATENCIES, number

#: Settings that may differ: where the load goes, which draw of its random numbers, and how it is
#: looked at.
FREE = frozenset({"url", "model", "seed", "processes", "timeout", "slo"})
#: A change below this share is neither better nor worse.
SAME = 0.005


class WorkloadMismatchError(ValueError):
    """Two result files are of different loads."""


def read_result(file: Path) -> dict[str, Any]:
    """Returns the result that `bench.py --output` wrote.

    Raises `ValueError` if it is something else, `OSError` if it cannot be read.
    """
    try:
        result = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if (
        not isinstance(result, dict)
        or "settings" not in result
        or not ("points" in result or "latency_ms" in result)
    ):
        raise ValueError(f"{file} was not written by bench.py --output")
    return result


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[str]:
    """Returns the settings of the workload that differ, each with both values.

    One that an older file lacks had its default.
    """
    found = []
    for name in sorted((first.keys() | second.keys()) - FREE):
        values = [settings.get(name, defaults.get(name)) for settings in (first, second)]
        if values[0] != values[1]:
            found.append(f"--{name.replace('_', '-')} ({_text(values[0])} and {_text(values[1])})")
    return found


def _text(value: Any) -> str:
    return "not set" if value is None else str(value)


def compare(
    first: dict[str, Any], second: dict[str, Any], defaults: Mapping[str, Any], *, force: bool
) -> list[str]:
    """Returns the settings that differ.

    Raises `WorkloadMismatchError` naming them, unless forced.
    """
    found = differences(first["settings"], second["settings"], defaults)
    if found and not force:
        raise WorkloadMismatchError(
            f"the workloads differ in {', '.join(found)}; --force compares them all the same"
        )
    return found


def show_comparison(
    first: dict[str, Any], second: dict[str, Any], names: tuple[str, str], console: Console
) -> None:
    """Prints a table for each point that both results have; the ratio is second to first."""
    points, others = _points(first), _points(second)
    for label, figures in points.items():
        if label not in others:
            continue
        table = Table(label or "metric", *names, "ratio", "")
        for column in table.columns[1:]:
            column.justify = "right"
        other = dict(_metrics(others[label]))
        for (name, more_is_better), value in _metrics(figures):
            against = other.get((name, more_is_better))
            if value is not None or against is not None:
                table.add_row(
                    name,
                    number(value, ",.3f"),
                    number(against, ",.3f"),
                    *_verdict(value, against, more_is_better),
                )
        console.print(table)
    if alone := [label for label in (*points, *others) if (label in points) != (label in others)]:
        console.print(
            f"Only in one of them: {', '.join(label or 'a single point' for label in alone)}",
            style="yellow",
        )


def _points(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the figures of a result by point; a run that was no sweep is a point without a
    name."""
    if "points" not in result:
        return {"": result}
    return {f"{result['sweep']} {point['value']}": point for point in result["points"]}


def _metrics(figures: dict[str, Any]) -> Iterator[tuple[tuple[str, bool], float | None]]:
    """Yields name, whether more is better, and value. Older files lack the last ones."""
    requests, tokens = figures["requests"], figures["tokens"]
    yield (
        ("failed, % of requests", False),
        100 * requests["failed"] / requests["sent"] if requests["sent"] else None,
    )
    yield ("output tokens/s", True), figures["throughput"]["output_tokens_per_s"]
    yield ("total tokens/s", True), figures["throughput"]["total_tokens_per_s"]
    yield ("requests/s", True), figures["throughput"]["requests_per_s"]
    for key in LATENCIES:
        for which, value in (figures["latency_ms"][key] or {}).items():
            yield (f"{key.upper() if key != 'e2e' else key} {which} ms", False), value
    yield ("chunks per token", True), tokens.get("chunks_per_token")
    share = tokens.get("cached_share")
    yield ("prompt tokens cached, %", True), None if share is None else 100 * share
    if good := figures.get("goodput"):
        # other limits are another metric
        limits = ", ".join(f"{name} {limit:g}" for name, limit in good["limits_ms"].items())
        yield (f"goodput, % ({limits} ms)", True), 100 * good["share"]
        yield (f"good requests/s ({limits} ms)", True), good["requests_per_s"]


def _verdict(first: float | None, second: float | None, more_is_better: bool) -> tuple[str, str]:
    """Returns the ratio, and an arrow: up for better, down for worse."""
    if first is None or second is None:
        return "–", ""
    ratio = f"{second / first:.3f}" if first else "–"
    if abs(second - first) <= SAME * abs(first):
        return ratio, "="
    return ratio, "[green]▲ better[/green]" if (
        second > first
    ) == more_is_better else "[red]▼ worse[/red]"
