"""Measures the overhead of an executor.

    python scripts/bench_executors.py [--tokens 200] [--rounds 5]

compares the same tiny model with one rank on a CPU, in turns over the `multiprocess` executor, the
Ray executor on the driver's node, and on another node. The nodes are processes of this machine, so
the time of a network is not in it. Prints the median time of a step at one stream and at 32, its
median difference to `multiprocess` in a round, and the CPU time of the driver in a step, all in
microseconds.

    python scripts/bench_executors.py --shapes tp,pp,dp [--model FOLDER] [--streams 1,256]
        [--rounds 5] [--json FILE] [--set SECTION.KEY=VALUE]

compares, on two GPUs, tensor parallel 2, pipeline parallel 2 and data parallel 2, each with the
`multiprocess` executor and with Ray: both engines are on both GPUs at a time and take turns. A
model of Qwen3-8B's shape with random weights completes 128 tokens in / 256 out, offline. Prints
tokens a second and ms a step, Ray's cost within a round beside its marks (3 % of the tokens a
second; 0.2 ms a step at one stream), and for the pipeline its part of twice the speed of one GPU at
half of the streams (mark: 90 %; see `benchlib/shapes.py`). The exit status is 1 if a mark was
missed. On machines without GPUs: `--set parallel.device=cpu` with a small model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

# a checkout is enough
sys.path.insert(0, str(Path(__file__).parent.parent))

from aioinfer import LLM, SamplingParams
from benchlib.shapes import SHAPES, compare_shapes

_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
    "tie_word_embeddings": False, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
_COMMON = {
    "model.load_format": "dummy",
    "model.tokenizer": "none",
    "cache.num_blocks": 1000,
    "scheduler.max_num_seqs": 32,
    "parallel.device": "cpu",
    "parallel.cpu_threads": 1,
}


def step_us(llm: LLM, streams: int, tokens: int) -> tuple[float, float]:
    """Returns the time of a step while so many requests decode, and the CPU time of this process in
    it, in microseconds."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = [[5, 3, 17, number] for number in range(streams)]
    began, cpu = time.perf_counter(), time.process_time()
    llm.generate(prompts, params)
    spent = time.perf_counter() - began, time.process_time() - cpu
    return 1e6 * spent[0] / tokens, 1e6 * spent[1] / tokens


def is_remote(llm: LLM) -> bool:
    """Whether the rank of a model over Ray is on another node than this process."""
    executor: Any = llm.frontend.engines[0]._workers.executor
    return bool(executor._placement.nodes[0].node_id != executor._own_node[0])


def compare(address: str, folder: Path, options: argparse.Namespace) -> None:
    """Takes turns between the executors, and prints."""
    os.environ["RAY_ADDRESS"] = address
    ray: dict[str, Any] = {"parallel.executor": "ray"}
    models = {"multiprocess": LLM(str(folder), settings=_COMMON, progress=False)}
    for _ in range(2):  # each node has room for one
        llm = LLM(str(folder), settings=_COMMON | ray, progress=False)
        models["ray, another node" if is_remote(llm) else "ray, the driver's node"] = llm
    for streams in (1, 32):
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
        for number in range(options.rounds + 1):
            for name, llm in models.items():
                figures = step_us(llm, streams, options.tokens)
                if number:  # the first warms up
                    found[name].append(figures)
        for name, all_figures in found.items():
            step, cpu = (statistics.median(each) for each in zip(*all_figures, strict=True))
            pairs = zip(all_figures, found["multiprocess"], strict=True)
            more = statistics.median(value[0] - base[0] for value, base in pairs)
            print(
                f"{streams:3} streams, {name:22} {step:8.0f} us a step ({more:+6.0f}), "
                f"CPU of the driver {cpu:6.0f}",
                flush=True,
            )
    for llm in reversed(models.values()):
        llm.close()


def compare_nodes(options: argparse.Namespace) -> None:
    """Starts a cluster of two nodes, compares the executors there, and ends it."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        cluster.add_node(num_cpus=1)
        with tempfile.TemporaryDirectory() as name:
            Path(name, "config.json").write_text(json.dumps(_MODEL))
            compare(cluster.address, Path(name), options)
    finally:
        cluster.shutdown()


def _value(text: str) -> tuple[str, Any]:
    """Returns the name and the value of `SECTION.KEY=VALUE`: JSON, or else a text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", help=f"some of {','.join(SHAPES)}, on two GPUs")
    parser.add_argument("--model", type=Path, help="a folder with config.json")
    parser.add_argument("--streams", type=_counts, default=[1, 256])
    parser.add_argument("--json", type=Path, help="for rows as JSON lines, which are appended")
    parser.add_argument("--set", type=_value, action="append", default=[])
    options = parser.parse_args(arguments)
    if options.shapes is None:
        compare_nodes(options)
        return 0
    shapes = options.shapes.split(",")
    if not set(shapes) <= set(SHAPES):
        parser.error(f"--shapes: some of {','.join(SHAPES)}")
    with ExitStack() as stack:
        folder = options.model or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        reached = compare_shapes(
            shapes, folder, options.streams, options.rounds, dict(options.set), options.json
        )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
