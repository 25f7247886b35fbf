"""Shapes of parallelism over two devices, each with the `multiprocess` executor and with Ray: the
comparison of `bench_executors.py --shapes`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aioinfer import LLM
from bench_gpu import run_batch
from benchlib.gpu_cases import WARMUP_OUTPUT_LEN, Case

#: The configuration of each shape, by name.
SHAPES = {
    "tp": {"parallel.tensor_parallel_size": 2},
    "pp": {"parallel.pipeline_parallel_size": 2},
    "dp": {"parallel.data_parallel_size": 2},
}
#: The allowed cost of Ray: of the tokens a second at the most streams, and in ms a step at one.
MAX_LOSS, MAX_STEP_MS = 0.03, 0.2
#: Part of the stages' bare speeds that a pipeline reaches.
MIN_PIPELINE = 0.9
#: The shape of Qwen3-8B.
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
    "attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False,
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
}  # fmt: skip

#: The shape of Qwen3-30B-A3B.
QWEN3_30B_A3B = {
    **QWEN3_8B, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Round:
    """A round of a case: every request of it completed once.

    Attributes:
        busy: for each pipeline stage, the part of the time in which it computed.
    """

    tokens_per_s: float
    step_ms: float
    busy: tuple[float, ...] = ()


@dataclass(slots=True)
class Contender:
    """An engine that takes part, and the rounds that it has run, by the number of streams."""

    name: str
    llm: LLM
    rounds: dict[int, list[Round]] = field(default_factory=dict)

    def run(self, streams: int, number: int) -> None:
        """Runs round `number` of so many streams. Round 0 warms up and is not kept."""
        case = Case.parse(f"d{streams}", http=False)
        prompts = case.prompts(number, self._vocab_size)
        if not number:
            run_batch(self.llm, case, prompts, WARMUP_OUTPUT_LEN)
            return
        before = self._stage_seconds()
        seconds, counts = run_batch(self.llm, case, prompts)
        busy = tuple(
            (after[0] - first[0]) / max(sum(after) - sum(first), 1e-9)
            for first, after in zip(before, self._stage_seconds(), strict=True)
        )
        tokens = sum(output for _, output in case.lengths())
        step_ms = 1000 * seconds / counts["steps"]
        self.rounds.setdefault(streams, []).append(Round(tokens / seconds, step_ms, busy))

    @property
    def _vocab_size(self) -> int:
        return self.llm.frontend.vocab_size

    def _stage_seconds(self) -> list[tuple[float, float]]:
        (engine, *_) = self.llm.frontend.engines
        return [(time.busy_s, time.idle_s) for time in engine.stage_times()]

    def row(self, streams: int) -> dict[str, Any]:
        """Returns the medians of its rounds."""
        rounds = self.rounds[streams]
        busy = zip(*(each.busy for each in rounds), strict=True)
        return {
            "engine": self.name,
            "streams": streams,
            "tokens_per_s": statistics.median(each.tokens_per_s for each in rounds),
            "step_ms": statistics.median(each.step_ms for each in rounds),
            "step_ms_each_round": [each.step_ms for each in rounds],
            "stages_busy": [statistics.median(stage) for stage in busy],
        }


def settings_of(folder: Path, streams: Sequence[int], given: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that all engines have in common: KV blocks for the most streams, no
    more, since several engines are on the same devices at a time."""
    case = Case.parse(f"d{max(streams)}", http=False)
    block_size = 16 if given.get("parallel.device") == "cpu" else 128
    blocks = case.streams * (math.ceil(case.max_len / block_size) + 1)
    return {
        "model.path": str(folder),
        "model.load_format": "dummy",
        "model.tokenizer": "none",
        "model.max_model_len": case.max_len,
        "cache.block_size": block_size,
        "cache.num_blocks": blocks,
        "cache.enable_prefix_caching": False,
        "scheduler.max_num_seqs": max(8, max(streams)),
    } | given


