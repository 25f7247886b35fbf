"""Grammars that constrain a request's output, as token masks. llguidance computes the masks: a
parser (Earley's) over a lexer (derivatives of regular expressions), which walks the vocabulary as a
trie of bytes.

`engine.restriction_compiler` compiles grammars here in threads; the texts that llguidance takes are
made in `grammar_source`.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property

import llguidance
import numpy as np

from aioinfer.errors import GenerationError, NoTokenError, RequestError
from aioinfer.sampling_params import GrammarSpec
from aioinfer.text.constraints import Mask, mask_words
from aioinfer.text.grammar_source import grammar_text
from aioinfer.text.tokenizer import Tokenizer

#: Limits of a parser, so that no grammar takes gigabytes, and no mask more than some 20 ms.
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=500_000,  # of the whole grammar, some 50 000 a millisecond
    step_lexer_fuel=200_000,  # of a mask, some 14 000 a millisecond
    step_max_items=50_000,  # of a mask, some 20 000 a millisecond
    max_lexer_states=50_000,  # of a sequence, up to 2 kB each
    max_grammar_size=50_000,
    verbose_errors=False,
)
#: Sets of tokens that llguidance allows or forbids as a whole: white space, and text in JSON's
#: strings of up to so many characters. Its own have 10 and 30 alone; near the end of a string of
#: limited length, where most time goes, these save a third of it.
_TEXT = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_TEXT}{{1,{count}}}" for count in (1, 2, 3, 5, 7, 10, 15, 30)),
    f"{_TEXT}+",
]
#: In the error of a text that no tokens of the vocabulary make up.
_UNSPELLABLE = "forced bytes: got"
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*?)\]")
_FORMAT = re.compile(r"Unknown format: (\S+)")
_PLACE = re.compile(r"^at (\d+)\((\d+)\): ")
_MAX_MESSAGE = 300
#: Texts in llguidance's errors about grammars that are too large or too deep.
_TOO_COMPLEX = ("panic", "too large", "limits.", "Too many", "LexerError", "recursion limit")
#: A grammar gets another parser for each so many sequences, if it was compiled within `_QUICK_S`
#: seconds (a usual JSON schema: 1 ms).
_SEQUENCES_A_PARSER, _QUICK_S = 2, 0.02
_PARSERS_A_THREAD = 2


def num_threads() -> int:
    """Returns how many threads fill masks: 80 % of the cores, 32 at most, as llguidance has it."""
    return min(max(1, len(os.sched_getaffinity(0)) * 4 // 5), 32)


class GrammarState:
    """Implements `text.constraints.Constraint` for one sequence under a grammar.

    Attributes:
        matcher: llguidance's; `MaskFiller`s pass it to threads without the GIL.
        parser: the number of the parser that it is a copy of. Copies of one share its lexer, and
            wait for each other.
    """

    __slots__ = ("matcher", "parser")

    def __init__(self, matcher: llguidance.LLMatcher, parser: int = 0):
        self.matcher = matcher
        self.parser = parser

    @property
    def is_finished(self) -> bool:
        """See `Constraint.is_finished`."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def accept(self, tokens: Sequence[int]) -> None:
        """See `Constraint.accept`."""
        for token in tokens:
            if not self.matcher.consume_token(token):
                self.raise_error()

    def fill(self, mask: Mask) -> None:
        """See `Constraint.fill`."""
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.raise_error()

    def copy(self) -> GrammarState:
        """See `Constraint.copy`."""
        return GrammarState(self.matcher.deep_copy(), self.parser)

    def forced(self) -> list[int]:
        """See `Constraint.forced`."""
        return self.matcher.compute_ff_tokens()

    def raise_error(self) -> None:
        """Raises `GenerationError` if the parser has failed: a limit was exceeded, or the tokens do
        not follow the grammar; `NoTokenError` if the vocabulary cannot spell what must come."""
        if self.matcher.is_error():
            message = self.matcher.get_error()
            kind = NoTokenError if _UNSPELLABLE in message else GenerationError
            raise kind(f"the output cannot follow the grammar: {describe(message)}")


