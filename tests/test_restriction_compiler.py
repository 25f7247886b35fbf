from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from aioinfer.engine import restriction_compiler
from aioinfer.engine.restriction_compiler import RestrictionCompiler
from aioinfer.errors import RequestError
from aioinfer.sampling_params import GrammarSpec, SamplingParams
from aioinfer.text import grammar
from aioinfer.text.constraints import CompiledConstraint, mask_words
from aioinfer.text.restrictions import CompiledRestrictions, ParallelFiller, RestrictedTokens
from aioinfer.text.tokenizer import Tokenizer
from tests import real_tokenizers

VOCAB_SIZE, END = 49_152, 2


@pytest.fixture(scope="module")
def tokenizer(tokenizer_cache: Path) -> Tokenizer:
    return Tokenizer.load(real_tokenizers.smollm2_folder(tokenizer_cache))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler(tokenizer: Tokenizer) -> RestrictionCompiler:
    made = RestrictionCompiler(tokenizer, VOCAB_SIZE, [END])
    await asyncio.to_thread(made.prepare)
    return made


def first_tokens(compiled: CompiledConstraint | None, vocab_size: int = VOCAB_SIZE) -> list[int]:
    assert compiled is not None
    mask = np.zeros(mask_words(vocab_size), np.int32)
    compiled.start().fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def grammar_of(compiled: CompiledConstraint | None) -> object:
    assert isinstance(compiled, CompiledRestrictions)
    return compiled._grammar


def regex(pattern: str) -> SamplingParams:
    return SamplingParams(grammar=GrammarSpec("regex", pattern))


async def test_a_request_without_restrictions(compiler: RestrictionCompiler) -> None:
    assert await compiler.compile(SamplingParams()) is None


async def test_equal_grammars_share_one_compilation(compiler: RestrictionCompiler) -> None:
    params = regex("shared[0-9]")
    together = await asyncio.gather(*(compiler.compile(params) for _ in range(5)))
    later = await compiler.compile(regex("shared[0-9]"))
    assert len({id(grammar_of(each)) for each in [*together, later]}) == 1


