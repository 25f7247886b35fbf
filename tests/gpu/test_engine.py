"""The whole engine on a GPU: the same greedy tokens as transformers in float32 on a CPU.

The models are small random ones; their prompts are token ids, so that no tokenizer package is
needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aioinfer import LLM, SamplingParams
from aioinfer.ipc.plan import StepPlan
from aioinfer.scheduler.scheduler import Scheduler
from tests.functional.reference import Reference
from tests.tiny_models import tiny_model

NEW_TOKENS = 24
VOCAB_SIZE = 512
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    fields: dict[str, Any] = {"eos_token_id": None, "head_dim": 64}  # for which there are kernels
    if request.param == "mistral":
        fields["sliding_window"] = 12
    tiny_model(request.param, folder, vocab_size=VOCAB_SIZE, **fields)
    tokenizer = Tokenizer(models.BPE({chr(0x100 + i): i for i in range(VOCAB_SIZE)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (1, 3, 7, 16, 17, 40, 64, 90)
    ]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return Reference(folder, with_tokenizer=False).generate(prompts, NEW_TOKENS)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"parallel.executor": "multiprocess"},
        {"scheduler.max_num_batched_tokens": 16},
        {"cache.block_size": 16, "cache.num_blocks": 12},
        {"scheduler.plan_ahead": False},
    ],
    ids=["inline", "process", "chunks", "preempted", "not ahead"],
)
def test_every_way(
    folder: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule, in_flight = Scheduler.schedule, []

    def counted(scheduler: Scheduler) -> StepPlan | None:
        plan = schedule(scheduler)
        in_flight.append(scheduler.num_in_flight)
        return plan

    monkeypatch.setattr(Scheduler, "schedule", counted)
    torch.backends.cuda.matmul.allow_tf32 = False
    defaults = {
        "parallel.device": "cuda",
        "parallel.executor": "inline",
        "model.dtype": "float32",
        "cache.num_blocks": 64,
    }
    with LLM(str(folder), settings=defaults | settings, progress=False) as llm:
        outputs = llm.generate(prompts, GREEDY)
        # blocks behind a window are freed in time for the others
        if settings.get("cache.num_blocks") and "mistral" not in folder.name:
            assert llm.frontend.stats()["preemptions"] >= 2
        if "scheduler.max_num_batched_tokens" in settings:
            long = [output for output in outputs if len(output.prompt_token_ids) > 16]
            assert min(output.num_prefill_steps for output in long) > 1
        assert max(in_flight) == (2 if settings.get("scheduler.plan_ahead", True) else 1)
        assert "cpu" not in llm.frontend.engines[0].report.device
        llm.frontend.engines[0].scheduler.check_integrity()
    assert [output.token_ids for output in outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


def test_a_seed_gives_the_same_text_alone_and_in_a_batch(
    folder: Path, prompts: list[list[int]]
) -> None:
    settings = {
        "parallel.device": "cuda",
        "parallel.executor": "inline",
        "model.dtype": "float32",
        "cache.num_blocks": 64,
    }
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=NEW_TOKENS, ignore_eos=True)
        for i in range(len(prompts))
    ]
    with LLM(str(folder), settings=settings, progress=False) as llm:
        together = llm.generate(prompts, params)
        alone = [
            llm.generate([prompt], [each])[0] for prompt, each in zip(prompts, params, strict=True)
        ]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
