"""Drafts of constrained requests change no text: each row has the mask behind its drafts, forced
tokens and complete outputs come where they come without drafts, and so does what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioinfer import LLM, SamplingParams
from aioinfer.engine import recovery
from aioinfer.engine.output import OutputSequence
from aioinfer.errors import GenerationError
from aioinfer.features.masks.planning import Planning as Masks
from aioinfer.features.speculation.planning import ACCEPTED, DRAFT_TOKENS
from aioinfer.llm import Output
from aioinfer.sampling_params import GrammarSpec
from aioinfer.text.constraints import Constraint
from tests.automata import Residues, Runs, constrain
from tests.functional.conftest import SMOLLM2

# fixtures
from tests.functional.test_speculation import PROMPTS, VOCAB_SIZE, check, run_with_loss, running
from tests.functional.test_speculation import folder as folder
from tests.functional.test_speculation import rows_cost_nothing as rows_cost_nothing

pytestmark = pytest.mark.extended

TOKENS = 60
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 0.6, "top_k": 6, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.05, "logprobs": 2},
    {"temperature": 0.4, "frequency_penalty": 0.05, "presence_penalty": 0.1},
    {"temperature": 0.0, "logit_bias": {20: 5.0, 30: -20.0}, "n": 2},
)
#: Two of each kind, with prompts of their own.
PARAMS = [
    SamplingParams(seed=number, max_tokens=TOKENS, ignore_eos=True, **KINDS[number % len(KINDS)])
    for number in range(2 * len(KINDS))
]
REQUESTS = [PROMPTS[number % len(PROMPTS)] for number in range(len(PARAMS))]


def automaton(**more: Any) -> Callable[[OutputSequence], Constraint]:
    """Returns what gives each sequence an automaton of few choices: the text repeats itself."""
    return lambda sequence: Residues(VOCAB_SIZE, modulus=40, **more)


def runs(**more: Any) -> Callable[[OutputSequence], Constraint]:
    return lambda sequence: Runs(VOCAB_SIZE, modulus=40, **more)


CONSTRAINTS = {
    "automaton": automaton(),
    "complete": automaton(length=31),
    "runs": runs(length_of_run=9),
    "complete runs": runs(length_of_run=9, length=44),
}


def generate(llm: LLM, choose: Callable[[OutputSequence], Constraint]) -> list[Output]:
    undo = constrain(llm.frontend, choose)
    try:
        return llm.generate(REQUESTS, PARAMS)
    finally:
        undo()


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[dict[str, list[Output]]]:
    """The outputs without drafts and without jumps."""
    with running(folder, speculation__method="none") as llm:
        llm.frontend.engines[0].features.of(Masks).max_jumpers = 0
        yield {name: generate(llm, choose) for name, choose in CONSTRAINTS.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"speculation__max_draft_tokens": 15, "cache__block_size": 1, "cache__num_blocks": 3000},
        {"scheduler__plan_ahead": False, "scheduler__max_num_batched_tokens": 9},
        {"cache__num_blocks": 40},
        {"parallel__executor": "multiprocess", "parallel__tensor_parallel_size": 2},
        {
            "parallel__executor": "multiprocess",
            "parallel__pipeline_parallel_size": 2,
            "speculation__method": "ngram",
        },
    ],
    ids=str,
)
def test_the_text_is_the_plain_one(
    folder: Path, settings: dict[str, Any], expected: dict[str, list[Output]]
) -> None:
    """Workers apart, whose steps take long, have two of the constraints."""
    is_inline = settings.get("parallel__executor") != "multiprocess"
    names = CONSTRAINTS if is_inline else ("automaton", "complete runs")
    with running(folder, **settings) as llm:
        engine, rows_of = llm.frontend.engines[0], dict[str, int]()
        for most in (0, 100):  # without jumps and with them
            engine.features.of(Masks).max_jumpers = most
            for name in names:
                choose = CONSTRAINTS[name]
                llm.frontend.reset_prefix_cache()  # and with it drafts from the texts before
                before = engine.metrics.counts.copy()
                for found, wanted in zip(generate(llm, choose), expected[name], strict=True):
                    check(found.completions, wanted.completions)
                counts = engine.metrics.counts - before
                if most and "runs" in name:  # most of what repeats itself is not sampled
                    assert counts["constrained_rows"] < 0.8 * rows_of[name]
                    assert counts[DRAFT_TOKENS] > 30
                else:
                    rows_of[name] = counts["constrained_rows"]
                    assert counts[DRAFT_TOKENS] > counts[ACCEPTED] > 30, (most, name)
        for found, wanted in zip(generate(llm, choose), expected[name], strict=True):
            check(found.completions, wanted.completions)  # with drafts from the texts before
        if "cache__num_blocks" in settings and "cache__block_size" not in settings:
            assert llm.frontend.stats()["preemptions"] > 5


def test_a_draft_whose_row_has_no_mask_ends_its_request_once_it_is_kept(
    folder: Path, expected: dict[str, list[Output]]
) -> None:
    """With the error of a run without drafts. Tokens of the step with the error are lost."""

    async def read(llm: LLM, number: int) -> tuple[list[int], str]:
        output = await llm.frontend.submit(REQUESTS[number], PARAMS[number])
        tokens: list[int] = []
        try:
            async for delta in output:
                tokens += delta.token_ids
        except GenerationError as error:
            return tokens, str(error)
        return tokens, ""

    texts = [output.completions[0].token_ids for output in expected["automaton"]]
    with running(folder) as llm:
        engine = llm.frontend.engines[0]
        for length in range(8, TOKENS, 3):
            undo = constrain(llm.frontend, automaton(fails_at=length))
            for number in (0, 1):
                tokens, message = llm.run(read(llm, number))
                assert tokens == texts[number][: len(tokens)]
                assert length - 6 <= len(tokens) < length
                assert "the automaton fails" in message
            undo()
        assert engine.metrics.counts[ACCEPTED] > 100


def test_lost_workers(
    folder: Path, expected: dict[str, list[Output]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_FIRST_DELAY_S", 0.0)
    with running(folder) as llm:
        constrain(llm.frontend, CONSTRAINTS["runs"])
        found = llm.run(run_with_loss(llm, "", (REQUESTS, PARAMS)))
        assert found == [output.completions[0].token_ids for output in expected["runs"]]
        assert llm.frontend.engines[0].metrics.restarts == 1
        assert llm.frontend.engines[0].metrics.counts[DRAFT_TOKENS] > 30


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "people": {
                "type": "array", "minItems": 3, "maxItems": 3,
                "items": {"type": "object",
                          "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                          "required": ["name", "age"], "additionalProperties": False},
            }
        },
        "required": ["people"],
        "additionalProperties": False,
    }
)  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "find_person",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
        },
    },
}
QUESTION = 'Anna is 31, Bob is 42 and Carla is 53. Write {"name": "Anna", "age": 31} and so on.'


def test_schemas_and_tools_with_a_real_model() -> None:
    """Greedy and sampled: the texts are equal, and follow the schema."""
    settings = {
        "parallel.executor": "inline", "parallel.cpu_threads": 1, "model.max_model_len": 512,
        "scheduler.max_num_seqs": 4, "cache.num_blocks": 256,
    }  # fmt: skip
    messages = [{"role": "user", "content": QUESTION}]
    kinds = [{"temperature": 0.0}, {"temperature": 0.7, "seed": 5, "n": 2}]
    found = {}
    for method in ("none", "auto"):
        with LLM(
            SMOLLM2, settings=settings | {"speculation.method": method}, progress=False
        ) as llm:
            grammar = GrammarSpec("json_schema", SCHEMA)
            texts = llm.chat(
                [messages] * 2,
                [SamplingParams(max_tokens=120, grammar=grammar, **kind) for kind in kinds],
            )
            calls = llm.chat(
                [messages] * 2,
                [SamplingParams(max_tokens=60, **kind) for kind in kinds],
                tools=[TOOL], tool_choice="required",
            )  # fmt: skip
            found[method] = [
                (completion.token_ids, completion.finish_reason)
                for output in (*texts, *calls)
                for completion in output.completions
            ]
            counts = llm.frontend.engines[0].metrics.counts
            assert (counts[ACCEPTED] > 10) == (method == "auto")
    assert found["auto"] == found["none"]
    for output in texts:
        for completion in output.completions:
            if completion.finish_reason == "stop":
                assert len(json.loads(completion.text)["people"]) == 3
