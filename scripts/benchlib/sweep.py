"""A sweep: the same load at several concurrencies or rates, one point after another, and its table.

Called by `bench.py`.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchlib.report import number, show_remarks
from benchlib.slo import ENOUGH

KINDS = ("concurrency", "rate")


@dataclass(frozen=True, slots=True)
class Sweep:
    """The values that one setting takes in turn.

    `kind` is one of `KINDS`; a rate may be infinite.
    """

    kind: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """Reads "concurrency=1,2,4" or "rate=0.5,1,inf". Raises `ArgumentTypeError`."""
        kind, _, numbers = text.partition("=")
        try:
            values: tuple[float, ...] = tuple(
                (int if kind == "concurrency" else float)(value) for value in numbers.split(",")
            )
        except ValueError:
            values = (0,)
        if kind not in KINDS or not all(value > 0 for value in values):
            raise ArgumentTypeError(
                f"{text!r} is no sweep: write concurrency=1,2,4,8 or rate=0.5,1,2,inf"
            )
        return cls(kind, values)

    def __str__(self) -> str:
        return f"{self.kind}={','.join(f'{value:g}' for value in self.values)}"


def best_point(points: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the point of the greatest value whose goodput is enough (`slo.ENOUGH`); None if there
    is none."""
    enough = [point for point in points if point["goodput"] and point["goodput"]["share"] >= ENOUGH]
    return max(enough, key=lambda point: point["value"], default=None)


def show_sweep(points: Sequence[dict[str, Any]], kind: str, title: str, console: Console) -> None:
    """Prints a row a point, and the remarks on each.

    A point holds its `value` and the figures of `report.summarize`.
    """
    with_goodput = any(point["goodput"] for point in points)
    table = Table(kind, title=title, title_justify="left")
    names = [
        "requests",
        "tokens/s",
        "requests/s",
        "TTFT p50",
        "p99",
        "ITL p50",
        "p99",
        "TPOT p50",
        "e2e p50",
        "p99",
        "chunks/token",
        "cached",
    ]
    for name in (*names, *(["goodput", "good requests/s"] if with_goodput else [])):
        table.add_column(name)
    for column in table.columns:
        column.justify = "right"
    for point in points:
        table.add_row(*_cells(point), *(_goodput_cells(point) if with_goodput else []))
    console.print(table)
    for point in points:
        show_remarks(point, console, f"{kind} {point['value']:g}: ")
    if with_goodput:
        best = best_point(points)
        if best is None:
            console.print(f"At no {kind} did {ENOUGH:.0%} of the requests meet the limits.")
        else:
            share, rate = best["goodput"]["share"], best["goodput"]["requests_per_s"]
            text = (
                f"The greatest {kind} at which {ENOUGH:.0%} met the limits: {best['value']:g} "
                f"({share:.1%}, {rate:.3f} good requests/s)"
            )
            console.print(text)


def _cells(point: dict[str, Any]) -> list[str]:
    requests, tokens, throughput, latency = (
        point["requests"],
        point["tokens"],
        point["throughput"],
        point["latency_ms"],
    )
    times = (
        ("ttft", "p50"),
        ("ttft", "p99"),
        ("itl", "p50"),
        ("itl", "p99"),
        ("tpot", "p50"),
        ("e2e", "p50"),
        ("e2e", "p99"),
    )
    return [
        f"{point['value']:g}",
        f"{requests['succeeded']}/{requests['sent']}",
        f"{throughput['output_tokens_per_s']:.1f}",
        f"{throughput['requests_per_s']:.3f}",
        *(number((latency[name] or {}).get(which), ".1f") for name, which in times),
        number(tokens["chunks_per_token"], ".3f"),
        number(tokens["cached_share"], ".1%"),
    ]


def _goodput_cells(point: dict[str, Any]) -> list[str]:
    return [f"{point['goodput']['share']:.1%}", f"{point['goodput']['requests_per_s']:.3f}"]
