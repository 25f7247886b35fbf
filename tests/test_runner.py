"""Steps of a real (small, random) model: whatever the plans, the tokens are those of transformers'
greedy search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aioinfer.config import Config, ModelConfig, SpeculationConfig
from aioinfer.features.logprobs.sections import LogprobRows, Logprobs
from aioinfer.ipc.kv_spec import group_layers
from aioinfer.ipc.lookahead import SKIPPED, LookaheadRows
from aioinfer.ipc.plan import Admission, Admissions, StepPlan, StepResult
from aioinfer.ipc.sections import Section
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.step import HostRows
from aioinfer.models.causal_lm import CausalLM
from aioinfer.models.loader import load_weights
from aioinfer.models.registry import build_model
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.device import CpuDevice, prepare_step
from aioinfer.worker.features import Rank
from aioinfer.worker.kv_tensors import KVTensors
from aioinfer.worker.runner import ModelRunner
from aioinfer.worker.slots import Slots
from aioinfer.worker.step_works import StepWorks
from tests.plans import ids

VOCAB = 199
BROKEN = 198  # a token whose embedding is NaN
BLOCKS = 64
CPU = torch.device("cpu")
PROMPT = [17, 3, 88, 150, 3, 9, 61, 120, 44, 7, 101, 23, 5]


class Model(NamedTuple):
    ours: CausalLM
    theirs: LlamaForCausalLM

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        output = self.theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count,
            max_new_tokens=count,
        )  # fmt: skip
        return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=6, num_key_value_heads=2,
            max_position_embeddings=256, initializer_range=0.25, bos_token_id=None,
            eos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    theirs.save_pretrained(folder)
    ours = build_model(folder, Backend(CPU, torch.float32, ParallelGroup.single()))
    load_weights(list(ours.weight_shards()), folder, "auto", 0, lambda done, total: None)
    ours.finalize()
    ours.embedding.weight[BROKEN] = torch.nan  # type: ignore[attr-defined]
    yield Model(ours, theirs)
    torch.set_num_threads(threads)


class Row(NamedTuple):
    slot: int
    start: int
    length: int
    samples: bool = True


class Steps:
    """Posts hand-made plans to a runner.

    Block tables are scattered over the cache, from the back to the front.
    """

    def __init__(self, model: Model, block_size: int = 4):
        self.block_size = block_size
        slots = Slots(8, 100, block_size, VOCAB, CPU)
        groups, num_blocks = group_layers(model.ours.kv_specs), BLOCKS * 4 // block_size
        kv = KVTensors(groups, [num_blocks], block_size, torch.float32, CPU)
        model.ours.bind(groups, kv.tensors, block_size, 8, 100)
        given = SpeculationConfig(method="none")  # drafts are those of the test
        config = Config(model=ModelConfig(path=""), speculation=given)
        works = StepWorks.load(Rank(model.ours, slots, config=config))
        self.runner = ModelRunner(model.ours, CpuDevice(slots, kv, max_lookahead=8), works)
        self.free = list(range(0, num_blocks, 2)) + list(range(1, num_blocks, 2))
        self.tables: dict[int, list[int]] = {}
        self.admissions: list[Admission] = []
        self.growth: list[tuple[int, int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.step_id = 0

    def admit(
        self,
        slot: int,
        tokens: list[int],
        prompt_len: int | None = None,
        shared: list[int] | None = None,
        **params: Any,
    ) -> None:
        """Lets the next step admit a request; `shared` blocks begin its table, and the others are
        fresh."""
        seed, banned = params.pop("seed", 0), params.pop("banned", ())
        params.setdefault("temperature", 0)
        self.admissions.append(
            Admission(
                slot, ids(*tokens), prompt_len or len(tokens), SamplingParams(**params), seed,
                banned,
            ),
        )  # fmt: skip
        self.tables[slot] = list(shared or [])
        self.growth += [(slot, index, block) for index, block in enumerate(self.tables[slot])]

    def run(self, *rows: Row, sections: Sequence[Section] = ()) -> StepResult:
        """Executes one step with further sections, growing block tables as needed."""
        for row in rows:
            table = self.tables[row.slot]
            while len(table) * self.block_size < row.start + row.length:
                self.growth.append((row.slot, len(table), self.free.pop()))
                table.append(self.growth[-1][2])
        columns = zip(*rows, strict=True)
        growth = np.array(self.growth, np.int32).reshape(-1, 3).T.copy()
        copies = np.array(self.copies, np.int32).reshape(-1, 2).T.copy()
        plan = StepPlan(
            self.step_id, *(ids(*column) for column in columns), *growth, *copies,
            [Admissions.of(self.admissions), *sections],
        )  # fmt: skip
        plan = StepPlan.decode(b"".join(plan.encode()))
        self.step_id += 1
        self.growth, self.copies, self.admissions = [], [], []
        return self.runner.step(plan).wait()

    def tokens(self, *rows: Row) -> list[int]:
        return self.run(*rows).tokens.tolist()

    def generate(self, slot: int, prompt: list[int], count: int, **params: Any) -> list[int]:
        """A whole request, alone."""
        self.admit(slot, prompt, **params)
        first = self.tokens(Row(slot, 0, len(prompt)))
        return first + self.decode(slot, len(prompt), count - 1)

    def decode(self, slot: int, start: int, count: int) -> list[int]:
        return [
            token
            for position in range(start, start + count)
            for token in self.tokens(Row(slot, position, 1))
        ]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_prefill_and_decode_equal_transformers(model: Model, block_size: int) -> None:
    expected = model.greedy(PROMPT, 30)
    assert len(set(expected)) > 8, "a dull model shows nothing"
    assert Steps(model, block_size).generate(3, PROMPT, 30) == expected


@pytest.mark.parametrize("chunk", [1, 3, 5, 12])
def test_chunked_prefill_equals_whole_prefill(model: Model, chunk: int) -> None:
    steps = Steps(model)
    steps.admit(2, PROMPT)
    start = 0
    while start + chunk < len(PROMPT):
        assert steps.tokens(Row(2, start, chunk, False)) == []
        start += chunk
    first = steps.tokens(Row(2, start, len(PROMPT) - start))
    assert first + steps.decode(2, len(PROMPT), 9) == model.greedy(PROMPT, 10)


def test_a_mixed_batch_equals_each_alone(model: Model) -> None:
    """Decodes, a whole prompt, a chunk that is sampled and one that is not, in one step; results in
    the order of the sampling rows."""
    prompts = {
        slot: [(slot * 31 + i * i * 7) % 190 for i in range(5 + 3 * slot)] for slot in range(6)
    }
    expected = {slot: model.greedy(prompt, 6) for slot, prompt in prompts.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) == 6
    steps = Steps(model)
    for slot in (4, 1, 5, 2):
        steps.admit(slot, prompts[slot])
    steps.run(
        *(Row(slot, 0, len(prompts[slot])) for slot in (4, 1)),
        Row(5, 0, 7, False),
        Row(2, 0, 3, False),
    )
    steps.admit(0, prompts[0])
    steps.admit(3, prompts[3])
    mixed = [
        Row(1, len(prompts[1]), 1), Row(4, len(prompts[4]), 1), Row(3, 0, len(prompts[3])),
        Row(2, 3, 1, False),
        Row(5, 7, len(prompts[5]) - 7), Row(0, 0, len(prompts[0])),
    ]  # fmt: skip
    sampled = steps.tokens(*mixed)
    assert sampled == [
        expected[1][1], expected[4][1], expected[3][0], expected[5][0], expected[0][0],
    ]  # fmt: skip
    found = steps.tokens(Row(4, len(prompts[4]) + 1, 1), Row(2, 4, len(prompts[2]) - 4))
    assert found == [expected[4][2], expected[2][0]]


def test_rows_behind_a_wrong_draft_are_skipped(model: Model) -> None:
    """Two requests with drafts, one of them at a position that only the worker knows, beside a
    decode, and a prompt."""
    prompts = {slot: PROMPT[: 4 + 3 * slot] for slot in range(4)}
    texts = {slot: prompt + model.greedy(prompt, 12) for slot, prompt in prompts.items()}
    lengths = {slot: len(prompt) for slot, prompt in prompts.items()}
    steps = Steps(model)
    tokens = steps.runner.slots.tokens

    def draft(slot: int, first: int, *wrong: int) -> None:
        """Enters what follows token `first` of a text as drafts, but at positions `wrong`."""
        for position in range(first + 1, first + 4):
            right = texts[slot][position]
            tokens[slot, position] = right + 1 if position in wrong else right

    for slot in (0, 1, 2):
        steps.admit(slot, prompts[slot])
    steps.run(*(Row(slot, 0, lengths[slot]) for slot in (0, 1, 2)))
    a, b, c = (lengths[slot] for slot in (0, 1, 2))
    draft(0, a, a + 3)
    draft(2, c, c + 1)
    steps.admit(3, prompts[3])
    rows = [Row(0, a + i, 1) for i in range(4)] + [Row(1, b, 1)] + [Row(2, c, 1), Row(2, c + 1, 1)]
    offsets, ones = ids(0, 1, 2, 3, 0, 0, 1, 0), np.ones(8, np.int32)
    found = steps.run(
        *rows, Row(3, 0, lengths[3]), sections=[LookaheadRows(offsets, ones, 64 * ones)]
    )
    kept = [*texts[0][a + 1 : a + 4], SKIPPED, texts[1][b + 1], texts[2][c + 1], SKIPPED]
    assert found.tokens.tolist() == [*kept, texts[3][lengths[3]]]
    draft(0, a + 3)
    draft(2, c + 1)
    rows = [Row(0, a + 1 + i, 1) for i in range(3)] + [Row(2, c + 1, 1), Row(2, c + 2, 1)]
    section = LookaheadRows(ids(0, 1, 2, 0, 1), np.zeros(5, np.int32), np.full(5, 64, np.int32))
    found = steps.run(*rows, sections=[section])
    assert found.tokens.tolist() == texts[0][a + 4 : a + 7] + texts[2][c + 2 : c + 4]
    assert steps.tokens(Row(0, a + 6, 1), Row(2, c + 3, 1)) == [texts[0][a + 7], texts[2][c + 4]]


def test_a_row_that_cannot_be_sampled_ends_the_lookahead(model: Model) -> None:
    steps = Steps(model)
    steps.admit(0, PROMPT)
    steps.run(Row(0, 0, len(PROMPT)))
    expected, first = model.greedy(PROMPT, 2), len(PROMPT)
    steps.runner.slots.tokens[0, first + 1 : first + 3] = torch.tensor([BROKEN, expected[1]])
    steps.runner.slots.tokens[0, first] = BROKEN
    rows = [Row(0, first + i, 1) for i in range(3)]
    section = LookaheadRows(ids(0, 1, 2), ids(1, 1, 1), ids(64, 64, 64))
    assert steps.run(*rows, sections=[section]).tokens.tolist() == [-1, SKIPPED, SKIPPED]


def test_inputs_of_a_mixed_step(model: Model) -> None:
    steps = Steps(model)
    steps.admit(0, PROMPT)
    steps.admit(6, [1, 2, 3, 4, 5, 6, 7])
    steps.run(Row(0, 0, 13), Row(6, 0, 4, False))
    steps.runner.slots.tokens[0, 13] = 42
    plan = StepPlan(
        9, ids(0, 6), ids(13, 4), ids(1, 3), ids(1, 1), ids(), ids(), ids(), ids(), ids()
    )
    steps.runner.slots.block_tables[6, 1] = 11
    step = prepare_step(plan, steps.runner.slots)
    inputs, (group,) = step.inputs, step.inputs.groups
    assert inputs.input_ids.tolist() == [42, 5, 6, 7]
    assert inputs.positions.tolist() == [13, 4, 5, 6]
    assert group.slot_mapping.tolist() == [steps.tables[0][3] * 4 + 1, 44, 45, 46]
    assert inputs.query_starts.tolist() == [0, 1, 4]
    assert step.host == HostRows([1, 3], [14, 7])
    assert inputs.seq_lens.tolist() == [14, 7]
    assert step.num_decodes == 1
    assert step.sampled is not None
    assert (step.sampled.rows.tolist(), step.sampled.last.tolist()) == ([0, 1], [0, 3])
    assert group.block_tables[0].tolist() == steps.tables[0]
    assert group.block_tables[1, :2].tolist() == [steps.tables[6][0], 11]
    narrow = [inputs.input_ids, inputs.positions, inputs.query_starts, inputs.seq_lens]
    assert {tensor.dtype for tensor in (*narrow, group.block_tables)} == {torch.int32}
    assert group.slot_mapping.dtype == torch.int64
    assert inputs.rotary is None
    assert inputs.rotary_positions is inputs.positions
    steps.runner.slots.rotary_offsets = torch.tensor([-4, 0, 0, 0, 0, 0, 3, 0], dtype=torch.int32)
    moved = prepare_step(plan, steps.runner.slots).inputs
    assert moved.positions.tolist() == inputs.positions.tolist()
    assert moved.rotary_positions.tolist() == [[9, 7, 8, 9]] * 3


def test_shared_prefix_blocks_are_read_and_not_computed_again(model: Model) -> None:
    steps = Steps(model)
    steps.generate(0, PROMPT, 3)
    other = [*PROMPT[:8], 60, 61, 62]
    steps.admit(1, other, shared=steps.tables[0][:2])
    first = steps.tokens(Row(1, 8, 3))
    assert first + steps.decode(1, len(other), 7) == model.greedy(other, 8)


def test_forks_continue_from_copies_of_the_last_block(model: Model) -> None:
    """The leader has written past the prompt into the block that is copied; each sibling overwrites
    that in its own copy."""
    steps = Steps(model)
    leader = steps.generate(0, PROMPT, 3)
    full = (len(PROMPT) - 1) // 4
    source = steps.tables[0][full]
    forced = {1: 90, 2: 130, 3: 55}
    for slot, token in forced.items():
        steps.admit(slot, PROMPT, shared=steps.tables[0][:full], logit_bias={token: 100.0})
        steps.copies.append((source, steps.free[-1]))
        steps.growth.append((slot, full, steps.free.pop()))
        steps.tables[slot].append(steps.growth[-1][2])
    firsts = steps.tokens(
        Row(0, len(PROMPT) + 2, 1), *(Row(slot, len(PROMPT) - 1, 1) for slot in forced)
    )
    assert firsts[1:] == list(forced.values())
    with torch.inference_mode():
        steps.runner.slots.params["num_bias"].zero_()
    assert leader + firsts[:1] + steps.decode(0, len(PROMPT) + 3, 4) == model.greedy(PROMPT, 8)
    for slot, token in forced.items():
        assert steps.decode(slot, len(PROMPT), 8) == model.greedy([*PROMPT, token], 8)


def test_all_copies_are_read_before_any_is_written(model: Model) -> None:
    steps = Steps(model)
    steps.generate(0, PROMPT, 2)
    (kv,) = steps.runner.device.kv.tensors
    torch.manual_seed(1)
    kv[:, :, :4] = torch.randn(kv[:, :, :4].shape)
    before = kv.clone()
    steps.copies = [(0, 1), (1, 2), (2, 0), (1, 3)]
    steps.run(Row(0, len(PROMPT) + 1, 1))
    assert kv[:, :, :4].equal(before[:, :, [2, 0, 1, 1]])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 2**64 - 5, "top_p": 0.9},
        {
            "temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4,
            "presence_penalty": 0.2,
        },
        {
            "temperature": 0.8, "seed": 3, "min_tokens": 9, "frequency_penalty": 1.0,
            "logit_bias": {4: 2.0},
        },
    ],
    ids=str,
)  # fmt: skip
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(
    model: Model, params: dict[str, Any]
) -> None:
    """Its blocks are lost and its slot is another one: it comes back with what it has generated."""
    steps = Steps(model)
    favourite = steps.generate(0, PROMPT, 12, **params)[2]
    params["banned"] = (favourite,) if "min_tokens" in params else ()
    undisturbed = Steps(model).generate(0, PROMPT, 12, **params)
    if "min_tokens" in params:
        assert favourite not in undisturbed[:9]
    for after in (1, 5):
        steps = Steps(model)
        output = steps.generate(6, PROMPT, after, **params)
        steps.generate(6, [9] * 20, 3)
        steps.admit(4, PROMPT + output, len(PROMPT), **params)
        output += steps.tokens(Row(4, 0, len(PROMPT) + after))
        output += steps.decode(4, len(PROMPT) + after, 12 - after - 1)
        assert output == undisturbed


def test_a_seed_gives_the_same_text_in_every_batch_and_chunking(model: Model) -> None:
    params: dict[str, Any] = {"temperature": 1.5, "seed": 77}
    alone = Steps(model).generate(0, PROMPT, 8, **params)
    assert alone != Steps(model).generate(0, PROMPT, 8, temperature=1.5, seed=78)
    steps = Steps(model)
    others = (0, 1, 5)
    for slot in others:
        steps.admit(slot, PROMPT, temperature=1.5, seed=slot, top_k=20)
    steps.admit(3, PROMPT, **params)
    steps.run(*(Row(slot, 0, 13) for slot in others), Row(3, 0, 6, False))
    steps.run(*(Row(slot, 13, 1) for slot in others), Row(3, 6, 2, False))
    batched = [steps.tokens(*(Row(slot, 14, 1) for slot in others), Row(3, 8, 5))[-1]]
    for i in range(7):
        batched.append(
            steps.tokens(Row(3, 13 + i, 1), *(Row(slot, 15 + i, 1) for slot in others))[0]
        )
    assert batched == alone


def test_a_reused_slot_shows_nothing_of_its_former_request(model: Model) -> None:
    steps = Steps(model)
    former: dict[str, Any] = {
        "temperature": 1.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 3.0,
        "logit_bias": {8: 9.0},
    }
    steps.generate(5, [*PROMPT, *PROMPT], 10, min_tokens=30, banned=tuple(range(20, 60)), **former)
    steps.admit(5, PROMPT)
    result = steps.run(Row(5, 0, len(PROMPT)))
    assert not result.sections
    first = result.tokens.tolist()
    assert first + steps.decode(5, len(PROMPT), 19) == model.greedy(PROMPT, 20)


def test_a_wasted_row_changes_nothing(model: Model) -> None:
    """A row that was posted before its request was known to have ended computes a position that
    nobody reads."""
    steps = Steps(model)
    expected = model.greedy(PROMPT, 6)
    assert steps.generate(0, PROMPT, 6) == expected
    steps.generate(1, PROMPT[:5], 2)
    assert steps.tokens(Row(0, len(PROMPT) + 4, 1), Row(1, 6, 1))[0] == expected[5]
    assert steps.tokens(Row(0, len(PROMPT) + 5, 1)) == model.greedy(PROMPT, 7)[6:]


def test_a_row_of_nan_fails_alone(model: Model) -> None:
    steps = Steps(model)
    expected = model.greedy(PROMPT, 8)
    steps.admit(0, [4, 5, BROKEN, 6, 7])
    steps.admit(1, PROMPT)
    assert steps.tokens(Row(0, 0, 5), Row(1, 0, 13)) == [-1, expected[0]]
    assert steps.tokens(Row(0, 5, 1), Row(1, 13, 1)) == [-1, expected[1]]
    assert steps.decode(1, 14, 2) == expected[2:4]


def test_blocks_of_a_row_of_nan_can_be_used_again(model: Model) -> None:
    """Behind the next owner's last token lies what the former one left."""
    steps = Steps(model, block_size=16)
    steps.generate(0, [BROKEN] * 30, 2)
    used = steps.tables[0]
    steps.free += used
    steps.admit(1, PROMPT)
    steps.admit(2, PROMPT[:3])
    firsts = steps.tokens(Row(1, 0, 13), Row(2, 0, 3))
    assert {steps.tables[1][0], steps.tables[2][0]} <= set(used)
    seconds = steps.tokens(Row(1, 13, 1), Row(2, 3, 1))
    assert [firsts[0], seconds[0]] == model.greedy(PROMPT, 2)
    assert [firsts[1], seconds[1]] == model.greedy(PROMPT[:3], 2)


