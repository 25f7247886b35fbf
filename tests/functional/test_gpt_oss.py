"""gpt-oss token for token as transformers has it: a small random model through the whole engine,
with its experts in bfloat16 and in MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from aioinfer import LLM, SamplingParams
from tests.gpu.engine_settings import engine_settings
from tests.gpu.random_models import greedy_outputs, random_model, random_prompts
from tests.mxfp4_models import quantize_experts

VOCAB = 512
NEW_TOKENS = 20
#: Shorter and longer than the window of 9 tokens, and than blocks.
LENGTHS = (1, 8, 21, 60, 75)
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 64,
}  # fmt: skip


class Case(NamedTuple):
    """A model, prompts, and the greedy tokens of transformers in float32."""

    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


def make_case(root: Path, device: str, *, is_mxfp4: bool, **fields: Any) -> Case:
    """Makes a random model; in MXFP4 what transformers computes with are its dequantized
    weights."""
    folder = random_model(
        root / "model", family="gpt_oss", vocab_size=VOCAB, rope_parameters=YARN, **fields
    )
    dense = folder
    if is_mxfp4:
        dense = root / "dense"
        quantize_experts(folder, folder, dense=dense)
    prompts = random_prompts(LENGTHS, VOCAB)
    model = AutoModelForCausalLM.from_pretrained(
        dense, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval().to(device)
    expected = greedy_outputs(model, prompts, NEW_TOKENS, eos_token_id=None)
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    return Case(folder, prompts, expected)


def check_greedy(case: Case, **settings: Any) -> None:
    """In one batch, with prompts in chunks."""
    defaults = {
        "parallel__executor": "inline",
        "model__max_model_len": 512,
        "scheduler__max_num_batched_tokens": 32,
    }
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    merged = engine_settings(**defaults | settings)
    with LLM(str(case.folder), settings=merged, progress=False) as llm:
        outputs = llm.generate(case.prompts, greedy)
        llm.frontend.engines[0].scheduler.check_integrity()
    assert sum(output.num_prefill_steps > 1 for output in outputs) >= 2
    assert [output.token_ids for output in outputs] == case.expected


CPU = {"parallel__device": "cpu", "parallel__cpu_threads": 1}


@pytest.fixture(scope="module", params=[False, True], ids=["bfloat16", "mxfp4"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("gpt_oss"), "cpu", is_mxfp4=request.param)


def test_one_rank(case: Case) -> None:
    check_greedy(case, **CPU)


@pytest.mark.extended
def test_two_ranks(case: Case) -> None:
    settings = {"parallel__executor": "multiprocess", "parallel__tensor_parallel_size": 2}
    check_greedy(case, **CPU, **settings)
