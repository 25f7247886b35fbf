"""The models and cases of `bench_gpu.py`. A case is a number of requests, their lengths and their
prompts."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchlib.vllm_figures import QUANTIZED_VLLM_H200, VLLM_H200, Figures
from benchlib.workload import IntRange

OFFLINE_CASES = [
    "d1",
    "d8",
    "d32",
    "d128",
    "d256",
    "p16",
    "l32",
    "nano",
    "k8x8000",
    "k8x8000x192",
    "k64x2000",
]
HTTP_CASES = ["h256", "h512", "s256", "s512", "mix", "h1"]
#: Prompts are drawn from these token ids: no special ones below, and no more than the vocabularies
#: of common models above.
TOKEN_IDS = IntRange(100, 39_999)
#: So many output tokens a warm-up requests, at the case's own prompt lengths.
WARMUP_OUTPUT_LEN = 16
#: So many prompt tokens a warm-up over HTTP sends at most.
MAX_WARMUP_INPUT = 2**18

_OFFLINE_LENGTHS = {"d": (128, 256), "p": (4096, 1), "l": (4096, 128)}
_HTTP_LENGTHS = {"h": (512, 256), "s": (128, 256)}
_MIXED = IntRange(100, 1024)


@dataclass(frozen=True, slots=True)
class Model:
    """A model folder, and what its config.json contains.

    Attributes:
        max_len: the maximum tokens of a sequence that it was made for.
        figures: vLLM's, by case; none for shapes, quantizations and numbers of GPUs that were not
            measured.
    """

    folder: Path
    vocab_size: int
    max_len: int
    figures: dict[str, Figures]

    @classmethod
    def load(cls, folder: Path, num_gpus: int = 1, quantization: str = "auto") -> Model:
        """Returns the model of a folder, `quantization` being `model.quantization`.

        Raises `ValueError` if config.json is not one of a language model, `OSError` if it cannot
        be read."""
        fields = json.loads((folder / "config.json").read_text("utf-8"))
        try:
            shape = fields["hidden_size"], fields["num_hidden_layers"], num_gpus
            method = quantization
            if method == "auto":
                method = fields.get("quantization_config", {}).get("quant_method", "auto")
            table = VLLM_H200 if method == "auto" else QUANTIZED_VLLM_H200.get(method, {})
            return cls(
                folder.resolve(),
                fields["vocab_size"],
                fields["max_position_embeddings"],
                table.get(shape, {}),
            )
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{folder}/config.json describes no language model: {error!r}"
            ) from error


@dataclass(frozen=True, slots=True)
class Case:
    """A load.

    Attributes:
        name: as on the command line.
        http: whether it goes over HTTP.
        streams: the maximum of requests in flight.
        num_requests: requests of a round.
        input_len, output_len: tokens of a prompt, and tokens requested.
    """

    name: str
    http: bool
    streams: int
    num_requests: int
    input_len: IntRange
    output_len: IntRange
    temperature: float = 0.0

    @classmethod
    def parse(cls, name: str, http: bool) -> Case:
        """Returns the case of a name; the docstring of bench_gpu.py explains the names.

        Raises `ValueError`.
        """
        case = cls._parse_http(name) if http else cls._parse_offline(name)
        if case is None or case.streams < 1 or case.input_len.low < 1 or case.output_len.low < 1:
            kind, known = ("HTTP", HTTP_CASES) if http else ("offline", OFFLINE_CASES)
            raise ValueError(
                f"there is no {kind} case {name!r}: there are {', '.join(known)}, "
                f"and the same with other numbers"
            )
        return case

    @classmethod
    def _parse_offline(cls, name: str) -> Case | None:
        if name == "nano":
            return cls(name, False, 256, 256, _MIXED, _MIXED, temperature=0.6)
        if match := re.fullmatch(r"([dpl])(\d+)", name):
            streams, (prompt, output) = int(match[2]), _OFFLINE_LENGTHS[match[1]]
        elif match := re.fullmatch(r"k(\d+)x(\d+)(?:x(\d+))?", name):
            streams, prompt, output = int(match[1]), int(match[2]), int(match[3] or 256)
        else:
            return None
        return cls(
            name, False, streams, streams, IntRange(prompt, prompt), IntRange(output, output)
        )

    @classmethod
    def _parse_http(cls, name: str) -> Case | None:
        if match := re.fullmatch(r"mix(\d*)", name):
            streams = int(match[1] or 256)
            return cls(name, True, streams, 2 * streams, _MIXED, _MIXED)
        if name == "h1":
            return cls(name, True, 1, 1, IntRange(128, 128), IntRange(512, 512))
        if match := re.fullmatch(r"([hs])(\d+)", name):
            streams, (prompt, output) = int(match[2]), _HTTP_LENGTHS[match[1]]
            return cls(
                name, True, streams, 3 * streams, IntRange(prompt, prompt), IntRange(output, output)
            )
        if match := re.fullmatch(r"k(\d+)x(\d+)x(\d+)", name):
            streams, prompt, output = map(int, match.groups())
            return cls(
                name, True, streams, streams, IntRange(prompt, prompt), IntRange(output, output)
            )
        return None

    @property
    def max_len(self) -> int:
        """The maximum tokens of a request, prompt and output together."""
        return self.input_len.high + self.output_len.high

    @property
    def num_warmup_requests(self) -> int:
        """How many requests warm up over HTTP: one for each stream, where that is not too long."""
        return max(1, min(self.streams, MAX_WARMUP_INPUT // self.input_len.high))

    def lengths(self) -> list[tuple[int, int]]:
        """Returns (prompt tokens, output tokens) of each request, the same in every round."""
        random = np.random.default_rng(0)
        return [
            (self.input_len.draw(random), self.output_len.draw(random))
            for _ in range(self.num_requests)
        ]

    def prompts(self, round_number: int, vocab_size: int) -> list[list[int]]:
        """Returns the prompts of a round, of the lengths above; no two rounds or cases share
        one."""
        random = np.random.default_rng([zlib.crc32(self.name.encode()), round_number])
        high = min(TOKEN_IDS.high + 1, vocab_size)
        return [
            random.integers(TOKEN_IDS.low, high, length).tolist() for length, _ in self.lengths()
        ]
