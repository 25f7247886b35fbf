"""Scheduler and worker over models with states: where snapshots are found, in forks and in
conversations. (Prefix hits, chunks and preemption of all families: `test_state_models`.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from aioinfer import LLM, SamplingParams
from tests.scheduled_worker import expected_outputs, generate, prompts_that_begin_alike
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.extended

FAMILIES = ("qwen3_next", "lfm2", "bamba")
BLOCK_SIZE = 4


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(request.param, tmp_path_factory.mktemp("states") / "model", vocab_size=200)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of which many begin alike."""
    return prompts_that_begin_alike(9)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return expected_outputs(folder, prompts)


@pytest.mark.parametrize("budget", [5, 512])
def test_forks_begin_with_a_snapshot_of_their_prompt(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], budget: int
) -> None:
    outputs, scheduler = generate(folder, prompts[:4], n=4, budget=budget)
    assert outputs == [output for output in expected[:4] for _ in range(4)]
    cached = sum(len(prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts[:4])
    assert scheduler.stats.prefix_hit >= 3 * (cached - 4 * BLOCK_SIZE)
    keeps_states = [group.keeps_states for group in scheduler.kv_cache.groups]
    assert True in keeps_states
    assert keeps_states == sorted(keeps_states), "groups of states are behind the others"


def test_a_conversation_goes_on_with_the_state_behind_its_last_answer(folder: Path) -> None:
    """Each prompt is the one before it, its answer, and a few tokens more, so that they begin and
    end at every place of a block."""
    settings = {
        "model.tokenizer": "none", "parallel.executor": "inline", "parallel.cpu_threads": 1,
        "cache.block_size": BLOCK_SIZE, "cache.cpu_memory_gib": 0.02,
    }  # fmt: skip
    prompt, turns, answers = [11, 7, 5], [], []
    with LLM(str(folder), settings=settings, progress=False) as llm:
        for turn in range(1, 12):
            new = 4 + turn % 5
            greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            (output,) = llm.generate([prompt], greedy)
            computed = len(turns[-1]) + len(answers[-1]) - 1 if turns else 0
            assert output.num_cached_tokens == computed // BLOCK_SIZE * BLOCK_SIZE
            turns.append(prompt)
            answers.append(list(output.outputs[0].token_ids))
            prompt = [*prompt, *answers[-1], *range(100, 100 + turn % 4 + 1)]
        scheduler = llm.frontend.engines[0].scheduler
        scheduler.check_integrity()
        snapshots = scheduler.kv_cache.pools[-1].num_cached
        assert snapshots <= 2 * len(turns), "a prompt and an answer keep a state each"
    for answer, expected in zip(answers, expected_outputs(folder, turns), strict=True):
        assert answer == expected[: len(answer)]


def test_a_model_of_states_alone(tmp_path: Path, prompts: list[list[int]]) -> None:
    """All layers are short convolutions; transformers computes such a model without its cache."""
    folder = tiny_model(
        "lfm2", tmp_path / "model", vocab_size=200, layer_types=["conv", "conv"], full_attn_idxs=[]
    )
    expected = expected_outputs(folder, prompts, use_cache=False)
    assert generate(folder, prompts)[0] == expected
    outputs, scheduler = generate(folder, prompts, budget=7, num_blocks=6)
    assert outputs == expected
    assert scheduler.stats.prefix_hit > 0
    outputs, _ = generate(folder, prompts[:4], n=3)
    assert outputs == [output for output in expected[:4] for _ in range(3)]
