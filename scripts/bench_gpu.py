r"""Throughput and latency on GPUs: models with random weights at their true shapes, beside the
figures of vLLM on H200s.

    python scripts/bench_gpu.py --model FOLDER [--model FOLDER] --rounds 3 --json offline.jsonl
    python scripts/bench_gpu.py --model FOLDER --cases d1,d256,k64x2000
    python scripts/bench_gpu.py --model FOLDER --cases d1,d256,p16 \
        --set parallel.tensor_parallel_size=2
    python scripts/bench_gpu.py --model FOLDER --set model.quantization=fp8 --cases d1,d32,d256,p16
    python scripts/bench_gpu.py --model FOLDER --set model.load_format=dummy_skewed
    python scripts/bench_gpu.py --model FOLDER --cases d1,d8,d32,d128 --acceptance 0.80,0.62,0.48
    python scripts/bench_gpu.py --model FOLDER --cases d1,d8,d32 --acceptance 0.80,0.62,0.48 \
        --set speculation.method=eagle3 --set speculation.model=HEAD
    python scripts/bench_gpu.py --model FOLDER --http --cases h256,mix \
        --set scheduler.max_num_batched_tokens=4096
    python scripts/bench_gpu.py --model FOLDER --http --cases k1x8192x1024,k16x8192x1024 \
        --acceptance 0.80,0.62,0.48 --set speculation.method=mtp

A folder contains config.json and a tokenizer; weights in it are not read, and are at random in the
format of its `quantization_config`, if it has one. The vocabulary and the
numbers in a case's name may be others. vLLM's figures and the marks (the figures to reach) are in
`benchlib/vllm_figures.py`, for models with the shapes of Qwen3-0.6B, Qwen3-8B and Qwen3-30B-A3B
(--cases d1,d8,d32,d128,d256,p16,nano).

Offline cases, through `aioinfer.LLM`, all in one engine (detokenization included, which the figures
of vLLM are without):
    dN      N requests, 128 tokens in / 256 out
    lN      N requests, 4096 / 128
    pN      N requests, 4096 / 1; counts tokens in
    kNxI    N requests, I / 256; kNxIxO: I / O
    nano    256 requests, 100-1024 / 100-1024 uniformly random, temperature 0.6; the other cases are
            greedy
vLLM's `max_model_len` ended the requests of k8x8000 after 192 tokens, so its figure is that of
k8x8000x192.

With --acceptance the cases run twice, at last with speculation: drafts are the texts of the first
run, with --http those of an engine that completes the same prompts before it
(`benchlib/recording.py`), of which the given parts are kept: 0.80,0.62,0.48 means 80 % of all first
drafts, 62 % of all second ones, 48 % of all third ones; 0: none. How many drafts there
are is the engine's choice. With a `--set speculation.method` that has a model which drafts, this
model is computed as well, and its drafts are replaced: so its cost counts. The rows of the second
run are called CASE+drafts; they have the drafts that were verified and kept, and the part of the
texts that are those of the first run. All requests are sampled.

HTTP cases, streamed completions from `python -m aioinfer` on a free port of 127.0.0.1, from several
client processes:
    hN      N streams, 512 / 256, three requests a stream
    sN      N streams, 128 / 256, three requests a stream
    mixN    N streams, two requests a stream, 100-1024 / 100-1024; mix: mix256
    h1      one request, 128 / 512
    kNxIxO  N streams, I / O, one request a stream

An engine is left alone for some seconds before its first case (`--idle`): it captures CUDA graphs
then that its start has left. Each case warms up with prompts of its own lengths, then runs
`--rounds` times with fresh prompts; medians are reported. Prompts are token ids, end tokens are
ignored, the prefix cache is off, 512 requests may run at a time. A case counts only if each request
returned exactly its number of tokens: otherwise its row is an error and the exit status 1.

What the figures mean: TTFT from sending a request, connection included, to its first text. ITL
between two reads that brought text: events that came in one read count as one, as they did when
vLLM was measured. "step" is the wall time of a round over the engine's steps in it. "ratio" is to
vLLM, above 1 is better. "client's CPU" is that of the busiest client process; near 100 % the client
is the bottleneck. A model with experts has a row "experts" after its offline cases: the part of
their tokens that the busiest tenth took (a little more than a tenth with random weights, about half
with `model.load_format=dummy_skewed`). A line of JSON is printed as each case ends, and the table
at the end.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import sys
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

# a checkout is enough: only aioinfer's dependencies need be installed
sys.path.insert(0, str(Path(__file__).parent.parent))

from aioinfer.config import Config, load_config
from aioinfer.errors import AioinferError, ConfigError
from benchlib.client_processes import ClientProcesses
from benchlib.gpu_cases import HTTP_CASES, OFFLINE_CASES, WARMUP_OUTPUT_LEN, Case, Model
from benchlib.gpu_report import Rows, show
from benchlib.load import Run
from benchlib.recording import Recording
from benchlib.report import count_errors, percentiles
from benchlib.server_process import ServerProcess
from benchlib.workload import Call, RequestShape

if TYPE_CHECKING:
    # at run time it is imported late: it needs torch, which client processes do without
    from aioinfer import LLM

#: The length that vLLM was given; longer only where a case needs it.
MAX_MODEL_LEN = 8192
MAX_NUM_SEQS = 512
#: Columns of the table in a file or a pipe, so that no cell is wrapped.
FILE_WIDTH = 200


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Returns the options, with `cases` and `models` as the objects that they name; ends the
    process with status 2 where they are wrong."""
    parser = argparse.ArgumentParser(
        description="Measures models of random weights on GPUs, beside vLLM's figures."
    )
    parser.add_argument(
        "--model",
        action="append",
        required=True,
        type=Path,
        metavar="FOLDER",
        help="with a tokenizer (repeatable)",
    )
    parser.add_argument(
        "--cases", help=f"default: {','.join(OFFLINE_CASES)}; with --http: {','.join(HTTP_CASES)}"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="medians of so many (default: %(default)s)"
    )
    parser.add_argument("--http", action="store_true", help="over HTTP, not offline")
    parser.add_argument(
        "--acceptance",
        metavar="P,P,...",
        help="measure with drafts too, of which these parts are kept",
    )
    parser.add_argument(
        "--client-processes", type=int, default=8, help="with --http (default: %(default)s)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="for the configuration (repeatable)",
    )
    parser.add_argument(
        "--idle", type=float, default=4.0, metavar="SECONDS",
        help="before the first case, in which graphs are captured that a start leaves (default: 4)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="for the JSON lines too")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.client_processes < 1:
        parser.error("--rounds and --client-processes must be above 0")
    names = (
        options.cases.split(",") if options.cases else HTTP_CASES if options.http else OFFLINE_CASES
    )
    try:
        options.cases = [Case.parse(name, options.http) for name in names]
        options.recording = None
        if options.acceptance is not None:
            options.recording = Recording([float(part) for part in options.acceptance.split(",")])
        config = load_config(None, ["model.path=none", *options.set])
        parallel, quantization = config.parallel, config.model.quantization
        num_gpus = parallel.world_size if parallel.data_parallel_size == 1 else 0
        options.models = [Model.load(folder, num_gpus, quantization) for folder in options.model]
        for model in options.models:
            load_config(None, make_settings(options, model))
    except (OSError, ValueError, ConfigError) as error:
        parser.error(str(error))
    return options


def make_settings(options: argparse.Namespace, model: Model) -> list[str]:
    """Returns the engine's configuration as `section.key=value`: as vLLM's was, and `--set` over
    it."""
    longest = max(MAX_MODEL_LEN, *(case.max_len for case in options.cases))
    return [
        f"model.path={model.folder}",
        "model.load_format=dummy",
        f"model.max_model_len={min(longest, model.max_len)}",
        f"scheduler.max_num_seqs={MAX_NUM_SEQS}",
        "cache.enable_prefix_caching=false",
        *options.set,
    ]


# ---------------------------------------------------------------- offline


def run_offline(options: argparse.Namespace, model: Model, rows: Rows) -> None:
    """Measures the offline cases in one engine, and with a recording in a second one. Raises
    `AioinferError` if one does not start."""
    settings = make_settings(options, model)
    if options.recording is None:
        run_engine(options, model, load_config(None, settings), rows)
        return
    plain = load_config(None, [*settings, "speculation.method=none"])
    run_engine(options, model, plain, rows)
    with replayed(options.recording, settings) as more:
        run_engine(options, model, load_config(None, [*settings, *more]), rows, "+drafts")


def replayed(recording: Recording, settings: Sequence[str]) -> AbstractContextManager[list[str]]:
    """Returns the context of the run with drafts, by the configured method if that has a model."""
    method = load_config(None, settings).speculation.method
    return recording.replayed("ngram" if method in ("none", "auto") else method)


def run_engine(
    options: argparse.Namespace, model: Model, config: Config, rows: Rows, suffix: str = ""
) -> None:
    """Measures the offline cases in one engine; `suffix` ends the names of the rows."""
    from aioinfer import LLM

    begin = perf_counter()
    with LLM(settings=_by_key(config), progress=False) as llm:
        seconds = perf_counter() - begin
        report = llm.frontend.engines[0].report
        rows.add(
            model,
            f"startup{suffix}",
            {"seconds": seconds, **asdict(report), "phases": dict(report.phases)},
        )
        sleep(options.idle)
        for case in options.cases:
            rows.add(
                model,
                f"{case.name}{suffix}",
                _or_error(
                    measure_offline, llm, case, options.rounds, model.vocab_size, options.recording
                ),
            )
        if load := expert_load(llm):
            rows.add(model, f"experts{suffix}", {"seconds": perf_counter() - begin, **load})


def _by_key(config: Config) -> dict[str, Any]:
    """Returns all values by `section.key`."""
    return {
        f"{section}.{name}": value
        for section, keys in asdict(config).items()
        for name, value in keys.items()
    }


def expert_load(llm: LLM) -> dict[str, Any]:
    """Returns how uneven the experts' tokens of all cases together were, as means over the layers:
    the part that the busiest tenth of a layer's experts took, and the busiest expert's tokens over
    the mean. Nothing for models without experts; tokens of the last second may be missing."""
    from aioinfer.features.expert_load.planning import Planning, imbalance

    found = llm.frontend.engines[0].features.of(Planning).load
    tokens = np.sort(found.by_expert(found.totals), axis=1)
    if not tokens.sum():
        return {}
    busiest = tokens[:, -round(tokens.shape[1] / 10) :].sum(axis=1) / tokens.sum(axis=1)
    return {
        "busiest_tenth": float(busiest.mean()),
        "busiest_over_mean": float(imbalance(tokens).mean()),
    }


def measure_offline(
    llm: LLM, case: Case, rounds: int, vocab_size: int, recording: Recording | None = None
) -> dict[str, Any]:
    """Returns the medians of a case.

    Raises `RuntimeError` if a request returned another number of tokens than it requested.
    """
    run_batch(llm, case, case.prompts(0, vocab_size), WARMUP_OUTPUT_LEN)
    timed = [
        run_batch(llm, case, case.prompts(1 + number, vocab_size), recording=recording)
        for number in range(rounds)
    ]
    durations = [duration for duration, _ in timed]
    seconds = statistics.median(durations)
    return {
        "rounds": rounds,
        "seconds": seconds,
        "seconds_each_round": durations,
        "output_tokens_per_s": sum(output for _, output in case.lengths()) / seconds,
        "input_tokens_per_s": sum(prompt for prompt, _ in case.lengths()) / seconds,
        "steps": statistics.median(counts["steps"] for _, counts in timed),
        "step_ms": statistics.median(
            1000 * duration / counts["steps"] for duration, counts in timed
        ),
        "engine_last_round": timed[-1][1],
    }


def run_batch(
    llm: LLM,
    case: Case,
    prompts: list[list[int]],
    max_output: int | None = None,
    recording: Recording | None = None,
) -> tuple[float, dict[str, float]]:
    """Completes the prompts of a case, to at most `max_output` tokens each.

    Returns the seconds that it took, and the increases of the engine's counters. Raises as
    `measure_offline` does.
    """
    from aioinfer import SamplingParams

    def sampling(seed: int) -> dict[str, Any]:
        return {"temperature": case.temperature} if recording is None else recording.params(seed)

    counts = [
        output if max_output is None else min(output, max_output) for _, output in case.lengths()
    ]
    params = [
        SamplingParams(**sampling(seed), ignore_eos=True, max_tokens=count)
        for seed, count in enumerate(counts)
    ]
    before = _counters(llm)
    begin = perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = perf_counter() - begin
    _require_counts([len(output.token_ids) for output in outputs], counts)
    counted = {name: value - before[name] for name, value in _counters(llm).items()}
    if recording is not None:
        counted["texts_as_recorded"] = recording.add(prompts, outputs)
    return seconds, counted


def _counters(llm: LLM) -> dict[str, float]:
    """Returns the state and the counters of the engines, those of drafts too."""
    from aioinfer.features.speculation.planning import ACCEPTED, DRAFT_TOKENS, DRAFTS

    found = llm.frontend.stats()
    for engine in llm.frontend.engines:
        for name in (DRAFTS, DRAFT_TOKENS, ACCEPTED):
            found[name] = found.get(name, 0) + engine.metrics.counts[name]
    return found


# ---------------------------------------------------------------- HTTP


@dataclass(frozen=True, slots=True)
class HttpLoader:
    """Sends cases to a server."""

    clients: ClientProcesses
    url: str
    shape: RequestShape
    vocab_size: int
    recording: Recording | None = None

    def send(self, case: Case, round_number: int) -> Run:
        """Sends a round.

        Raises `RuntimeError` if a request failed or returned another number of tokens than it was
        requested.
        """
        return self._send(case, round_number, [output for _, output in case.lengths()])

    def warm_up(self, case: Case) -> None:
        """Sends a request for each stream, of long prompts fewer. Raises as `send` does."""
        self._send(
            case,
            0,
            [
                min(output, WARMUP_OUTPUT_LEN)
                for _, output in case.lengths()[: case.num_warmup_requests]
            ],
        )

    def _send(self, case: Case, round_number: int, max_tokens: Sequence[int]) -> Run:
        prompts, recording = case.prompts(round_number, self.vocab_size), self.recording
        calls = [
            Call(
                self.shape.body(prompt, count, {} if recording is None else recording.params(seed)),
                count,
            )
            for seed, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=False))
        ]
        run = self.clients.run_load(self.url, self.shape, calls, case.streams)
        for error in count_errors(run):
            raise RuntimeError(
                f"{error['count']} of {len(run.records)} requests failed: "
                f"{error['kind']}, such as: {error['example']}"
            )
        _require_counts(
            [record.output_tokens for record in run.records],
            [record.max_tokens for record in run.records],
        )
        return run


