from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aioinfer.errors import GenerationError
from aioinfer.sampling_params import GrammarSpec
from aioinfer.text.constraints import Mask, mask_words
from aioinfer.text.formats.registry import message_format
from aioinfer.text.grammar import CompiledGrammar, GrammarCompiler
from aioinfer.text.message_parser import ToolUse
from aioinfer.text.restrictions import CompiledRestrictions, ParallelFiller, RepeatedCalls
from aioinfer.text.token_lists import AllowedTokens, BadWords, mask_of, mask_of_all
from aioinfer.text.tokenizer import Tokenizer
from tests import real_tokenizers

VOCAB_SIZE, END = 49_152, 2


@pytest.fixture(scope="module")
def tokenizer(tokenizer_cache: Path) -> Tokenizer:
    return Tokenizer.load(real_tokenizers.smollm2_folder(tokenizer_cache))


@pytest.fixture(scope="module")
def digits(tokenizer: Tokenizer) -> CompiledGrammar:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [END])
    return compiler.compile(GrammarSpec("regex", "[0-9]{1,3}"))


def tokens_of(mask: Mask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, False)


def test_filters_narrow_a_grammar(tokenizer: Tokenizer, digits: CompiledGrammar) -> None:
    one, two, three = (ids(tokenizer, each)[0] for each in "123")
    filters = [
        AllowedTokens([one, two, END, 5], VOCAB_SIZE),
        BadWords([[one, two], [three]], VOCAB_SIZE),
    ]
    state = CompiledRestrictions(digits, filters, mask_of_all(VOCAB_SIZE)).start()
    mask = np.zeros(mask_words(VOCAB_SIZE), np.int32)
    state.fill(mask)
    assert tokens_of(mask) == sorted([one, two])
    state.accept([one])
    state.fill(mask)
    assert tokens_of(mask) == sorted([one, END])
    state.accept([one])
    assert not state.is_finished
    assert state.forced() == []
    state.accept([one])
    assert state.is_finished


def test_a_repeated_call_completes_an_output(tokenizer: Tokenizer) -> None:
    """Of the sequence that repeats it: each has a search of its own."""
    format, use = message_format("", {}, "hermes", "none"), ToolUse([{"name": "f"}], "required")
    spec = format.grammar(use, in_thought=False, answer=None)
    assert spec is not None
    restricted = CompiledRestrictions(
        GrammarCompiler(tokenizer, VOCAB_SIZE, [END]).compile(spec),
        [],
        mask_of_all(VOCAB_SIZE),
        lambda: RepeatedCalls(tokenizer.detokenizer(), format.parser(use, in_thought=False)),
    )
    first = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    other = first.replace("1", "2")
    for ways in ("by itself", "with others"):
        same, differs = restricted.start(), restricted.start()
        for state, text in ((same, first + first), (differs, first + other)):
            tokens = ids(tokenizer, text.removesuffix("}\n</tool_call>\n"))
            for token in tokens:
                assert not state.is_finished
                if ways == "by itself":
                    state.accept([token])
                else:
                    assert ParallelFiller().accept([(state, token)]) == [None]
        assert same.is_finished
        assert not differs.is_finished


def test_filters_alone() -> None:
    state = CompiledRestrictions(None, [AllowedTokens([3], 40)], mask_of_all(40)).start()
    mask = np.zeros(2, np.int32)
    for _ in range(3):
        state.fill(mask)
        assert tokens_of(mask) == [3]
        state.accept([3])
    assert not state.is_finished


def test_nothing_left(digits: CompiledGrammar) -> None:
    filters = [AllowedTokens([END], VOCAB_SIZE)]
    state = CompiledRestrictions(digits, filters, mask_of_all(VOCAB_SIZE)).start()
    with pytest.raises(GenerationError, match="no token may come next"):
        state.fill(np.zeros(mask_words(VOCAB_SIZE), np.int32))


@pytest.mark.parametrize("count", [1, 2, 40])
def test_many_masks_at_a_time(tokenizer: Tokenizer, digits: CompiledGrammar, count: int) -> None:
    """Each row gets what `fill` of its constraint would write, a failure concerns its row alone,
    and other rows stay."""
    everything = mask_of_all(VOCAB_SIZE)
    allowed = CompiledRestrictions(None, [AllowedTokens([7], VOCAB_SIZE)], everything)
    impossible = CompiledRestrictions(digits, [AllowedTokens([7], VOCAB_SIZE)], everything)
    whole = CompiledRestrictions(digits, [], everything)
    kinds = [whole, allowed, impossible, digits]
    constraints = [kinds[index % len(kinds)].start() for index in range(count)]
    for index, constraint in enumerate(constraints):
        if index % len(kinds) == 0 and index % 8 == 4:
            constraint.accept(ids(tokenizer, "12"))
    masks = np.full((2 * count, mask_words(VOCAB_SIZE)), 123, np.int32)
    rows = [(constraint, 2 * index + 1) for index, constraint in enumerate(constraints)]
    failures = ParallelFiller().fill(rows, masks)
    assert (masks[::2] == 123).all()
    for (constraint, row), failure in zip(rows, failures, strict=True):
        if isinstance(failure, GenerationError):
            assert (row // 2) % len(kinds) == 2
            continue
        assert failure is None
        alone = np.zeros(mask_words(VOCAB_SIZE), np.int32)
        constraint.fill(alone)
        assert (masks[row] == alone).all()
    if count > 1:
        assert tokens_of(masks[3]) == [7]


def test_a_filler_of_other_constraints() -> None:
    class Even:
        is_finished = False

        def accept(self, tokens: object) -> None:
            raise NotImplementedError

        def fill(self, mask: Mask) -> None:
            mask[:] = mask_of(range(0, 40, 2), 40)

        def forced(self) -> list[int]:
            return []

    masks = np.zeros((1, 2), np.int32)
    assert ParallelFiller().fill([(Even(), 0)], masks) == [None]
    assert tokens_of(masks[0]) == list(range(0, 40, 2))
