"""Beam search over the kernels and in CUDA graphs: the beams of transformers, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioinfer import LLM
from tests.functional.beams import CASES, ENDS, NEW_TOKENS, expected, outputs_of, params, prompts
from tests.functional.reference import Reference
from tests.tiny_models import tiny_model

DEVICE = "cuda"


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_beams_are_those_of_transformers(graphs: bool, ignore_eos: bool, tmp_path: Path) -> None:
    """Beams of 21 and more tokens share full blocks of 16, and copy their last ones."""
    folder = tiny_model("llama", tmp_path / "model", eos_token_id=ENDS, head_dim=64)
    reference = Reference(folder, with_tokenizer=False)
    if ignore_eos:
        reference.model.generation_config.eos_token_id = None
    settings = {
        "model.dtype": "float32", "model.tokenizer": "none", "parallel.device": DEVICE,
        "parallel.cuda_graphs": graphs, "scheduler.max_num_seqs": 64, "cache.block_size": 16,
        "cache.num_blocks": 400,
    }  # fmt: skip
    given = prompts(3, 21)
    searches = [params(case, ignore_eos=ignore_eos) for case in CASES]
    with LLM(str(folder), settings=settings, progress=False) as llm:
        found = [llm.generate([prompt] * len(searches), searches) for prompt in given]
        llm.frontend.engines[0].scheduler.check_integrity()
    for prompt, outputs in zip(given, found, strict=True):
        for case, output in zip(CASES, outputs, strict=True):
            assert outputs_of(output) == expected(reference, prompt, case, NEW_TOKENS), case
