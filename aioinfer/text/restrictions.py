"""The token restrictions of one request, under the interface of `text.constraints`: a grammar and
filters of tokens, each optional; and `ParallelFiller`, which fills the masks of many sequences at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import llguidance

from aioinfer.errors import GenerationError, NoTokenError
from aioinfer.text.constraints import Constraint, Mask
from aioinfer.text.detokenizer import Detokenizer
from aioinfer.text.grammar import CompiledGrammar, GrammarState, num_threads
from aioinfer.text.message_parser import MessageParser
from aioinfer.text.token_lists import TokenFilter

#: Tokens that are taken in one after the other, in 3 us each (a JSON schema, 152 000 tokens):
#: waking threads takes half a millisecond.
_FEW_TOKENS = 128


class RepeatedCalls:
    """Looks for a tool call that equals an earlier one in a message, as its tokens come. It takes 2
    to 3 us a token.

    Attributes:
        is_found: whether there is one.
    """

    __slots__ = ("_detokenizer", "_parser", "is_found")

    def __init__(self, detokenizer: Detokenizer, parser: MessageParser):
        """`detokenizer` shows the special tokens that `parser` looks at."""
        self.is_found = False
        self._detokenizer, self._parser = detokenizer, parser

    def note(self, tokens: Sequence[int]) -> None:
        """Takes in the next tokens."""
        self._parser.feed("".join(map(self._detokenizer.next, tokens)))
        self.is_found = self._parser.repeats_call


class RestrictedTokens:
    """Implements `text.constraints.Constraint`: a grammar, narrowed by filters of tokens.

    Attributes:
        grammar: the sequence's, or None.
    """

    __slots__ = (
        "_all", "_context", "_filters", "_max_context", "_may_forbid_all", "_repeated", "grammar",
    )  # fmt: skip

    def __init__(
        self,
        grammar: GrammarState | None,
        filters: Sequence[TokenFilter],
        all_tokens: Mask,
        repeated: RepeatedCalls | None = None,
    ):
        """Makes the state before any token.

        Args:
            grammar: the sequence's, or None.
            filters: narrow its masks.
            all_tokens: the mask that allows everything.
            repeated: looks for the call that completes the output, or None.
        """
        self.grammar = grammar
        self._repeated = repeated
        self._filters = filters
        self._all = all_tokens
        self._context: list[int] = []
        self._max_context = max((each.max_context for each in filters), default=0)
        self._may_forbid_all = any(each.may_forbid_text for each in filters)

    @property
    def is_finished(self) -> bool:
        """See `Constraint.is_finished`."""
        if self._repeated is not None and self._repeated.is_found:
            return True
        return self.grammar is not None and self.grammar.is_finished

    def accept(self, tokens: Sequence[int]) -> None:
        """See `Constraint.accept`."""
        if self.grammar is not None:
            self.grammar.accept(tokens)
        self.note(tokens)

    def note(self, tokens: Sequence[int]) -> None:
        """Completes `accept` after the grammar, if there is one, has accepted the tokens."""
        if self._max_context:
            self._context.extend(tokens)
            del self._context[: -self._max_context]
        if self._repeated is not None:
            self._repeated.note(tokens)

    def fill(self, mask: Mask) -> None:
        """See `Constraint.fill`."""
        if self.grammar is not None:
            self.grammar.fill(mask)
        self.narrow(mask)

    def narrow(self, mask: Mask) -> None:
        """Completes `fill` after the grammar, if there is one, has filled the mask.

        Raises `NoTokenError` if no token is left.
        """
        if self.grammar is None:
            mask[:] = self._all
        for each in self._filters:
            each.narrow(mask, self._context)
        if self._may_forbid_all and not mask.any():
            raise NoTokenError(
                "no token may come next: what the request allows and forbids excludes all"
            )

    def copy(self) -> RestrictedTokens:
        """See `Constraint.copy`. It does not look for repeated calls."""
        grammar = None if self.grammar is None else self.grammar.copy()
        copy = RestrictedTokens(grammar, self._filters, self._all)
        copy._context = [*self._context]
        return copy

    def forced(self) -> list[int]:
        """See `Constraint.forced`. Tokens that a filter might forbid are not taken unseen."""
        if self.grammar is None or self._may_forbid_all:
            return []
        return self.grammar.forced()


class CompiledRestrictions:
    """Implements `text.constraints.CompiledConstraint`."""

    __slots__ = ("_all", "_filters", "_grammar", "_search")

    def __init__(
        self,
        grammar: CompiledGrammar | None,
        filters: Iterable[TokenFilter],
        all_tokens: Mask,
        search: Callable[[], RepeatedCalls] | None = None,
    ):
        """As of `RestrictedTokens`; `search` makes the search for repeated calls."""
        self._grammar = grammar
        self._filters = tuple(filters)
        self._all = all_tokens
        self._search = search

    def start(self) -> RestrictedTokens:
        """See `CompiledConstraint.start`."""
        grammar = None if self._grammar is None else self._grammar.start()
        repeated = None if self._search is None else self._search()
        return RestrictedTokens(grammar, self._filters, self._all, repeated)


class ParallelFiller:
    """Implements `text.constraints.MaskFiller`: the grammars' masks are computed in threads of
    llguidance, without the GIL; then numpy narrows them."""

    @cached_property
    def _threads(self) -> llguidance.LLExecutor:
        return llguidance.LLExecutor(num_threads())

    def accept(self, tokens: Sequence[tuple[Constraint, int]]) -> list[Exception | None]:
        """See `MaskFiller.accept`."""
        grammars = [_grammar_of(constraint) for constraint, _ in tokens]
        pairs = [
            (grammar.matcher, token)
            for grammar, (_, token) in zip(grammars, tokens, strict=True)
            if grammar is not None
        ]
        if len(pairs) <= _FEW_TOKENS:
            for matcher, token in pairs:
                matcher.consume_token(token)
        else:
            self._threads.consume_token_par(pairs)
        return [
            _finish_accepting(constraint, grammar, token)
            for grammar, (constraint, token) in zip(grammars, tokens, strict=True)
        ]

    def fill(self, rows: Sequence[tuple[Constraint, int]], masks: Mask) -> list[Exception | None]:
        """See `MaskFiller.fill`."""
        grammars = [_grammar_of(constraint) for constraint, _ in rows]
        found = [
            (grammar, row)
            for grammar, (_, row) in zip(grammars, rows, strict=True)
            if grammar is not None
        ]
        # each thread takes a part of the list: sequences that share a parser should be in one
        found.sort(key=lambda each: each[0].parser)
        self._compute([(grammar.matcher, row) for grammar, row in found], masks)
        return [
            _finish(constraint, grammar, masks[row])
            for grammar, (constraint, row) in zip(grammars, rows, strict=True)
        ]

    def _compute(self, matchers: list[tuple[llguidance.LLMatcher, int]], masks: Mask) -> None:
        size = masks.shape[1] * masks.itemsize
        if len(matchers) == 1:
            ((matcher, row),) = matchers
            matcher.unsafe_compute_mask_ptr(masks.ctypes.data + row * size, size)
        elif matchers:
            self._threads.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, size, len(masks))


def _grammar_of(constraint: Constraint) -> GrammarState | None:
    if isinstance(constraint, RestrictedTokens):
        return constraint.grammar
    return constraint if isinstance(constraint, GrammarState) else None


def _finish_accepting(
    constraint: Constraint, grammar: GrammarState | None, token: int
) -> Exception | None:
    """Completes `accept` after the grammar, if there is one, has accepted the token; returns the
    error, if any."""
    try:
        if grammar is not None:
            grammar.raise_error()
        if isinstance(constraint, RestrictedTokens):
            constraint.note([token])
        elif grammar is None:
            constraint.accept([token])
    except Exception as error:  # one sequence's failure must not end the others
        return error
    return None


def _finish(
    constraint: Constraint, grammar: GrammarState | None, mask: Mask
) -> GenerationError | None:
    """Completes a mask whose grammar's part is filled; returns the error, if any."""
    try:
        if grammar is not None:
            grammar.raise_error()
        if isinstance(constraint, RestrictedTokens):
            constraint.narrow(mask)
        elif grammar is None:
            constraint.fill(mask)
    except GenerationError as error:
        return error
    return None
