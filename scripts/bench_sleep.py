"""Measures sleep and waking of a model with random weights, in one process of its own:

    python scripts/bench_sleep.py                       # the shape of Qwen3-8B, on a GPU
    python scripts/bench_sleep.py --model FOLDER --set parallel.device=cpu

A folder contains config.json. Prints, for each of `--rounds` rounds, the seconds of `sleep`, of
`wake_up`, and of the first eight tokens behind it, and the memory of the first GPU that is free
while the model is awake and while it sleeps. The first sleep waits for the pinned memory of the
host, which a thread takes after the start, and copies the weights there; later ones copy nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from rich.console import Console
from rich.table import Table

from aioinfer import LLM, SamplingParams
from aioinfer.config import parse_override
from benchlib.shapes import QWEN3_8B


def free_gib() -> float:
    """Returns the free memory of the first GPU; NaN where there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return int(subprocess.run(query, capture_output=True, check=True).stdout) / 1024
    except (OSError, subprocess.CalledProcessError, ValueError):
        return float("nan")


def measure(llm: LLM, rounds: int, mode: str) -> list[dict[str, float]]:
    """Returns the figures of each round."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(5, 60))}
    expected = llm.generate([prompt], params)[0].token_ids
    found = []
    for _ in range(rounds):
        awake, began = free_gib(), perf_counter()
        llm.sleep(mode=mode)  # type: ignore[arg-type]
        slept = perf_counter()
        asleep, begun = free_gib(), perf_counter()
        llm.wake_up()
        woken = perf_counter()
        tokens = llm.generate([prompt], params)[0].token_ids
        found.append(
            {
                "sleep s": slept - began,
                "wake s": woken - begun,
                "8 tokens s": perf_counter() - woken,
                "free GiB awake": awake,
                "free GiB asleep": asleep,
                "same text": float(tokens == expected),
            }
        )
    return found


def update(llm: LLM, rounds: int) -> list[float]:
    """Returns the seconds of updates of all weights of Qwen3-8B by handles of this process's
    memory on the first GPU, from the call that begins an update to the end of the last."""
    import torch

    from aioinfer.worker.tensor_handles import describe_tensors

    made = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    tensors = {name: made(shape).mul_(0.02) for name, shape in qwen3_shapes(QWEN3_8B).items()}
    control, seconds = llm.frontend.control, []

    async def run() -> None:
        began = perf_counter()
        info = describe_tensors(tensors.items())
        handles = info.pop("ipc_handles")
        await control.begin_update()
        await control.update("open_weights", **info, handles=handles)
        await control.end_update()
        seconds.append(perf_counter() - began)

    for _ in range(rounds):
        llm.run(run())
    return seconds


def qwen3_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a dense Qwen3 checkpoint."""
    hidden, width, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
    layer = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (size,), "self_attn.k_norm": (size,), "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden), "mlp.down_proj": (hidden, width),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    shapes = {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    ends = dict.fromkeys(("model.embed_tokens", "lm_head"), (config["vocab_size"], hidden))
    shapes |= {f"{name}.weight": shape for name, shape in ends.items()}
    return shapes | {"model.norm.weight": (hidden,)}


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="default: the shape of Qwen3-8B")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--mode", default="keep", choices=("keep", "wait", "abort"))
    parser.add_argument("--wait", type=float, default=0.0, help="seconds before the first sleep")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument(
        "--update", action="store_true",
        help="also measure updates of Qwen3-8B's weights from this process's memory on the GPU, of "
        "which the server then takes 70 %%",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="writes the figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.model or Path(made)
        if options.model is None:
            (folder / "config.json").write_text(json.dumps(QWEN3_8B), "utf-8")
        settings = {
            "model.load_format": "dummy",
            "model.tokenizer": "none",
            "model.sleep_mode": True,
            # drafts from earlier texts would change how many rows a step has, and its rounding
            "speculation.method": "none",
            **({"cache.gpu_memory_utilization": 0.7} if options.update else {}),
            **dict(map(parse_override, options.set)),
        }
        with LLM(str(folder), settings=settings, progress=False) as llm:
            sleep(options.wait)
            figures = measure(llm, options.rounds, options.mode)
            updates = update(llm, options.rounds) if options.update else []
    table = Table("round", *figures[0])
    for number, row in enumerate(figures):
        table.add_row(str(number), *(f"{value:.3f}" for value in row.values()))
    Console().print(table)
    if updates:
        print("updates, s:", ", ".join(f"{seconds:.3f}" for seconds in updates))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1), "utf-8")


if __name__ == "__main__":
    main()
