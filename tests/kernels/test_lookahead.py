"""Kernels of lookahead rows: positions, kept tokens, penalties of drafts, and drafts of n-grams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from aioinfer.kernels import ngram
from aioinfer.kernels.lookahead import accept_tokens, resolve_starts
from aioinfer.kernels.ngram import propose_ngrams
from aioinfer.kernels.penalties import IN_PROMPT, apply_penalties

from aioinfer.ipc.lookahead import SKIPPED
from aioinfer.worker.slots import LookaheadTensors, Slots

CPU = torch.device("cpu")


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_rows_begin_where_only_the_device_knows_unless_they_are_settled() -> None:
    slots, starts = int32(2, 2, 2, 0, 1, 1), int32(9, 10, 11, 3, 5, 6)
    offsets, settled = int32(0, 1, 2, 0, 0, 1), int32(0, 0, 0, 1, 1, 1)
    bases = torch.full((6,), -7, dtype=torch.int32)
    for _ in range(2):  # a second launch changes nothing
        resolve_starts(slots, starts, offsets, settled, int32(50, 60, 11), bases)
        assert starts.tolist() == [11, 12, 13, 3, 5, 6]
        assert bases.tolist() == [11, 11, 11, 3, 5, 5]


def random_groups(seed: int) -> list[torch.Tensor]:
    """Rows of 150 slots with up to 6 rows each: slots, positions, offsets, sampled tokens and
    inputs."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 7, (150,), generator=generator)
    slots = torch.randperm(150, generator=generator).repeat_interleave(sizes)
    offsets = torch.cat([torch.arange(int(size)) for size in sizes])
    starts = torch.randint(0, 20, (150,), generator=generator)
    sampled = torch.randint(-1, 3, (len(slots),), generator=generator)
    inputs = torch.where(
        torch.rand(len(slots), generator=generator) < 0.7, sampled.roll(1), sampled.roll(1) + 1
    )
    rows = slots, starts[slots] + offsets + 1, offsets, sampled, inputs
    return [values.int() for values in rows]


@pytest.mark.parametrize("seed", range(3))
def test_sampled_tokens_are_kept_up_to_the_first_draft_that_differs(seed: int) -> None:
    """150 groups are more than a program has; groups of one row, failed rows, and late rows."""
    slot_ids, positions, offsets, sampled, inputs = random_groups(seed)
    ours, reference = (Slots(150, 40, 16, 100, CPU) for _ in range(2))
    expected = sampled.clone()
    lookahead = LookaheadTensors(offsets, inputs)
    reference.accept(slot_ids.numpy(), positions.numpy(), lookahead, expected)
    late = int(slot_ids[0])
    reference.tokens[late], reference.next_start[late] = 0, 0
    is_real, index = (slot_ids != late).int(), int32(1)
    results = torch.full((3, len(sampled) + 2), 77, dtype=torch.int32)
    places = torch.randperm(len(sampled)).int() + 2
    for _ in range(2):  # rows may be sampled once more
        accept_tokens(
            tokens := sampled.clone(), slot_ids, positions, is_real, offsets, inputs, ours.tokens,
            ours.next_start, results=results, buffer_index=index, places=places,
        )  # fmt: skip
        assert torch.equal(tokens, expected)
        assert torch.equal(results[1, places.long()], expected)
        assert torch.equal(ours.tokens, reference.tokens)
        assert torch.equal(ours.next_start, reference.next_start)
    assert (expected == SKIPPED).sum() > 20
    assert (results[[0, 2]] == 77).all()
    assert (results[1, :2] == 77).all()


def test_results_are_in_the_order_of_the_rows_without_places() -> None:
    tokens, results = torch.zeros(2, 9, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32)
    next_start = torch.zeros(2, dtype=torch.int32)
    accept_tokens(
        int32(7, 8, 9, 4), int32(1, 1, 1, 0), int32(3, 4, 5, 2), int32(1, 1, 1, 1),
        int32(0, 1, 2, 0), int32(6, 7, 3, 1), tokens, next_start,
        results=results, buffer_index=int32(0),
    )  # fmt: skip
    assert results[0].tolist() == [7, 8, SKIPPED, 4, 0]
    assert tokens[1, 3:6].tolist() == [7, 8, 0]
    assert next_start.tolist() == [2, 4]


def test_penalties_count_the_drafts_before_a_row() -> None:
    """As if the drafts were output: of tokens of the prompt, of new ones, and of twice the same; a
    shard has no logits of other tokens."""
    torch.manual_seed(0)
    vocab, first = 2600, 100  # more than a chunk
    occurrences = torch.zeros(2, first + vocab, dtype=torch.int32)
    occurrences[1, [105, 2300, 7]] = int32(IN_PROMPT, IN_PROMPT | 2, 1)
    logits = torch.randn(5, vocab)
    slot_ids, row_of_slot = int32(2, 2, 2, 2, 0), int32(-1, 0, 1)
    strengths = [torch.tensor([1.0, 1.0, value]) for value in (1.3, 0.5, 0.25)]
    ours = logits.clone()
    apply_penalties(
        ours, slot_ids, row_of_slot, occurrences[:, first:], *strengths,
        offsets=int32(0, 1, 2, 3, 0), inputs=int32(900, 105, 2500, 2500, 7), first=first,
    )  # fmt: skip
    for row, drafts in enumerate(([], [105], [105, 2500], [105, 2500, 2500], [])):
        counted = occurrences.clone()
        for draft in drafts:
            counted[1, draft] += 1
        expected = logits.clone()
        apply_penalties(expected, slot_ids, row_of_slot, counted[:, first:], *strengths)
        assert torch.equal(ours[row], expected[row])