def compare_shape(
    shape: str, settings: dict[str, Any], streams: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Measures one shape with both executors in turns, and returns the rows: of each engine, and of
    each mark. A pipeline has a third engine beside it, of one device: twice its speed at half of
    the streams is the speed of two stages that never wait, since each has half of the layers.
    """
    with ExitStack() as stack:

        def start(name: str, more: dict[str, Any]) -> Contender:
            own = {"parallel.executor": "multiprocess"} | settings | more
            return Contender(name, stack.enter_context(LLM(settings=own, progress=False)))

        plain = start(f"{shape} 2, multiprocess", SHAPES[shape])
        over_ray = start(f"{shape} 2, ray", SHAPES[shape] | {"parallel.executor": "ray"})
        alone = start("one device", {}) if shape == "pp" else None
        rows: list[dict[str, Any]] = []
        for count in streams:
            half = count // 2
            beside = alone if half else None
            for number in range(rounds + 1):
                pair = (plain, over_ray) if number % 2 else (over_ray, plain)
                for contender in pair:
                    contender.run(count, number)
                if beside is not None:
                    beside.run(half, number)
            rows += [plain.row(count), over_ray.row(count), _cost_of_ray(plain, over_ray, count)]
            if beside is not None:
                rows += [beside.row(half), _pipeline_share(plain, beside, count)]
    return rows


def _cost_of_ray(plain: Contender, over_ray: Contender, streams: int) -> dict[str, Any]:
    """Returns the medians of the differences and ratios within a round, with the mark."""
    pairs = list(zip(plain.rounds[streams], over_ray.rounds[streams], strict=True))
    ratio = statistics.median(ray.tokens_per_s / base.tokens_per_s for base, ray in pairs)
    more_ms = statistics.median(ray.step_ms - base.step_ms for base, ray in pairs)
    reached = more_ms <= MAX_STEP_MS if streams == 1 else ratio >= 1 - MAX_LOSS
    return {
        "mark": f"{over_ray.name} beside multiprocess", "streams": streams,
        "ratio": ratio, "more_ms_a_step": more_ms, "reached": reached,
    }  # fmt: skip


def _pipeline_share(pipeline: Contender, alone: Contender, streams: int) -> dict[str, Any]:
    """Returns which part of the stages' bare speeds together a pipeline reaches, with the mark."""
    half = streams // 2
    pairs = zip(pipeline.rounds[streams], alone.rounds[half], strict=True)
    share = statistics.median(both.tokens_per_s / (2 * one.tokens_per_s) for both, one in pairs)
    return {
        "mark": f"{pipeline.name} of 2 x one device at {half}", "streams": streams,
        "ratio": share, "reached": share >= MIN_PIPELINE,
    }  # fmt: skip


def text_of(row: dict[str, Any]) -> str:
    """Returns a row as a line."""
    start = f"{row['streams']:4} streams  "
    if "mark" in row:
        more = row.get("more_ms_a_step")
        step = "" if more is None else f", {more:+.3f} ms a step"
        verdict = "mark reached" if row["reached"] else "mark missed"
        return f"{start}{row['mark']}: {100 * row['ratio']:.1f} %{step}: {verdict}"
    busy = ", ".join(f"{100 * stage:.0f}" for stage in row["stages_busy"])
    return (
        f"{start}{row['engine']:22} {row['tokens_per_s']:10.0f} tokens/s {row['step_ms']:8.3f} "
        f"ms a step{f', stages busy {busy} %' if busy else ''}"
    )


def compare_shapes(
    shapes: Sequence[str],
    folder: Path,
    streams: Sequence[int],
    rounds: int,
    given: dict[str, Any],
    file: Path | None = None,
) -> bool:
    """Measures the shapes one after the other, prints, writes the rows to `file` as JSON lines, and
    returns whether all marks were reached.

    Args:
        folder: of the model; only its config.json is read.
        given: keys of the configuration, over the benchmark's own.
    """
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    settings, reached = settings_of(folder, streams, given), True
    for shape in shapes:
        for row in compare_shape(shape, settings, streams, rounds):
            print(text_of(row), flush=True)
            reached &= row.get("reached", True)
            if file is not None:
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(row) + "\n")
    return reached
