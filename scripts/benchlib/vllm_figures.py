"""vLLM's figures in the cases of `bench_gpu.py`, and the marks that aioinfer is to reach.

vLLM 0.25.1 from its wheel on one NVIDIA H200, or two with tensor parallelism (torch 2.11 for CUDA
13.0; FlashAttention 3, CUDA graphs, torch.compile, asynchronous scheduling), random weights in
bfloat16 at the shapes of Qwen3, `max_model_len` 8192, no prefix cache, one run after a warm-up.
Over HTTP: streamed `/v1/completions`, 8 client processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one case. Rates in tokens/s, latencies in ms.

    Attributes:
        vllm: the figure that vLLM reaches.
        mark: the figure to reach.
        unit: output tokens/s, input tokens/s, or seconds until ready (where lower is better).
        ttft: vLLM's mean and p99.
        itl: vLLM's p50 and p99.
        itl_p99_mark: a mark of its own for the ITL; with it, TTFT must be no worse than vLLM's.
    """

    vllm: float | None = None
    mark: float | None = None
    unit: Literal["out", "in", "s"] = "out"
    ttft: tuple[float, float | None] | None = None
    itl: tuple[float, float] | None = None
    itl_p99_mark: float | None = None


#: By (hidden size, layers, number of GPUs), then by case.
VLLM_H200: dict[tuple[int, int, int], dict[str, Figures]] = {
    # Qwen3-0.6B
    (1024, 28, 1): {
        "startup": Figures(vllm=48, unit="s"),
        "d1": Figures(vllm=619, mark=1000),
        "d32": Figures(vllm=15_607),
        "d256": Figures(vllm=50_605),
        "nano": Figures(vllm=23_310),
        "h1": Figures(vllm=619, mark=1000, ttft=(12, None), itl=(1.56, 3.3)),
        "h64": Figures(vllm=18_860, ttft=(91, 140), itl=(2.95, 5.6)),
        "h256": Figures(vllm=25_311, mark=38_000, ttft=(295, 508), itl=(8.4, 24)),
        "h512": Figures(vllm=24_281, mark=38_000, ttft=(845, 2226), itl=(17.6, 45)),
        "s256": Figures(mark=50_000),
        "s512": Figures(mark=50_000),
        "mix": Figures(vllm=24_384, ttft=(348, 472), itl=(8.3, 20)),
    },
    # Qwen3-8B
    (4096, 36, 1): {
        "startup": Figures(vllm=57, mark=15, unit="s"),
        "d1": Figures(vllm=191.5, mark=240),
        "d32": Figures(vllm=5_220),
        "d128": Figures(vllm=14_043),
        "d256": Figures(vllm=17_551, mark=20_000),
        "p16": Figures(vllm=41_141, mark=43_000, unit="in"),
        "l32": Figures(vllm=915),
        "nano": Figures(vllm=9_725),
        # requested were 8000 / 256, vLLM ended these at its max_model_len, after 192 tokens
        "k8x8000x192": Figures(vllm=497),
        "k64x2000": Figures(vllm=2_956),
        "h1": Figures(vllm=193.6, mark=240, ttft=(12.5, None), itl=(5.15, 6.2)),
        "h32": Figures(vllm=4_259, ttft=(301, 391), itl=(6.07, 7.2)),
        "h128": Figures(vllm=8_503, ttft=(745, 1555), itl=(9.2, 186)),
        "h256": Figures(
            vllm=9_641, mark=10_800, ttft=(993, 3157), itl=(14.8, 194), itl_p99_mark=60
        ),
        "mix": Figures(vllm=9_987, mark=11_200, ttft=(938, 3464), itl=(15.9, 66), itl_p99_mark=60),
    },
    (4096, 36, 2): {
        "startup": Figures(vllm=57, mark=20, unit="s"),
        "d1": Figures(vllm=264.7, mark=330),
        "d32": Figures(vllm=7_156),
        "d256": Figures(vllm=26_855, mark=30_000),
        "p16": Figures(vllm=67_599, mark=70_000, unit="in"),
        "nano": Figures(vllm=14_013),
    },
    (4096, 36, 4): {"d1": Figures(mark=450)},
    # Qwen3-30B-A3B, with vLLM's tuned table of Triton configurations for this card
    (2048, 48, 1): {
        "startup": Figures(vllm=86, mark=25, unit="s"),
        "d1": Figures(vllm=239, mark=420),
        "d8": Figures(vllm=835, mark=1_100),
        "d32": Figures(vllm=1_996, mark=2_300),
        "d128": Figures(vllm=6_468, mark=7_500),
        "d256": Figures(vllm=10_926, mark=13_500),
        "p16": Figures(vllm=64_247, mark=78_000, unit="in"),
        "nano": Figures(vllm=5_613, mark=7_000),
        "h256": Figures(mark=7_500),
    },
}

#: Of quantized models: by how ("fp8": vLLM's online quantization, per tensor; "gptq": 4 bits in
#: groups of 128), then as above.
QUANTIZED_VLLM_H200: dict[str, dict[tuple[int, int, int], dict[str, Figures]]] = {
    "fp8": {
        (4096, 36, 1): {
            "startup": Figures(mark=18, unit="s"),
            "d1": Figures(vllm=269, mark=400),
            "d32": Figures(vllm=6_401, mark=8_200),
            "d256": Figures(vllm=22_548, mark=26_000),
            "p16": Figures(vllm=62_276, mark=72_000, unit="in"),
        }
    },
    "gptq": {
        (4096, 36, 1): {
            "d1": Figures(vllm=226, mark=520),
            "d32": Figures(vllm=6_067, mark=8_200),
            "d128": Figures(vllm=13_364, mark=16_500),
            "d256": Figures(vllm=16_757, mark=20_000),
            "p16": Figures(vllm=38_373, mark=43_000, unit="in"),
        }
    },
}
