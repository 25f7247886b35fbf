r"""Throughput and latency with adapters (LoRA) over HTTP: a model with random weights, and random
adapters of all of its linear layers.

    python scripts/bench_adapters.py                      # the shape of Qwen3-8B, all rows
    python scripts/bench_adapters.py --experts            # the shape of Qwen3-30B-A3B
    python scripts/bench_adapters.py --model FOLDER --rows plain,many,half --streams 64,256
    python scripts/bench_adapters.py --rows zipf --disk 200 --set lora.max_adapters=32

Rows, each streamed completions of `--input-len` tokens in and `--output-len` out, two requests a
stream (three up to 64):
    plain   no request has an adapter, on the server with 8 slots
    many    request i has adapter i modulo 8, of rank 16
    half    every second request has one; "bare_of_plain" is the part of plain's tokens a second
            that a stream has whose request has none
    wide    as many, of rank 64, on a server of its own
    zipf    requests choose among `--disk` adapters on disk, the n-th with a weight of 1 / n, on a
            server with 64 slots; 64 streams. Cold: the first request of an adapter, warm: others

With `--experts` adapters change the experts, too, there are four of them, and the rows are plain,
many and half.

"of plain" is the part of the tokens a second that the row "plain" has with as many streams, on the
first server; for zipf on its own server, where that comes first. Adapters on disk beyond the first
few are links to these: what a cold one costs is without the disk's own time. Each server's first
requests warm it up. `--json` gets a line for each row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

from benchlib.client import Client, Record
from benchlib.server_process import ServerProcess, exiting_at_signals
from benchlib.shapes import QWEN3_8B, QWEN3_30B_A3B
from benchlib.workload import RequestShape

#: Adapters that share steps, also of experts, and adapters with files of their own: one of experts
#: has over a gigabyte.
MANY, MANY_EXPERTS, FILES = 8, 4, 16
ROWS = ("plain", "many", "half", "wide", "zipf")
#: Returns the adapter of a request by its number; None for none.
Choice = Callable[[int], str | None]


def write_model(folder: Path, shape: dict[str, Any]) -> Path:
    """Writes a shape, and a tokenizer with a word for each token."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape), "utf-8")
    words = {f"word{token}": token for token in range(151_936)}
    tokenizer = Tokenizer(models.WordLevel(words, "word0"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def matrices_of(
    config: dict[str, Any], rank: int, *, has_experts: bool
) -> dict[str, tuple[int, int]]:
    """Returns the shapes of an adapter's tensors by their names, of the linear layers of a
    Llama-like model, and of its stacked experts, whose parameters peft nests."""
    hidden, size = config["hidden_size"], config.get("head_dim") or 128
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    modules = {
        "self_attn.q_proj": (queries, hidden, 1), "self_attn.k_proj": (keys, hidden, 1),
        "self_attn.v_proj": (keys, hidden, 1), "self_attn.o_proj": (hidden, queries, 1),
    }  # fmt: skip
    if has_experts:
        width = config["moe_intermediate_size"]
        experts = config.get("num_experts") or config["num_local_experts"]
        modules["mlp.experts.base_layer"] = 2 * width, hidden, experts
        modules["mlp.experts"] = hidden, width, experts
    else:
        width = config["intermediate_size"]
        modules |= {f"mlp.{name}_proj": (width, hidden, 1) for name in ("gate", "up")}
        modules["mlp.down_proj"] = hidden, width, 1
    shapes = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (out, inputs, stacked) in modules.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}.lora_"
            shapes[f"{prefix}A.weight"] = stacked * rank, inputs
            shapes[f"{prefix}B.weight"] = out, stacked * rank
    return shapes


def write_adapters(
    folder: Path, config: dict[str, Any], rank: int, count: int, *, has_experts: bool
) -> dict[str, Path]:
    """Writes random adapters, and returns the folder of each by name; all beyond `FILES`, or beyond
    the first of experts, are links."""
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    if has_experts:
        fields["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    text, files, found = json.dumps(fields), 1 if has_experts else FILES, {}
    shapes = matrices_of(config, rank, has_experts=has_experts)
    for number in range(count):
        own = found[f"adapter-{rank}-{number}"] = folder / f"{rank}-{number}"
        own.mkdir(parents=True, exist_ok=True)
        (own / "adapter_config.json").write_text(text, "utf-8")
        file = own / "adapter_model.safetensors"
        if file.exists():  # of a server before
            continue
        if number >= files:
            file.hardlink_to(folder / f"{rank}-{number % files}" / file.name)
            continue
        generator = torch.Generator().manual_seed(number)
        tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16).uniform_(
                -0.02, 0.02, generator=generator
            )
            for name, shape in shapes.items()
        }
        save_file(tensors, file)
    return found


