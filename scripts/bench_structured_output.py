"""Measures the cost of structured output: a server's throughput and latencies with and without a
JSON schema.

    python scripts/bench_structured_output.py --model FOLDER --streams 1,64,256 --rounds 3

Starts `python -m aioinfer` with random weights at the true shape of the model in FOLDER, which
holds config.json and a tokenizer, and sends streamed completions of 128 prompt tokens and 256
output tokens, three a stream. Each round sends the load several times: plain, with every request
under a JSON schema (an array of objects that cannot end within 256 tokens), and with every request
under the same schema with strings of at most 12 characters. That is a hard one: which tokens fit
into the rest of a string takes a thread 1.5 ms, and 4 to 100 us where strings may be long. From 256
streams on the load is sent once more with one request in each 256 under the first schema, and all
others plain.

Prompts are token ids, end tokens are ignored, the temperature is 0, the prefix cache is off. A
round counts only if each request returned exactly its number of tokens. Printed are medians of the
rounds: output tokens/s, their ratio to the plain load, TTFT and ITL in ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchlib.client_processes import ClientProcesses
from benchlib.gpu_cases import TOKEN_IDS, Model
from benchlib.load import Run
from benchlib.report import count_errors, percentiles
from benchlib.server_process import ServerProcess
from benchlib.workload import Call, RequestShape

PROMPT_LEN, OUTPUT_LEN, PER_STREAM = 128, 256, 3


def make_fields(max_length: int) -> dict[str, Any]:
    """Returns the fields of a request under the schema, with strings of `max_length` characters at
    most."""
    properties = {
        "name": {"type": "string", "maxLength": max_length},
        "kind": {"enum": ["tool", "part", "person"]},
        "count": {"type": "integer"},
        "done": {"type": "boolean"},
    }
    item = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    schema = {"type": "array", "minItems": 100_000, "items": item}
    form = {"type": "json_schema", "json_schema": {"name": "things", "schema": schema}}
    return {"response_format": form}


#: By name of the load: the further fields of its requests, and every which of them has these.
LOADS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 1),
    "schema": (make_fields(100), 1),
    "short strings": (make_fields(12), 1),
    "one of 256": (make_fields(100), 256),
}


def make_calls(
    shape: RequestShape, count: int, load: str, random: np.random.Generator
) -> list[Call]:
    """Returns the `count` requests of a load."""
    fields, every = LOADS[load]
    calls = []
    for number in range(count):
        prompt = random.integers(TOKEN_IDS.low, TOKEN_IDS.high, PROMPT_LEN).tolist()
        body = shape.body(prompt, OUTPUT_LEN, {} if number % every else fields)
        calls.append(Call(body, OUTPUT_LEN))
    return calls


def summarize(run: Run) -> dict[str, float]:
    """Returns the figures of a round. Raises `RuntimeError` if a request failed or was short."""
    for error in count_errors(run):
        raise RuntimeError(f"{error['count']} requests failed: {error['example']}")
    found = {record.output_tokens for record in run.records}
    if found != {OUTPUT_LEN}:
        raise RuntimeError(f"requests returned {sorted(map(str, found))} tokens, not {OUTPUT_LEN}")
    ttft = percentiles([record.ttft for record in run.records if record.ttft is not None])
    itl = percentiles([gap for record in run.records for gap in record.gaps if gap > 0])
    if ttft is None or itl is None:
        raise RuntimeError("no reply held text at two times")
    return {
        "tokens/s": OUTPUT_LEN * len(run.records) / run.duration_s,
        "TTFT mean": ttft["mean"],
        "TTFT p99": ttft["p99"],
        "ITL p50": itl["p50"],
        "ITL p99": itl["p99"],
    }


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each figure."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def measure(
    clients: ClientProcesses, url: str, shape: RequestShape, streams: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Returns the figures of the loads with so many streams, by the name of the load."""
    loads = [name for name, (_, every) in LOADS.items() if streams >= every]
    random = np.random.default_rng(streams)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in loads}
    for number in range(-1, rounds):  # the first is a warm-up
        for name in loads:
            calls = make_calls(shape, PER_STREAM * streams, name, random)
            figures = summarize(clients.run_load(url, shape, calls, streams))
            if number >= 0:
                found[name].append(figures)
    return {name: medians(each) for name, each in found.items()}


def show(streams: int, loads: dict[str, dict[str, float]], console: Console) -> None:
    """Prints a table, a row a load."""
    table = Table("load", *loads["plain"], "ratio", title=f"{streams} streams")
    for name, figures in loads.items():
        ratio = figures["tokens/s"] / loads["plain"]["tokens/s"]
        table.add_row(name, *(f"{value:.1f}" for value in figures.values()), f"{ratio:.3f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Measures what structured output costs.")
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--streams", default="1,64,256", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--client-processes", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args(arguments)
    model = Model.load(options.model)
    settings = [
        f"model.path={model.folder}",
        "model.load_format=dummy",
        'server.served_model_names=["model"]',
        "model.max_model_len=4096",
        "scheduler.max_num_seqs=512",
        "cache.enable_prefix_caching=false",
        *options.set,
    ]
    console = Console(width=120)
    shape = RequestShape("model", ignore_eos=True)
    with (
        ClientProcesses(options.client_processes) as clients,
        ServerProcess(os.devnull, settings) as server,
    ):
        for streams in map(int, options.streams.split(",")):
            show(streams, measure(clients, server.url, shape, streams, options.rounds), console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