class CompiledGrammar:
    """Implements `text.constraints.CompiledConstraint`.

    Copies of a matcher share its lexer behind a lock, so threads that compute their masks take
    turns: 64 masks of a JSON schema took 5 to 20 ms of 16 cores. So a grammar that is often used
    has several parsers, which know nothing of each other, and hands them out in turn. The states
    that a lexer has computed for one text serve the next, so there are no more than
    `_PARSERS_A_THREAD` for each thread.

    Attributes:
        max_parsers: how many it may have.
        wants_parser: whether it has too few for the sequences that were expected.
    """

    def __init__(self, make: Callable[[], llguidance.LLMatcher], max_parsers: int):
        """Compiles the grammar once; `make` compiles it again, for a further parser."""
        self.max_parsers = max_parsers
        self._make = make
        self._matchers = [make()]
        self._num_expected = self._num_started = 0

    @property
    def first(self) -> llguidance.LLMatcher:
        """The matcher before any text."""
        return self._matchers[0]

    @property
    def wants_parser(self) -> bool:
        """See the class."""
        wanted = -(-self._num_expected // _SEQUENCES_A_PARSER)
        return len(self._matchers) < min(wanted, self.max_parsers)

    def expect(self, sequences: int) -> None:
        """Counts sequences that are about to start."""
        self._num_expected += sequences

    def add_parser(self) -> None:
        """Compiles the grammar once more; may run in any thread, in one at a time."""
        self._matchers.append(self._make())

    def start(self) -> GrammarState:
        """See `CompiledConstraint.start`."""
        number = self._num_started % len(self._matchers)
        self._num_started += 1
        return GrammarState(self._matchers[number].deep_copy(), number)


class GrammarCompiler:
    """Compiles grammars for one model; safe to use from several threads.

    llguidance keeps a table of the vocabulary and an encoder of its own (30 MB for 49 000 tokens,
    120 MB for 152 000). It is built by the first call of `prepare` or `compile`, which holds the
    interpreter for the whole time: 0.4 s and 1.6 s.

    Attributes:
        end_tokens: the tokens that end an output, or one that llguidance takes for such where the
            model has none.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]):
        """`vocab_size` is the model's, which may exceed the tokenizer's; `end_tokens` may be
        empty."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_parsers = _PARSERS_A_THREAD * num_threads()
        # llguidance needs one; `engine.restriction_compiler` has it cleared from every mask then
        self.end_tokens = tuple(end_tokens) or (vocab_size - 1,)
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Builds the table of the vocabulary, unless that is done.

        Raises `RequestError` if llguidance does not understand the tokenizer.
        """
        with self._lock:
            _ = self._vocabulary

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        try:
            return llguidance.LLTokenizer(
                self._tokenizer.to_json(),
                n_vocab=self._vocab_size,
                eos_token=list(self.end_tokens),
                slices=_SLICES,
            )
        except Exception as error:  # what it raises depends on what it does not understand
            raise RequestError(
                f"this model's tokenizer cannot be used with grammars: {describe(str(error))}"
            ) from error

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compiles a grammar and computes its first mask, which finds errors that only show in use.
        One that takes long, and much memory, has a single parser.

        Raises `RequestError` naming `spec.param`: the grammar is wrong or too large, or uses what
        is not supported.
        """
        try:
            return self._compile(spec)
        except RequestError as error:
            raise RequestError(error.message, param=spec.param) from error
        except ValueError as error:  # llguidance's parsers of JSON and of its own options
            raise RequestError(describe(str(error)), param=spec.param) from error

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        self.prepare()
        text = grammar_text(spec, self._is_special)
        began = time.perf_counter()
        grammar = CompiledGrammar(
            lambda: llguidance.LLMatcher(self._vocabulary, text, log_level=0, limits=_LIMITS), 1
        )
        if time.perf_counter() - began < _QUICK_S:
            grammar.max_parsers = self._max_parsers
        matcher = grammar.first
        if matcher.is_error():
            raise RequestError(describe(matcher.get_error()))
        if warnings := matcher.get_grammar_warnings():
            raise RequestError(describe("; ".join(warnings)))
        mask = np.zeros(mask_words(self._vocab_size), np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error() or not mask.any():
            raise RequestError(f"no output follows it: {describe(matcher.get_error())}")
        # where a vocabulary cannot spell the only text, llguidance allows some other token
        first = int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])
        if not matcher.deep_copy().consume_token(first):
            raise RequestError("the model's vocabulary cannot spell its text")
        return grammar

    def _is_special(self, text: str) -> bool:
        """Whether a text is the text of a special token."""
        ids = self._vocabulary.tokenize_str(text, parse_special=True)
        return len(ids) == 1 and self._vocabulary.is_special_token(ids[0])


def describe(message: str) -> str:
    """Returns an error of llguidance's in words that speak of the request, without internals."""
    if found := _UNIMPLEMENTED.search(message):
        names = found[1].replace('"', "'")
        return f"the JSON schema keyword {names} is not supported"
    if found := _FORMAT.search(message):
        return f"the JSON schema format {found[1]!r} is not supported"
    if "oneOf constraints are not supported" in message:
        return (
            "the JSON schema keyword 'oneOf' is supported only where its alternatives evidently "
            "exclude each other; 'anyOf' may do"
        )
    if "Unable to determine if regex is empty" in message:
        return "its combination of 'pattern', lengths or formats is too complex"
    if _UNSPELLABLE in message:
        return "the model's vocabulary cannot spell its text"
    if message.startswith("NoExtension"):
        return "it allows nothing"
    if any(word in message for word in _TOO_COMPLEX):
        return "it is too large or too complex"
    line = message.partition("\n<")[0].strip()
    line = _PLACE.sub(r"line \1, column \2: ", line)
    line = re.sub(r"\s*\n\s*", " ", line)
    return line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + "…"