def test_a_result_survives_the_ring(model: Model) -> None:
    steps = Steps(model)
    steps.admit(0, PROMPT)
    steps.admit(1, PROMPT[:4])
    asked = LogprobRows(ids(0), ids(2), ids(0), ids())
    result = steps.run(Row(0, 0, 13), Row(1, 0, 4), sections=[asked])
    assert result.step_id == 0
    assert result.busy_ns > 0
    copy = StepResult.decode(b"".join(result.encode()))
    assert copy.tokens.tolist() == result.tokens.tolist()
    with torch.inference_mode():
        expected = model.theirs(torch.tensor([PROMPT])).logits[0, -1].log_softmax(0)
    best = expected.topk(2)
    found = copy.section(Logprobs)
    assert found is not None
    assert found.rows.tolist() == [0]
    np.testing.assert_allclose(found.sampled[0], best.values[0].numpy(), rtol=1e-4)
    assert found.top_tokens[0].tolist() == best.indices.tolist()
    np.testing.assert_allclose(found.top_logprobs[0], best.values.numpy(), rtol=1e-4)
    nothing = StepResult.decode(b"".join(steps.run(Row(1, 4, 1, False)).encode()))
    assert nothing.tokens.shape == (0,)


def test_a_step_leaves_no_graph_behind(model: Model) -> None:
    steps = Steps(model)
    steps.generate(0, PROMPT, 2)
    assert not steps.runner.device.kv.tensors[0].requires_grad
    assert not steps.runner.slots.tokens.requires_grad
