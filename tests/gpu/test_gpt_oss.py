"""gpt-oss on GPUs: greedy tokens in float32 equal to those of transformers, with the head size and
the window of the published models, and rounding errors in bfloat16 (Hopper's prefill kernel) no
worse than its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_settings import (
    NEEDS_TWO,
    TWO_RANKS,
    check_nothing_was_compiled,
    has_graphs,
    inline_llm,
    worker_of,
)
from test_families import Case as Prompts
from test_families import check_rounding

from aioinfer import SamplingParams
from aioinfer.layers.kernel_experts import KernelMixtureMLP
from tests.functional.test_gpt_oss import Case, check_greedy, make_case

#: A window that is shorter than most prompts.
SIZES = {
    "hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 64,
    "max_position_embeddings": 1024, "sliding_window": 50, "initializer_range": 0.05,
    "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["bfloat16", "mxfp4"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("gpt_oss")
    return make_case(folder, "cuda", is_mxfp4=request.param, **SIZES)


@pytest.mark.timeout(300)  # kernels are compiled
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_greedy_tokens_are_those_of_transformers(case: Case, block_size: int) -> None:
    check_greedy(case, cache__block_size=block_size)


@pytest.mark.timeout(300)
@NEEDS_TWO
def test_two_ranks(case: Case) -> None:
    check_greedy(case, **TWO_RANKS)


@pytest.mark.timeout(300)
def test_rounding_errors_in_bfloat16(tmp_path: Path) -> None:
    """Tokens take all experts: where a router selects, a rounding may decide between two experts
    whose scores are nearly equal, and one such token has ten times the error of all others, in
    either implementation (notes/experts.md)."""
    fields = SIZES | {"num_experts_per_tok": 8}
    case = make_case(tmp_path, "cuda", is_mxfp4=False, **fields)
    check_rounding(Prompts(*case), "cuda")


@pytest.mark.timeout(300)
def test_experts_run_in_kernels_and_graphs(case: Case) -> None:
    """In bfloat16, with the experts of the checkpoint as they are, and with nothing compiled while
    serving."""
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with inline_llm(case.folder, model__dtype="bfloat16") as llm:
        model: Any = worker_of(llm).model
        assert isinstance(model.layers[0].parts[1], KernelMixtureMLP)
        assert has_graphs(llm)
        for length in (1, 2, 9, 17, 70, 300):
            llm.generate([[5] * length], greedy)
        llm.generate([[5 + i] * (1 + 13 * i) for i in range(40)], greedy)
        check_nothing_was_compiled(llm)
