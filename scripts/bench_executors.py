"""Measures what an executor costs a step: the same tiny model with two ranks on CPUs, in turns over
the `multiprocess` executor, the Ray executor within the driver's node, and over two nodes.

The nodes are processes of this machine, so what a network adds is not in it. Prints the median time
of a step at one stream and at 32, and the median difference to `multiprocess` in a round, in
microseconds.

    python scripts/bench_executors.py [--tokens 200] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from aioinfer import LLM, SamplingParams

_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
    "tie_word_embeddings": False, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
_COMMON = {
    "model.load_format": "dummy",
    "model.skip_tokenizer": True,
    "cache.num_blocks": 1000,
    "scheduler.max_num_seqs": 32,
    "parallel.device": "cpu",
    "parallel.cpu_threads": 1,
    "parallel.tensor_parallel_size": 2,
}


def step_us(llm: LLM, streams: int, tokens: int) -> float:
    """Returns the time of a step in microseconds while so many requests decode."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = [[5, 3, 17, number] for number in range(streams)]
    began = time.perf_counter()
    llm.generate(prompts, params)
    return 1e6 * (time.perf_counter() - began) / tokens


def compare(address: str, folder: Path, options: argparse.Namespace) -> None:
    """Takes turns between the executors, and prints."""
    ray: dict[str, Any] = {"parallel.executor": "ray", "parallel.ray_address": address}
    ways = {"multiprocess": {}, "ray, one node": ray, "ray, two nodes": ray}
    models = {
        name: LLM(str(folder), settings=_COMMON | more, progress=False)
        for name, more in ways.items()
    }
    for streams in (1, 32):
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.rounds + 1):
            for name, llm in models.items():
                value = step_us(llm, streams, options.tokens)
                if number:  # the first warms up
                    found[name].append(value)
        for name, values in found.items():
            pairs = zip(values, found["multiprocess"], strict=True)
            more = statistics.median(value - base for value, base in pairs)
            print(
                f"{streams:3} streams, {name:15} {statistics.median(values):8.0f} us a step, "
                f"{more:+8.0f} us",
                flush=True,
            )
    for llm in reversed(models.values()):
        llm.close()


def main() -> None:
    """Starts a cluster of two nodes, and ends it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    # the second model finds room for one rank on the driver's node, once the first has two places
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False}
    )
    try:
        cluster.add_node(num_cpus=1)
        with tempfile.TemporaryDirectory() as name:
            Path(name, "config.json").write_text(json.dumps(_MODEL))
            compare(cluster.address, Path(name), options)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
