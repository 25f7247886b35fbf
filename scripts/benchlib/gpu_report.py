"""The rows of `bench_gpu.py`: printed as they come, compared with vLLM's figures, and shown as a
table at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchlib.gpu_cases import Model
from benchlib.vllm_figures import Figures

#: Under this name a row holds the figures of `benchlib/vllm_figures.py` for its case.
KNOWN = "vllm_0.25.1_h200"
_OURS = {"out": "output_tokens_per_s", "in": "input_tokens_per_s", "s": "seconds"}


class Rows:
    """The figures of all cases: printed and written as JSON lines as they come, and kept for the
    table."""

    def __init__(self, file: Path | None):
        self.rows: list[dict[str, Any]] = []
        self._file = file
        if file is not None:
            file.write_text("", "utf-8")

    def add(self, model: Model, case: str, figures: dict[str, Any]) -> None:
        """Adds vLLM's figures to a case's figures, and prints them."""
        row = {"model": model.folder.name, "case": case, **figures}
        if "error" not in row and (known := model.figures.get(case)):
            row |= compare(row, known)
        self.rows.append(row)
        line = json.dumps(row, default=list)  # of ranges: the layers of stages
        print(line, flush=True)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def failed(self) -> bool:
        """Whether a case did not count."""
        return any("error" in row for row in self.rows)


def compare(row: dict[str, Any], known: Figures) -> dict[str, Any]:
    """Returns vLLM's figures, the mark, the ratio to vLLM (above 1 is better) and whether the mark
    is reached."""
    ours = row[_OURS[known.unit]]
    lower_is_better = known.unit == "s"
    found: dict[str, Any] = {
        name: value for name, value in asdict(known).items() if value is not None
    }
    result: dict[str, Any] = {KNOWN: found}
    if known.vllm is not None:
        result["ratio_to_vllm"] = known.vllm / ours if lower_is_better else ours / known.vllm
    if known.mark is not None:
        reached = ours <= known.mark if lower_is_better else ours >= known.mark
        if known.itl_p99_mark is not None and known.ttft is not None:
            ttft = row["ttft_ms"]["mean"], row["ttft_ms"]["p99"]
            reached &= row["itl_ms"]["p99"] < known.itl_p99_mark
            reached &= all(
                value <= limit
                for value, limit in zip(ttft, known.ttft, strict=True)
                if limit is not None
            )
        result["mark_reached"] = reached
    return result


def show(rows: Sequence[dict[str, Any]], http: bool, console: Console) -> None:
    """Prints the table of all rows."""
    table = Table(
        "model",
        "case",
        "s",
        "tokens/s out",
        "tokens/s in",
        title="aioinfer, and vLLM 0.25.1 on H200s",
        title_justify="left",
    )
    own = (
        [
            "TTFT mean / p99 ms",
            "vLLM's",
            "ITL p50 / p99 ms",
            "vLLM's",
            "chunks/token",
            "client's CPU",
        ]
        if http
        else ["steps", "step ms"]
    )
    for name in (*own, "vLLM", "mark", "ratio"):
        table.add_column(name)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        if "error" in row:
            table.add_row(row["model"], row["case"], "[red]failed[/red]")
            continue
        known = row.get(KNOWN, {})
        rates = [
            _number(row.get(name), 1) for name in ("output_tokens_per_s", "input_tokens_per_s")
        ]
        mark = (
            _number(known.get("mark"), 0)
            + {None: "", True: " ✓", False: " ✗"}[row.get("mark_reached")]
        )
        cells = (
            _http_cells(row, known)
            if http
            else [_number(row.get("steps"), 0), _number(row.get("step_ms"), 2)]
        )
        last = [_number(known.get("vllm"), 1), mark, _number(row.get("ratio_to_vllm"), 2)]
        table.add_row(row["model"], row["case"], f"{row['seconds']:.2f}", *rates, *cells, *last)
    console.print(table)


def _http_cells(row: dict[str, Any], known: dict[str, Any]) -> list[str]:
    if "ttft_ms" not in row:
        return [""] * 6
    pairs = (
        row["ttft_ms"].values(),
        known.get("ttft", ()),
        row["itl_ms"].values(),
        known.get("itl", ()),
    )
    latencies = [" / ".join(_number(value, 1) or "–" for value in pair) for pair in pairs]
    return [*latencies, f"{row['chunks_per_token']:.2f}", f"{row['client_cpu']:.0%}"]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}".replace(",", " ")