async def send_requests(
    url: str, streams: int, count: int, choose: Choice, options: argparse.Namespace, seed: int
) -> tuple[list[tuple[str | None, Record]], float]:
    """Returns (adapter, record) of `count` requests in the order of sending, of which so many
    `streams` are in flight at a time, and the seconds that all took."""
    found: list[tuple[str | None, Record]] = []
    free, random = asyncio.Semaphore(streams), np.random.default_rng([seed, streams])

    async with Client(url) as client:
        base = await client.first_model()

        async def send(name: str | None, prompt: list[int]) -> None:
            shape = RequestShape(name or base, ignore_eos=True)
            record = await client.send(shape, shape.call(prompt, options.output_len))
            free.release()
            if record.error is not None:
                raise RuntimeError(f"{name or base}: {record.error}: {record.example}")
            found.append((name, record))

        began = perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                await free.acquire()
                prompt = random.integers(1, options.vocab_size, options.input_len).tolist()
                group.create_task(send(choose(number), prompt))
        seconds = perf_counter() - began
    return sorted(found, key=lambda each: each[1].sent), seconds


def percentile(times: Sequence[float], part: float) -> float:
    """Returns a percentile in ms; NaN of nothing."""
    return round(1000 * float(np.percentile(times, part)), 1) if times else float("nan")


def times_to_first(found: Sequence[tuple[str | None, Record]]) -> dict[str, Any]:
    """Returns the times to the first token, in ms, of the first request of each adapter and of all
    later ones."""
    seen: set[str | None] = set()
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    for name, record in found:
        assert record.ttft is not None
        times["warm" if name in seen else "cold"].append(record.ttft)
        seen.add(name)
    figures: dict[str, Any] = {}
    for kind, of_kind in times.items():
        figures[f"{kind}_requests"] = len(of_kind)
        for part in (50, 90, 99):
            figures[f"{kind}_ttft_p{part}_ms"] = percentile(of_kind, part)
    return figures


