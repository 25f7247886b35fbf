r"""Times the GPU kernels against their lower bounds (floors).

    python scripts/bench_kernels.py [--cases decode,prefill,...] [--only REGEX] [--tune] \
        [--json FILE]

A case's floor is the larger of its bytes over the copy bandwidth and its operations over the rate
of a large bf16 product, both measured first. A case that fails prints its error, and the others go
on. Every kernel is timed inside a CUDA graph of many launches over inputs that do not fit in the L2
cache. With --tune each case tries the variants from which the tables in `kernels/` were filled;
several processes with --shard i/n and --compile-only fill Triton's cache in parallel beforehand.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchlib.cascade_cases import cascade_cases
from benchlib.delta_cases import delta_cases
from benchlib.expert_cases import expert_cases
from benchlib.float8_cases import float8_cases
from benchlib.grouped_cases import grouped_cases
from benchlib.kernel_cases import DEVICE, Case, random_tensor
from benchlib.kernel_cases import FAMILIES as OTHER_FAMILIES
from benchlib.latent_cases import latent_cases
from benchlib.quantized_expert_cases import quantized_expert_cases
from benchlib.scaled_cases import scaled_cases

FAMILIES = OTHER_FAMILIES | {
    "cascade": cascade_cases,
    "delta": delta_cases,
    "experts": expert_cases,
    "float8": float8_cases,
    "grouped": grouped_cases,
    "latent": latent_cases,
    "quantized_experts": quantized_expert_cases,
    "scaled": scaled_cases,
}


def time_case(case: Case) -> float:
    """Returns the median seconds of one run, over replays of a CUDA graph of `repeats` runs, or of
    all `runs` if these are more."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # on which the operands were made
    with torch.cuda.stream(stream):
        case.runs[0]()
        stream.synchronize()
        count = max(case.repeats, len(case.runs))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                case.runs[i % len(case.runs)]()
        graph.replay()
        times = []
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3 / count)
    return statistics.median(times)


def ceilings() -> tuple[float, float]:
    """Measures and returns the copy bandwidth (bytes/s, read and written) and the rate of a bf16
    product (flop/s)."""
    a = torch.randn(2**30, device=DEVICE)
    b = torch.empty_like(a)
    copy = time_case(Case("", "", "", [lambda: torch.mul(a, 1.0, out=b)], 0, repeats=5))
    x, y = random_tensor(8192, 8192), random_tensor(8192, 8192)
    product = time_case(Case("", "", "", [lambda: x @ y], 0, repeats=5))
    return 8 * 2**30 / copy, 2 * 8192**3 / product


def main() -> None:
    """Runs the chosen families and prints a line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(FAMILIES))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX",
                        help="of cases whose name and variant it matches")  # fmt: skip
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shard, shards = map(int, options.shard.split("/"))
    bandwidth, rate = (1.0, 1.0) if options.compile_only else ceilings()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s", flush=True)
    results = []
    for family in options.cases.split(","):
        began = time.perf_counter()
        for index, case in enumerate(FAMILIES[family](options.tune)):
            if options.compile_only and index % shards != shard:
                continue
            if not options.only.search(f"{case.name} {case.variant}"):
                continue
            line = {"family": family, "name": case.name, "variant": case.variant}
            try:
                case.runs[0]()
                torch.cuda.synchronize()
                if options.compile_only:
                    continue
                if case.check is not None:
                    line["error"] = case.check()
                seconds = time_case(case)
            except Exception as failure:
                print(
                    f"{family:8} {case.name:24} {case.variant:28} FAILED {str(failure)[-300:]}",
                    flush=True,
                )
                traceback.print_exc(limit=-2)
                continue
            floor = max(case.bytes / bandwidth, case.flops / (rate * case.rate_factor))
            line |= {
                "us": seconds * 1e6,
                "floor_us": floor * 1e6,
                "TB/s": case.bytes / seconds / 1e12,
                "TFLOP/s": case.flops / seconds / 1e12,
            }
            results.append(line)
            rates = (
                f"{line['TB/s']:5.2f} TB/s {line['TFLOP/s']:4.0f} TFLOP/s  "
                f"error {line.get('error', 0):.1e}"
            )
            times = f"{seconds * 1e6:8.1f} us, floor {floor * 1e6:7.1f} ({floor / seconds:4.0%})"
            print(f"{family:8} {case.name:20} {case.variant:22} {times} {rates}", flush=True)
        print(f"-- {family}: {time.perf_counter() - began:.0f} s", flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"bandwidth": bandwidth, "rate": rate, "cases": results}, indent=1)
        )


if __name__ == "__main__":
    main()
