"""Beam searches beside those of transformers: cases, their parameters, what is expected."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from aioinfer import BeamSearch, SamplingParams
from tests.functional.reference import Reference

NEW_TOKENS = 16
ENDS = list(range(2, 62))
#: Width, length penalty, early stopping.
CASES: list[tuple[int, float, Any]] = [
    (2, 1.0, False), (3, 0.0, True), (4, 2.0, False), (5, 0.0, False), (8, 1.0, True),
    (8, 2.0, "never"), (2, -1.0, False), (1, 1.0, False),
]  # fmt: skip


def expected(
    reference: Reference, prompt: Sequence[int], case: tuple[int, float, Any], new: int
) -> list[list[int]]:
    """Returns what transformers finds, the best first, without what it pads with."""
    width, penalty, early = case
    with torch.inference_mode():
        found = reference.model.generate(
            torch.tensor([prompt]), num_beams=width, num_return_sequences=width, do_sample=False,
            length_penalty=penalty, early_stopping=early, max_new_tokens=new, pad_token_id=0,
        )  # fmt: skip
    ends = reference.model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]  # [None] where none is heeded
    outputs = []
    for row in found[:, len(prompt) :].tolist():
        end = next((i for i, token in enumerate(row) if token in ends), len(row))
        outputs.append(row[: end + 1])
    return outputs


def params(case: tuple[int, float, Any], new: int = NEW_TOKENS, **fields: Any) -> SamplingParams:
    return SamplingParams(n=case[0], max_tokens=new, beam_search=BeamSearch(*case), **fields)


def outputs_of(output: Any) -> list[list[int]]:
    return [completion.token_ids for completion in output.completions]


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(62, 500) for _ in range(length)] for length in lengths]