def run_http(
    options: argparse.Namespace, model: Model, settings: Sequence[str], rows: Rows
) -> None:
    """Measures the HTTP cases against one server, and with a recording against a second one. Raises
    `AioinferError` or `RuntimeError` if one does not start."""
    if options.recording is None:
        run_server(options, model, settings, rows)
        return
    plain = [*settings, "speculation.method=none"]
    record_texts(options, model, load_config(None, plain))
    run_server(options, model, plain, rows)
    with replayed(options.recording, settings) as more:
        run_server(options, model, [*settings, *more], rows, "+drafts")


def record_texts(options: argparse.Namespace, model: Model, config: Config) -> None:
    """Completes the prompts of all rounds in an engine, for the recording."""
    from aioinfer import LLM

    with LLM(settings=_by_key(config), progress=False) as llm:
        for case in options.cases:
            for number in range(options.rounds):
                prompts = case.prompts(1 + number, model.vocab_size)
                run_batch(llm, case, prompts, recording=options.recording)


def run_server(
    options: argparse.Namespace, model: Model, settings: Sequence[str], rows: Rows,
    suffix: str = "",
) -> None:  # fmt: skip
    """Measures the HTTP cases against one server; `suffix` ends the names of the rows."""
    shape = RequestShape(load_config(None, settings).served_model_names[0], ignore_eos=True)
    no_file = os.devnull  # an empty TOML file: all is in the settings
    with (
        ClientProcesses(options.client_processes) as clients,
        ServerProcess(no_file, settings) as server,
    ):
        rows.add(model, f"startup{suffix}", {"seconds": server.ready_s})
        sleep(options.idle)
        loader = HttpLoader(clients, server.url, shape, model.vocab_size, options.recording)
        for case in options.cases:
            before = drafts_of(server.url)
            row = _or_error(measure_http, loader, case, options.rounds)
            counted = {name: count - before[name] for name, count in drafts_of(server.url).items()}
            rows.add(model, f"{case.name}{suffix}", {**row, **counted})