def expected_drafts(
    text: list[int], count: int, predicted: list[int], sizes: Sequence[int] = (4, 3, 2)
) -> list[int] | None:
    """Drafts behind `text` by the rule of `propose_ngrams` for suffixes of these sizes."""
    for size in sizes:
        for end in range(len(predicted) - 1, size - 1, -1):
            if predicted[end - size : end] == text[-size:]:
                return (predicted[end:] * count)[:count]
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                drafts = list(text)
                for _ in range(count):
                    drafts.append(drafts[end + len(drafts) - len(text)])
                return drafts[len(text) :]
    return None


@pytest.mark.parametrize("block", [16, 4096])
def test_drafts_follow_the_latest_earlier_occurrence_of_the_last_tokens(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram, "BLOCK", block)
    generator = torch.Generator().manual_seed(5)
    slots, length = 40, 120
    vocabularies = torch.randint(2, 14, (slots, 1), generator=generator)
    texts = (torch.rand(slots, length, generator=generator) * vocabularies).int()
    bases = torch.randint(0, length - 8, (slots,), generator=generator)
    bases[:6] = torch.tensor([0, 1, 2, 3, 4, 5])
    counts = torch.randint(0, 6, (slots,), generator=generator)
    predicted = (torch.rand(slots, 50, generator=generator) * vocabularies).int()
    lengths = torch.randint(-30, 51, (slots,), generator=generator).clamp(min=0).int()
    expected, found, in_predicted = texts.clone(), 0, 0
    for slot in range(slots):
        base, count = int(bases[slot]), int(counts[slot])
        text = predicted[slot, : int(lengths[slot])].tolist()
        drafts = expected_drafts(texts[slot, : base + 1].tolist(), count, text)
        without = expected_drafts(texts[slot, : base + 1].tolist(), count, [])
        in_predicted += drafts != without
        if count:
            expected[slot, base + 1 : base + 1 + count] = int32(*(drafts or [0] * count))
            found += drafts is not None
    assert 15 < found < (counts > 0).sum()
    assert in_predicted > 5
    ids = torch.arange(slots).repeat_interleave(counts + 1)
    offsets = torch.cat([torch.arange(int(count) + 1) for count in counts])
    rows = ids.int(), bases[ids].int(), offsets.int()
    propose_ngrams(*rows, texts, predicted, lengths, min_suffix=2, max_suffix=4)
    assert torch.equal(texts, expected)


def test_drafts_stay_where_no_suffix_is_long_enough() -> None:
    """Texts that repeat seven or eight tokens, of which some have an error among them."""
    generator = torch.Generator().manual_seed(6)
    slots, length, count = 30, 70, 3
    texts = torch.randint(0, 50, (slots, length), generator=generator).int()
    bases = torch.randint(40, length - 6, (slots,), generator=generator)
    predicted = texts[:, 10:38].clone()
    lengths = torch.randint(0, 2, (slots,), generator=generator).int() * 28
    for slot in range(slots):
        base, wrong = int(bases[slot]), int(torch.randint(0, 20, (), generator=generator))
        texts[slot, base - 7 : base + 1] = texts[slot, 20:28].clone()
        if wrong < 8:
            texts[slot, base - wrong] = 60
        if slot % 3:
            texts[slot, 15:38:6] = 61  # the predicted text alone has it
    expected, sources = texts.clone(), Counter[str]()
    for slot in range(slots):
        text = texts[slot, : int(bases[slot]) + 1].tolist()
        given = predicted[slot, : int(lengths[slot])].tolist()
        drafts = expected_drafts(text, count, given, (7,))
        sources["kept" if drafts is None else "predicted" if given else "own"] += 1
        if drafts is not None:
            expected[slot, len(text) : len(text) + count] = int32(*drafts)
    assert min(sources["kept"], sources["predicted"], sources["own"]) > 1
    offsets = torch.arange(count + 1).repeat(slots).int()
    ids = torch.arange(slots).repeat_interleave(count + 1)
    rows = ids.int(), bases[ids].int(), offsets
    sizes = {"min_suffix": 7, "max_suffix": 7}
    propose_ngrams(*rows, texts, predicted, lengths, **sizes, keeps_drafts=True)
    assert torch.equal(texts, expected)


def test_drafts_end_with_the_row_of_a_slot() -> None:
    tokens = int32(1, 2, 3, 1, 2, 3, 9, 9).repeat(2, 1)
    tokens = tokens.view(-1)[:14].view(2, 7).clone()  # rows of 7: a longer draft would leave them
    tokens[0] = int32(1, 2, 3, 1, 2, 3, 8)
    before = tokens[1].clone()
    rows = int32(0, 0, 0, 0), int32(5, 5, 5, 5), int32(0, 1, 2, 3)
    nothing = int32(0, 0).view(2, 1), int32(0, 0)
    propose_ngrams(*rows, tokens, *nothing, min_suffix=2, max_suffix=4)
    assert tokens[0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert torch.equal(tokens[1], before)