async def test_many_sequences_have_several_parsers(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that come together start when there are parsers enough, in turn; each parser knows
    its own sequences alone, and all give the same masks."""
    monkeypatch.setattr(grammar, "num_threads", lambda: 3)
    monkeypatch.setattr(grammar, "_PARSERS_A_THREAD", 1)
    compiler = RestrictionCompiler(tokenizer, VOCAB_SIZE, [END])
    params = regex("[ab]{3}c")
    alone = await compiler.compile(params)
    states = [each.start() for each in [alone] if each is not None]
    together = await asyncio.gather(*(compiler.compile(params) for _ in range(8)))
    states += [each.start() for each in together if each is not None]
    parsers = [state.grammar.parser for state in states if isinstance(state, RestrictedTokens)]
    assert sorted(parsers[1:]) == [0, 0, 1, 1, 1, 2, 2, 2]
    masks = np.zeros((9, mask_words(VOCAB_SIZE)), np.int32)
    first = first_tokens(alone)[0]
    for number, state in enumerate(states):
        if number % 2:
            state.accept([first])
    assert ParallelFiller().fill(list(zip(states, range(9), strict=True)), masks) == [None] * 9
    assert all(np.array_equal(mask, masks[number % 2]) for number, mask in enumerate(masks))
    assert not np.array_equal(masks[0], masks[1])
    compiler.shutdown()


async def test_grammars_that_are_kept_are_bounded(
    compiler: RestrictionCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restriction_compiler, "MAX_KEPT_CHARS", 20)
    first = await compiler.compile(regex("0123456789a"))
    assert grammar_of(await compiler.compile(regex("0123456789a"))) is grammar_of(first)
    await compiler.compile(regex("0123456789b"))
    assert grammar_of(await compiler.compile(regex("0123456789a"))) is not grammar_of(first)


async def test_a_wrong_grammar_names_the_field_of_each_request(
    compiler: RestrictionCompiler,
) -> None:
    async def fail(param: str) -> str | None:
        spec = GrammarSpec("json_schema", '{"not": {"pattern": "a"}}', param=param)
        with pytest.raises(RequestError, match="'not' is not supported") as caught:
            await compiler.compile(SamplingParams(grammar=spec))
        return caught.value.param

    names = ["json_schema", "response_format", "grammar"]
    assert await asyncio.gather(*map(fail, names)) == names


async def test_a_request_that_gives_up_leaves_the_others(compiler: RestrictionCompiler) -> None:
    params = regex("given up[0-9]")
    impatient = asyncio.create_task(compiler.compile(params))
    patient = asyncio.create_task(compiler.compile(params))
    await asyncio.sleep(0)
    impatient.cancel()
    assert await patient is not None
    with pytest.raises(asyncio.CancelledError):
        await impatient


async def test_a_compilation_that_takes_too_long(
    compiler: RestrictionCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restriction_compiler, "COMPILE_TIMEOUT_S", 0.0)
    schema = json.dumps({"properties": {f"p{i}": {} for i in range(900)}})
    with pytest.raises(RequestError, match="too long") as caught:
        await compiler.compile(SamplingParams(grammar=GrammarSpec("json_schema", schema)))
    assert caught.value.param == "grammar"


async def test_lists_of_tokens(compiler: RestrictionCompiler, tokenizer: Tokenizer) -> None:
    yes, no = (tokenizer.encode(each, False)[0] for each in ("yes", "no"))
    assert first_tokens(await compiler.compile(SamplingParams(allowed_token_ids=(yes, no)))) == (
        sorted([yes, no])
    )
    params = SamplingParams(
        allowed_token_ids=(yes, no), bad_words=("no",), grammar=GrammarSpec("regex", "(yes|no)?")
    )
    assert first_tokens(await compiler.compile(params)) == sorted([END, yes])
    with pytest.raises(RequestError, match="outside of 0 to 49151") as caught:
        await compiler.compile(SamplingParams(allowed_token_ids=(VOCAB_SIZE,)))
    assert caught.value.param == "allowed_token_ids"


async def test_without_end_tokens(compiler: RestrictionCompiler, tokenizer: Tokenizer) -> None:
    grammar = GrammarSpec("regex", "a*")
    assert END in first_tokens(await compiler.compile(SamplingParams(grammar=grammar)))
    endless = SamplingParams(grammar=grammar, ignore_eos=True)
    assert END not in first_tokens(await compiler.compile(endless))
    nameless = RestrictionCompiler(tokenizer, VOCAB_SIZE, [])
    tokens = first_tokens(await nameless.compile(SamplingParams(grammar=grammar)))
    assert tokens
    assert all(set(tokenizer.decode([token])) == {"a"} for token in tokens)


async def test_a_server_without_a_tokenizer() -> None:
    compiler = RestrictionCompiler(None, 100, [2])
    compiler.prepare()
    compiled = await compiler.compile(SamplingParams(allowed_token_ids=(5,)))
    assert first_tokens(compiled, 100) == [5]
    for params, name in ((regex("a"), "grammar"), (SamplingParams(bad_words=("a",)), "bad_words")):
        with pytest.raises(RequestError, match="no tokenizer") as caught:
            await compiler.compile(params)
        assert caught.value.param == name


async def test_stop_tokens_end_a_grammar_where_it_may_end(
    compiler: RestrictionCompiler, tokenizer: Tokenizer
) -> None:
    newline, one = (tokenizer.encode(text, False)[0] for text in ("\n", "1"))
    stops = {"stop_token_ids": (newline, 17, VOCAB_SIZE), "grammar": GrammarSpec("regex", "[0-9]+")}
    for ignore_eos in (False, True):
        compiled = await compiler.compile(SamplingParams(ignore_eos=ignore_eos, **stops))
        assert compiled is not None
        state = compiled.start()
        mask = np.zeros(mask_words(VOCAB_SIZE), np.int32)
        state.fill(mask)
        before = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert not {newline, 17, END} & set(before.tolist())
        state.accept([one])
        state.fill(mask)
        after = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
        ends = {newline, 17} if ignore_eos else {newline, 17, END}
        assert after == {*before.tolist(), *ends}
    # what the request forbids stays forbidden
    one_stop = SamplingParams(allowed_token_ids=(one, 17), **stops)
    compiled = await compiler.compile(one_stop)
    assert compiled is not None
    state = compiled.start()
    state.accept([one])
    state.fill(mask)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    assert allowed == [END, 17, one]