def drafts_of(url: str) -> dict[str, float]:
    """Returns the server's counts of draft tokens, warm-up included; 0 without speculation."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        text = reply.read().decode()
    names = {"draft_tokens": "draft_tokens", "drafts_kept": "accepted_tokens"}
    return {
        name: sum(map(float, re.findall(rf"^vllm:spec_decode_num_{of}_total\S* (\S+)", text, re.M)))
        for name, of in names.items()
    }


def measure_http(loader: HttpLoader, case: Case, rounds: int) -> dict[str, Any]:
    """Returns the medians of a case. Raises `RuntimeError` as `HttpLoader.send` does."""
    loader.warm_up(case)
    each = [summarize_http(loader.send(case, 1 + number)) for number in range(rounds)]
    medians = {name: _median([figures[name] for figures in each]) for name in each[0]}
    return {
        "rounds": rounds,
        **medians,
        "seconds_each_round": [figures["seconds"] for figures in each],
    }


def summarize_http(run: Run) -> dict[str, Any]:
    """Returns the figures of a round in which every request succeeded.

    Raises `RuntimeError` if there is no text to time.
    """
    records = run.records
    output = sum(record.output_tokens or 0 for record in records)
    ttft = percentiles([record.ttft for record in records if record.ttft is not None])
    # 0 within one read
    gaps = np.array([gap for record in records for gap in record.gaps if gap > 0.0])
    itl = percentiles(gaps)
    if ttft is None or itl is None:
        raise RuntimeError("no reply held text at two times")
    return {
        "seconds": run.duration_s,
        "output_tokens_per_s": output / run.duration_s,
        "input_tokens_per_s": sum(record.prompt_tokens or 0 for record in records) / run.duration_s,
        "ttft_ms": {"mean": ttft["mean"], "p99": ttft["p99"]},
        "itl_ms": {"p50": itl["p50"], "p99": itl["p99"]},
        "chunks_per_token": sum(record.chunks for record in records) / output,
        "requests": len(records),
        "errors": sum(record.error is not None for record in records),
        "client_cpu": run.client_cpu,
    }


def _median(values: Sequence[Any]) -> Any:
    """Returns the median of numbers, or of each entry of dictionaries of them."""
    if isinstance(values[0], dict):
        return {name: statistics.median(value[name] for value in values) for name in values[0]}
    return statistics.median(values)


# ---------------------------------------------------------------- both


def _require_counts(found: Sequence[int | None], wanted: Sequence[int]) -> None:
    pairs = zip(found, wanted, strict=True)
    wrong = [f"{got} for {expected}" for got, expected in pairs if got != expected]
    if wrong:
        raise RuntimeError(
            f"{len(wrong)} of {len(wanted)} requests returned another number of "
            f"tokens, such as {wrong[0]}"
        )


def _or_error(measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Returns the figures of a case, or the failure as the row's error: the other cases may still
    be measured."""
    try:
        return measure(*arguments)
    except (AioinferError, RuntimeError) as error:
        sys.stderr.write(f"bench_gpu: {error}\n")
        return {"error": str(error)}


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit status: 1 if a case did not count."""
    options = parse_arguments(arguments)
    rows = Rows(options.json)
    for model in options.models:
        settings = make_settings(options, model)
        try:
            if options.http:
                run_http(options, model, settings, rows)
            else:
                run_offline(options, model, rows)
        except (AioinferError, RuntimeError) as error:  # no engine: the next model may have one
            sys.stderr.write(f"bench_gpu: {error}\n")
            rows.add(model, "startup", {"error": str(error)})
    console = Console()
    show(rows.rows, options.http, console if console.is_terminal else Console(width=FILE_WIDTH))
    return 1 if rows.failed() else 0


if __name__ == "__main__":
    # so that a run that is cut off ends its server
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
