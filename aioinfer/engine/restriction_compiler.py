"""Compiles the restrictions of requests' tokens (`SamplingParams.grammar`, `allowed_token_ids`,
`bad_words`) in threads, before they are admitted. `PromptMaker` owns the compiler.

Compiled grammars are kept, the least recently used one goes first; requests with equal grammars
share one compilation, also when they arrive together.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from aioinfer.errors import RequestError
from aioinfer.sampling_params import GrammarSpec, SamplingParams
from aioinfer.text.constraints import CompiledConstraint, Mask
from aioinfer.text.grammar import CompiledGrammar, GrammarCompiler
from aioinfer.text.restrictions import CompiledRestrictions, RepeatedCalls
from aioinfer.text.token_lists import (
    AllowedTokens,
    BadWords,
    NoEndTokens,
    StopTokens,
    TokenFilter,
    mask_of_all,
)
from aioinfer.text.tokenizer import Tokenizer

#: Grammars that are kept, and the characters of all their sources: a compiled grammar takes some
#: 10 kB, and up to 100 MB where its source is as long as it may be.
MAX_KEPT, MAX_KEPT_CHARS = 256, 2**20
#: How long a request waits for its grammar, in seconds. The limits of sources keep a compilation
#: below 3 s of one thread; it cannot be broken off.
COMPILE_TIMEOUT_S = 10.0
#: The stack of a thread that compiles: four times the need of the deepest grammars that the limits
#: of sources let through (`text.json_schema`, `text.grammar_source`). Unused stack is not backed by
#: memory.
_STACK_BYTES = 64 * 2**20

_log = logging.getLogger(__name__)


class RestrictionCompiler:
    """Compiles for one model. Its methods are called on the event loop, but for `prepare`."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_tokens: Sequence[int]):
        """`tokenizer` is the model's, without which there are no grammars; `vocab_size` is the
        model's, too, and `end_tokens` end an output."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = tuple(end_tokens)
        self._grammars = (
            None if tokenizer is None else GrammarCompiler(tokenizer, vocab_size, end_tokens)
        )
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._kept: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._kept_chars = 0
        self._pending: dict[GrammarSpec, asyncio.Future[CompiledGrammar]] = {}
        self._growing: dict[CompiledGrammar, asyncio.Future[None]] = {}

    def prepare(self) -> None:
        """Loads everything that the first grammar would have to wait for. Called in a thread, at
        the start."""
        if self._grammars is not None:
            try:
                self._grammars.prepare()
            except RequestError as error:
                _log.warning("%s; requests with a grammar are answered 400", error)

    async def compile(self, params: SamplingParams) -> CompiledConstraint | None:
        """Returns the compiled restrictions of a request, or None.

        Raises `RequestError` naming the field: it is wrong, too complex, or not supported.
        """
        if not params.is_restricted:
            return None
        grammar = None
        if (spec := params.grammar) is not None:
            if spec.whitespace:  # first by itself, so that its error names its own field
                place, dot, _ = spec.param.rpartition(".")
                field = f"{place}{dot}whitespace_pattern"
                await self._compile_grammar(GrammarSpec("regex", spec.whitespace, param=field))
            grammar = await self._compile_grammar(spec)
            await self._add_parsers(grammar, params.n)
        filters: list[TokenFilter] = []
        if params.allowed_token_ids is not None or params.bad_words:
            filters = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._make_filters, params
            )
        if grammar is not None:
            assert self._grammars is not None
            ends = self._grammars.end_tokens
            if params.stop_token_ids:
                # before the others: tokens that these forbid stay forbidden
                filters.insert(0, StopTokens(params.stop_token_ids, ends, self._vocab_size))
            if params.ignore_eos or not self._end_tokens:
                filters.append(NoEndTokens(ends, self._vocab_size))
        return CompiledRestrictions(grammar, filters, self._all_tokens, self._search(params))

    def _search(self, params: SamplingParams) -> Callable[[], RepeatedCalls] | None:
        """Returns a factory of the search for a repeated call in a request's output, or None."""
        make_parser, tokenizer = params.make_parser, self._tokenizer
        if make_parser is None or tokenizer is None:
            return None
        return lambda: RepeatedCalls(
            tokenizer.detokenizer((), True, params.shown_token_ids), make_parser()
        )

    @cached_property
    def _all_tokens(self) -> Mask:
        return mask_of_all(self._vocab_size)

    def _make_filters(self, params: SamplingParams) -> list[TokenFilter]:
        """Makes the filters that a request names."""
        filters: list[TokenFilter] = []
        if (allowed := params.allowed_token_ids) is not None:
            if max(allowed) >= self._vocab_size:
                raise RequestError(
                    f"allowed_token_ids holds a token id outside of 0 to {self._vocab_size - 1}",
                    param="allowed_token_ids",
                )
            # by itself the list is taken at its word, as vLLM does; a grammar has to end, too
            ends = self._end_tokens if params.grammar is not None else ()
            filters.append(AllowedTokens({*allowed, *ends}, self._vocab_size))
        if params.bad_words:
            tokenizer = self._require_tokenizer("bad_words")
            filters.append(BadWords.of(params.bad_words, tokenizer, self._vocab_size))
        return filters

    def _require_tokenizer(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                f"this server has no tokenizer (model.tokenizer), which {param} needs",
                param=param,
            )
        return self._tokenizer

    async def _compile_grammar(self, spec: GrammarSpec) -> CompiledGrammar:
        if (kept := self._kept.get(spec)) is not None:
            self._kept.move_to_end(spec)
            return kept
        pending = self._pending.get(spec)
        if pending is None:
            pending = self._pending[spec] = self._begin(spec)
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT_S):
                return await asyncio.shield(pending)
        except TimeoutError:
            raise RequestError(
                "the grammar takes too long to compile: it is too complex", param=spec.param
            ) from None
        except RequestError as error:  # of another request's field, where that was the first
            raise RequestError(error.message, param=spec.param) from error

    async def _add_parsers(self, grammar: CompiledGrammar, sequences: int) -> None:
        """Sees to it that a grammar has parsers enough. Requests that come together wait until all
        of them have, which takes milliseconds, since they start in turn with those there are."""
        grammar.expect(sequences)
        while grammar.wants_parser:
            growth = self._growing.get(grammar)
            if growth is None or growth.done():
                growth = asyncio.get_running_loop().run_in_executor(
                    self._threads, grammar.add_parser
                )
                self._growing[grammar] = growth
            await asyncio.shield(growth)
        self._growing.pop(grammar, None)

    def _begin(self, spec: GrammarSpec) -> asyncio.Future[CompiledGrammar]:
        """Starts to compile a grammar, which is kept when that is done, even if no request waits
        for it any more."""
        self._require_tokenizer(spec.param)
        assert self._grammars is not None
        usual = threading.stack_size(_STACK_BYTES)  # of the thread, if this starts one
        try:
            future = asyncio.get_running_loop().run_in_executor(
                self._threads, self._grammars.compile, spec
            )
        finally:
            threading.stack_size(usual)
        future.add_done_callback(lambda done: self._keep(spec, done))
        return future

    def _keep(self, spec: GrammarSpec, done: asyncio.Future[CompiledGrammar]) -> None:
        del self._pending[spec]
        if done.cancelled() or done.exception() is not None:
            return
        self._kept[spec] = done.result()
        self._kept_chars += len(spec.source)
        while len(self._kept) > MAX_KEPT or self._kept_chars > MAX_KEPT_CHARS:
            oldest, _ = self._kept.popitem(last=False)
            self._kept_chars -= len(oldest.source)

    def shutdown(self) -> None:
        """Drops work that has not begun. Does not wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)