class Bench:
    """The rows so far, of one run of the script.

    Args:
        options: of the command line.
        work: a folder for models and adapters.
    """

    def __init__(self, options: argparse.Namespace, work: Path):
        self._options, self._work = options, work
        shape = QWEN3_30B_A3B if options.experts else QWEN3_8B
        self._model = options.model or write_model(work / "model", shape)
        self._config = json.loads((self._model / "config.json").read_text("utf-8"))
        options.vocab_size = self._config["vocab_size"]
        #: of the row "plain", by streams: tokens a second, and seconds a token of a stream
        self._plain: dict[int, tuple[float, float]] = {}
        self.rows: list[dict[str, Any]] = []

    def run(self) -> None:
        """Runs all rows, on a server for each kind of adapters."""
        wanted, streams = self._options.rows, self._options.streams
        if {"plain", "many", "half"} & set(wanted):
            many = MANY_EXPERTS if self._options.experts else MANY
            with self._server(16, many, many) as (url, names):
                choices: dict[str, Choice] = {
                    "plain": lambda number: None,
                    "many": lambda number: names[number % many],
                    "half": lambda number: names[number // 2 % many] if number % 2 else None,
                }
                self._warm_up(url, choices["half"])
                for row, choose in choices.items():
                    for count in streams if row in wanted else ():
                        self._measure(row, url, count, choose)
        if "wide" in wanted:
            with self._server(64, MANY, MANY) as (url, names):
                self._warm_up(url, lambda number: names[number % MANY])
                for count in streams:
                    self._measure("wide", url, count, lambda number: names[number % MANY])
        if "zipf" in wanted:
            with self._server(16, self._options.disk, 64) as (url, names):
                weights = 1 / np.arange(1, len(names) + 1)
                random = np.random.default_rng(1)
                chosen = random.choice(len(names), 4096, p=weights / weights.sum())
                self._warm_up(url, lambda number: None)
                self._plain.clear()  # of another server
                self._measure("plain", url, 64, lambda number: None)
                self._measure("zipf", url, 64, lambda number: names[int(chosen[number])], 5)

    def _server(self, rank: int, count: int, slots: int) -> _Server:
        has_experts = self._options.experts
        adapters = write_adapters(
            self._work / "adapters", self._config, rank, count, has_experts=has_experts
        )
        file = self._work / f"{rank}-{count}.toml"
        lines = [f"{json.dumps(name)} = {json.dumps(str(path))}" for name, path in adapters.items()]
        file.write_text("[lora.adapters]\n" + "\n".join(lines), "utf-8")
        most = max(self._options.streams)
        settings = [
            f"model.path={self._model}", "model.load_format=dummy", f"lora.max_rank={rank}",
            f"lora.max_adapters={min(slots, count)}",
            f"lora.targets={json.dumps(['experts'] * has_experts)}",
            "cache.enable_prefix_caching=false",
            f"model.max_model_len={self._options.input_len + self._options.output_len}",
            f"scheduler.max_num_seqs={max(most, 64)}", "speculation.method=none",
            *self._options.settings,
        ]  # fmt: skip
        return _Server(file, settings, list(adapters))

    def _warm_up(self, url: str, choose: Choice) -> None:
        asyncio.run(send_requests(url, 16, 32, choose, self._options, 1))

    def _measure(
        self, name: str, url: str, streams: int, choose: Choice, turns: int | None = None
    ) -> None:
        """Measures a row, and prints it."""
        count = streams * (turns or (3 if streams <= 64 else 2))
        found, seconds = asyncio.run(send_requests(url, streams, count, choose, self._options, 2))
        rate = sum(record.tokens for _, record in found) / seconds
        times = [record.ttft for _, record in found if record.ttft is not None]
        row: dict[str, Any] = {
            "row": name, "streams": streams, "requests": count, "tokens_per_s": round(rate, 1),
            "ttft_mean_ms": round(1000 * statistics.mean(times), 1),
        }  # fmt: skip
        tpot = statistics.mean(r.tpot or 0.0 for _, r in found)
        row["tpot_mean_ms"] = round(1000 * tpot, 2)
        if name == "plain":
            self._plain[streams] = rate, tpot
        elif streams in self._plain:
            plain, plain_tpot = self._plain[streams]
            row["of_plain"] = round(rate / plain, 3)
            bare = [record.tpot or 0.0 for adapter, record in found if adapter is None]
            if bare:
                row["bare_of_plain"] = round(plain_tpot / statistics.mean(bare), 3)
        if name == "zipf":
            row |= times_to_first(found)
        self.rows.append(row)
        print(json.dumps(row), flush=True)


class _Server:
    """A server and the names of its adapters, as a context manager."""

    def __init__(self, config: Path, settings: Sequence[str], names: list[str]):
        self._process, self._names = ServerProcess(config, settings), names

    def __enter__(self) -> tuple[str, list[str]]:
        server = self._process.__enter__()
        print(f"ready after {server.ready_s:.1f} s", file=sys.stderr, flush=True)
        return server.url, self._names

    def __exit__(self, *error: Any) -> None:
        self._process.__exit__(*error)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line of JSON for each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", type=Path, help="default: the shape of Qwen3-8B")
    parser.add_argument("--experts", action="store_true", help="adapters of experts, and less rows")
    parser.add_argument("--rows", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--streams", default="1,64,256")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--disk", type=int, default=1000, help="adapters of the row zipf")
    parser.add_argument("--work", type=Path, help="a folder with some GB; default: a temporary one")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    options = parser.parse_args(arguments)
    rows = ROWS[:3] if options.experts else ROWS
    options.rows = [*rows] if options.rows is None else options.rows.split(",")
    options.streams = [int(part) for part in options.streams.split(",")]
    if unknown := set(options.rows).difference(rows):
        parser.error(f"--rows: there is no {', '.join(sorted(unknown))}")
    with ExitStack() as stack:
        stack.enter_context(exiting_at_signals())
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.work)))
        bench = Bench(options, work)
        bench.run()
    if options.json is not None:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in bench.rows), "utf-8")


if __name__ == "__main__":
    main()
