"""The sampling parameters of a request: how its tokens are sampled and when it ends.

Shared by everything from the HTTP layer to the sampler, so it imports nothing of the rest but
errors. Each numeric parameter is declared once, by `number` or `integer` with its default and its
bounds; parameters with `crosses=True` are the fields of the record that goes to the workers
(`ipc.request_record`), from which the tensors of the slots and the kernels' layout follow.

Values are rounded to their form in the record (float32, with denormals as 0, since GPUs flush them)
before they are checked and kept. So a value that passes the check here is the same, bit for bit,
wherever it is used, and nothing has to be checked again on the other side.
"""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from aioinfer.errors import FieldError, RequestError

#: The default of `scheduler.max_logprobs`, and as many of the likeliest tokens as kernels find.
MAX_LOGPROBS = 20
#: As many of the likeliest tokens as workers sort. Where more are requested, they bring the
#: log-probabilities of all tokens, which are sorted where they are read.
MAX_SORTED_LOGPROBS = 128
#: The ways to pool hidden states: the last token's, the mean of all tokens', the first token's.
POOLINGS = ("last", "mean", "cls")
#: In the place of one of these: the hidden states of all tokens.
ALL_TOKENS = "all"
MAX_N = 128
#: Stop strings, and the characters of all of them: the automaton that finds them is built on the
#: event loop, 1.5 µs a character.
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
#: Entries of `logit_bias`: three times OpenAI's 300, and 8 KiB of device memory a slot.
MAX_LOGIT_BIAS = 1024
#: Stop tokens of a request, and with the model's own end tokens (see `scheduler.request`).
MAX_STOP_TOKEN_IDS = 128
MAX_END_TOKENS = 256
MAX_LOGIT_BIAS_VALUE = 100.0
#: Entries of `allowed_token_ids`, which become bits of one mask; of `bad_words`, which are looked
#: for by their encodings at the end of the output for each token; and the characters of all bad
#: words.
MAX_ALLOWED_TOKEN_IDS = 2**18
#: Entries of `logprob_token_ids`, which go with each step's plan.
MAX_LOGPROB_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 4096
#: Characters of a grammar's source; the kinds of grammars have further limits (`text.grammar`).
MAX_GRAMMAR_CHARS = 128 * 1024
#: Beams of a beam search, and the likeliest tokens that are compared of each: as many as there are
#: beams and end tokens, so that enough beams go on whichever candidates end.
MAX_BEAM_WIDTH = 64
MAX_BEAM_CANDIDATES = MAX_SORTED_LOGPROBS
#: Beyond this, the power of a long output's length is no float32.
MAX_LENGTH_PENALTY = 5.0
MAX_INT32 = 2**31 - 1  # the largest integer that crosses

_FLOAT32 = struct.Struct("f")
_SMALLEST_NORMAL = 2.0**-126


def round_to_float32(value: float) -> float:
    """Returns the float32 that is nearest to `value`: 0 instead of a denormal, infinity beyond the
    largest.

    Raises TypeError if it is not a number.
    """
    try:
        rounded: float = _FLOAT32.unpack(_FLOAT32.pack(value))[0]
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except struct.error as error:
        raise TypeError(f"{value!r} is not a number") from error
    return 0.0 if abs(rounded) < _SMALLEST_NORMAL else rounded


#: A lower temperature is greedy: dividing logits by it would overflow float32. A float32 itself, so
#: that host and device agree on which temperatures are lower.
GREEDY_TEMPERATURE = round_to_float32(1e-5)


@dataclass(frozen=True, slots=True)
class Parameter:
    """The declaration of a numeric parameter.

    Attributes:
        name: of the field of `SamplingParams`.
        is_float: float32 where it crosses; otherwise an integer (int32 where it crosses).
        low, high: the bounds; `low` itself is excluded if `low_excluded`.
        crosses: whether it is a field of the record that goes to the workers; it is not optional
            then.
        optional: whether it may be None.
    """

    name: str
    is_float: bool
    low: float
    high: float
    low_excluded: bool
    crosses: bool
    optional: bool

    def check(self, value: Any) -> Any:
        """Returns `value` as it is kept.

        Raises `RequestError` if it is no number of this kind or out of bounds.
        """
        if value is None and self.optional:
            return None
        try:
            kept = round_to_float32(value) if self.is_float else _as_integer(value)
        except TypeError as error:
            kind = "a number" if self.is_float else "an integer"
            raise RequestError(
                f"{self.name} must be {kind}, not {value!r}", param=self.name
            ) from error
        too_low = kept <= self.low if self.low_excluded else kept < self.low
        if too_low or kept > self.high or kept != kept:
            bracket = "(" if self.low_excluded else "["
            differs = self.is_float and math.isfinite(kept) and kept != value
            rounded = f", which is {kept} in float32" if differs else ""
            low, high = (f"{x:g}" if self.is_float else str(x) for x in (self.low, self.high))
            raise RequestError(
                f"{self.name} must be in {bracket}{low}, {high}], not {value}{rounded}",
                param=self.name,
            )
        return kept


def _as_integer(value: Any) -> int:
    """Returns an integer, or a float without fraction as one. Raises TypeError for anything
    else."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return operator.index(value)


def number(
    default: float, low: float, high: float, *, low_excluded: bool = False, crosses: bool = True
) -> Any:
    """Declares a float32 parameter of `SamplingParams`."""
    bounds = round_to_float32(low), round_to_float32(high)
    declared = (True, *bounds, low_excluded, crosses, False)
    return field(default=default, metadata={"declared": declared})


def integer(default: int | None, low: int, high: int, *, crosses: bool = False) -> Any:
    """Declares an integer parameter of `SamplingParams`, optional if its default is None."""
    declared = (False, low, high, False, crosses, default is None)
    return field(default=default, metadata={"declared": declared})


GrammarKind = Literal[
    "json_object", "json_schema", "regex", "choice", "lark", "structural_tag", "message"
]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar that the whole output has to follow. Equal ones share one compilation.

    A wrong value raises `RequestError` naming `param`.

    Attributes:
        kind: what `source` is:
            json_object: any JSON object; the source is empty.
            json_schema: the text of a JSON schema; properties come in the schema's order.
            regex: a regular expression that the whole output matches.
            choice: the text of a JSON list of strings.
            lark: a grammar in llguidance's dialect of Lark, or in GBNF.
            structural_tag: the text of a JSON object with `triggers` and `structures`, as in
                vLLM: free text in which each trigger begins one of the structures.
            message: a grammar in llguidance's Lark that `text.formats` has made of tools' schemas,
                which have been checked. No client's text is one.
        source: the text of the grammar.
        whitespace: of the JSON kinds, a regular expression for the white space between tokens of
            JSON, "" for none; None: a space, or one or two line breaks with up to 20 spaces.
        param: the field that the grammar came in, for errors; it does not count in comparisons.
    """

    kind: GrammarKind
    source: str = ""
    whitespace: str | None = None
    param: str = field(default="grammar", compare=False)

    @classmethod
    def of_schema(cls, schema: Any) -> GrammarSpec:
        """Returns the grammar of JSON by a schema: a decoded JSON schema, or a pydantic model.

        Raises `RequestError` for a schema that is no JSON.
        """
        make = getattr(schema, "model_json_schema", None)
        try:
            return cls("json_schema", json.dumps(schema if make is None else make()))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the schema is no JSON: {error}", param="grammar") from error

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise RequestError(
                f"the kind of a grammar must be one of {', '.join(get_args(GrammarKind))}, not "
                f"{self.kind!r}",
                param=self.param,
            )
        if not isinstance(self.source, str):
            raise RequestError("the source of a grammar must be a text", param=self.param)
        if len(self.source) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"a grammar may have at most {MAX_GRAMMAR_CHARS} characters, not "
                f"{len(self.source)}",
                param=self.param,
            )
        if not self.source and self.kind not in ("json_object", "regex"):
            raise RequestError("the grammar is empty", param=self.param)


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Settings of a beam search, which has the same results as transformers' `generate`.

    A wrong value raises `RequestError` naming the field of the API.

    Attributes:
        width: beams, the hypotheses that are continued at each step.
        length_penalty: a hypothesis is scored by its cumulative log-probability, divided by its
            length (in generated tokens, the end token included) to the power of this.
        early_stopping: True ends the search when there are `width` complete hypotheses; False when
            the best beam would score no better than the worst of them if it ended now; "never" only
            when it could not do so at any length.
        width_field: the field with which the client gave the width; errors name it.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    width_field: str = field(default="n", compare=False)

    def __post_init__(self) -> None:
        name = self.width_field
        try:
            width = _as_integer(self.width)
        except TypeError as error:
            raise RequestError(f"{name} must be an integer", param=name) from error
        if not 1 <= width <= MAX_BEAM_WIDTH:
            raise RequestError(
                f"the width of a beam search must be in [1, {MAX_BEAM_WIDTH}], not {width}",
                param=name,
            )
        object.__setattr__(self, "width", width)
        penalty = self.length_penalty
        if not isinstance(penalty, int | float) or not abs(penalty) <= MAX_LENGTH_PENALTY:
            raise RequestError(
                f"length_penalty must be in [-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}], not "
                f"{penalty}",
                param="length_penalty",
            )
        if self.early_stopping != "never" and not isinstance(self.early_stopping, bool):
            raise RequestError(
                f'early_stopping must be true, false or "never", not {self.early_stopping!r}',
                param="early_stopping",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request. A wrong value raises `RequestError` naming the field.

    Attributes:
        n: sequences for one prompt; they share the prompt's KV blocks.
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens; 0 or -1 keeps all (and is kept as 0).
        top_p: keep the smallest set of tokens with a total probability of at least this, in (0, 1].
        min_p: drop tokens less probable than this fraction of the most probable one's.
        seed: the same seed gives the same text, whatever else is in the batch. None: a random one.
        repetition_penalty: above 1 makes tokens of prompt and output less likely (CTRL, Keskar et
            al. 2019).
        presence_penalty: subtracted once from the logit of each token already generated.
        frequency_penalty: subtracted for each time that a token was generated.
        logit_bias: added to the logits of these token ids.
        max_tokens: the maximum length of the output; None: the server's default, else as many
            tokens as the context has room for.
        min_tokens: no end token and no stop counts before so many tokens.
        stop: strings that end the text; they are left out of it.
        stop_token_ids: token ids that end the text, besides the model's own end tokens.
        ignore_eos: go on past the model's end tokens (for benchmarks).
        include_stop: keep the matched stop string at the end of the text.
        logprobs: report the log-probabilities of each sampled token and of this many of the
            likeliest, up to `scheduler.max_logprobs`; -1: of all tokens.
        logprob_token_ids: report the log-probabilities of these tokens instead of the likeliest.
        prompt_logprobs: the same for the tokens of the prompt, each given the tokens before it.
        prompt_only: generate nothing: only the requested outputs of the prompt come back.
        reports_progress: wake the reader of a stream after each step that has computed some of the
            prompt. It goes with no outputs of the prompt.
        pooling: return the prompt's hidden states pooled in this way ("last", "mean" or "cls", the
            first token's), or "all" of them, after the model's last norm; nothing is generated.
        skip_special_tokens: leave special tokens out of the text.
        shown_token_ids: special tokens that are kept in it all the same, for a parser of messages.
        make_parser: of a message under a grammar in which calls may follow each other, makes a
            `MessageParser`: the output is complete with a call that equals an earlier one.
        grammar: the grammar that the output has to follow, or None.
        allowed_token_ids: the only tokens that the output may hold, besides end tokens; None: all.
        bad_words: words that the output may not hold, neither with a space before them nor
            without; each is avoided by its last token.
        speech: the rules that the tokens of a transcript follow (`features.speech`), or that it is
            to be aligned with its sound (`features.alignment`), as the server makes them; None for
            neither.
        extra_args: arguments of step features of other packages, by name (docs/features.md).
        beam_search: search for the `n` likeliest outputs instead of sampling; None: sample. The
            temperature is 0 then, or 1, which is no different.
        predicted_tokens: the likely output, by token ids or a part of it, from which tokens are
            drafted: it changes nothing but the speed.
        adapter: the name of the adapter (LoRA) that the model has for the request, or None.
        second_text: the position in the prompt from which on its tokens are of the second of two
            texts (BERT's token types); 0: there is one text.
    """

    n: int = integer(1, 1, MAX_N)
    temperature: float = number(1.0, 0.0, 100.0)
    top_k: int = integer(0, -1, MAX_INT32, crosses=True)
    top_p: float = number(1.0, 0.0, 1.0, low_excluded=True)
    min_p: float = number(0.0, 0.0, 1.0)
    seed: int | None = integer(None, -(2**63), 2**64 - 1)
    repetition_penalty: float = number(1.0, 0.01, 100.0)
    presence_penalty: float = number(0.0, -2.0, 2.0)
    frequency_penalty: float = number(0.0, -2.0, 2.0)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = integer(None, 1, MAX_INT32)
    min_tokens: int = integer(0, 0, MAX_INT32)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = integer(None, -1, MAX_INT32)
    logprob_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = integer(None, -1, MAX_INT32)
    prompt_only: bool = False
    reports_progress: bool = False
    pooling: str | None = None
    skip_special_tokens: bool = True
    shown_token_ids: frozenset[int] = frozenset()
    make_parser: Callable[[], Any] | None = field(default=None, compare=False, repr=False)
    grammar: GrammarSpec | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    speech: Any = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    predicted_tokens: tuple[int, ...] = ()
    beam_search: BeamSearch | None = None
    adapter: str | None = None
    second_text: int = integer(0, 0, MAX_INT32, crosses=True)

    def __post_init__(self) -> None:
        for parameter in PARAMETERS:
            value = getattr(self, parameter.name)
            kept = parameter.check(value)
            if kept is not value:
                object.__setattr__(self, parameter.name, kept)
        if self.top_k < 0:
            object.__setattr__(self, "top_k", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        stop = _as_words("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        _check_words("stop", stop, MAX_STOPS, MAX_STOP_CHARS)
        if self.stop_token_ids:
            ids = _as_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
            object.__setattr__(self, "stop_token_ids", ids)
        else:
            object.__setattr__(self, "stop_token_ids", ())
        if self.logit_bias:
            _check_logit_bias(self.logit_bias)
        if self.logprob_token_ids is not None:
            self._check_logprob_token_ids(self.logprob_token_ids)
        if not isinstance(self.extra_args, Mapping):
            raise RequestError("extra_args must be a dict of arguments by name", param="extra_args")
        if self.pooling is not None:
            self._check_pooling()
        if self.reports_progress and self.prompt_logprobs is not None:
            raise RequestError(
                "return_progress is not supported together with log-probabilities of the prompt",
                param="return_progress",
            )
        if self.is_restricted:
            self._check_restrictions()
        if self.beam_search is not None:
            self._check_beam_search(self.beam_search)

    def _check_beam_search(self, search: BeamSearch) -> None:
        """Raises `RequestError` naming a parameter that a beam search would have to ignore."""
        if self.temperature not in (0.0, 1.0):
            raise RequestError(
                "temperature must be 0 in a beam search, which samples nothing, not "
                f"{self.temperature:g}",
                param="temperature",
            )
        object.__setattr__(self, "temperature", 0.0)
        if self.requests_tokens:
            raise RequestError(
                f"logprobs must be in [0, {MAX_SORTED_LOGPROBS}] in a beam search, not "
                f"{self.logprobs}",
                param="logprobs",
            )
        if self.grammar is not None:
            raise FieldError(self.grammar.param, "is not supported in a beam search")
        for name, neutral in _NEUTRAL_IN_BEAM_SEARCH:
            if getattr(self, name) != neutral:
                raise RequestError(f"{name} is not supported in a beam search", param=name)
        if self.n > search.width:
            raise RequestError(
                f"n is {self.n}: a beam search of width {search.width} has no more results",
                param="n",
            )

    def _check_pooling(self) -> None:
        if self.pooling not in (*POOLINGS, ALL_TOKENS):
            raise RequestError(
                f"pooling must be one of {', '.join(POOLINGS)} and all, not {self.pooling!r}",
                param="pooling",
            )
        if self.n != 1 or self.prompt_logprobs is not None:
            raise RequestError("pooling goes with no n and no prompt_logprobs", param="pooling")
        object.__setattr__(self, "prompt_only", True)

    def _check_logprob_token_ids(self, token_ids: Collection[int]) -> None:
        """Keeps the ids, and has log-probabilities reported at all."""
        ids = _as_token_ids("logprob_token_ids", token_ids, MAX_LOGPROB_TOKEN_IDS)
        object.__setattr__(self, "logprob_token_ids", tuple(dict.fromkeys(ids)))
        if self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)

    def _check_restrictions(self) -> None:
        if self.grammar is not None and not isinstance(self.grammar, GrammarSpec):
            raise RequestError(
                f"grammar must be a GrammarSpec, not {type(self.grammar).__name__}", param="grammar"
            )
        if self.allowed_token_ids is not None:
            ids = _as_token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not ids:
                raise RequestError("allowed_token_ids is empty", param="allowed_token_ids")
            object.__setattr__(self, "allowed_token_ids", ids)
        words = _as_words("bad_words", self.bad_words)
        _check_words("bad_words", words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        object.__setattr__(self, "bad_words", words)

    @property
    def is_restricted(self) -> bool:
        """Whether some tokens may not come next: the sampler then needs a mask."""
        return bool(
            self.grammar is not None or self.allowed_token_ids is not None or self.bad_words
        )

    @property
    def requests_tokens(self) -> bool:
        """Whether log-probabilities are requested of given tokens, or of all, rather than of a few
        of the likeliest. See `features.logprobs`."""
        return self.logprob_token_ids is not None or (
            self.logprobs is not None and not 0 <= self.logprobs <= MAX_SORTED_LOGPROBS
        )

    @property
    def num_sequences(self) -> int:
        """Sequences that run at the same time, each in a slot."""
        return self.n if self.beam_search is None else self.beam_search.width

    @property
    def greedy(self) -> bool:
        """Whether every token is simply the likeliest."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler has to count the request's tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """A beam search in vLLM's terms. A wrong value raises `RequestError` when it is used.

    Attributes:
        beam_width: beams, and results if `n` is missing.
        max_tokens: the maximum length of the output.
        n: how many of the best results are returned.
        temperature: 0; anything but 0 and 1 is wrong.
        length_penalty, early_stopping: see `BeamSearch`.
        min_tokens, ignore_eos, stop_token_ids, include_stop, logprobs: see `SamplingParams`.
    """

    beam_width: int
    max_tokens: int | None = None
    n: int | None = None
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    logprobs: int | None = None

    def sampling_params(self) -> SamplingParams:
        """Returns the parameters of a request. Raises `RequestError`."""
        return SamplingParams(
            n=self.beam_width if self.n is None else self.n,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            include_stop=self.include_stop,
            logprobs=self.logprobs,
            beam_search=BeamSearch(
                self.beam_width, self.length_penalty, self.early_stopping, "beam_width"
            ),
        )


#: The parameters that leave unlikely tokens out, in the order of the sampler's arguments, and their
#: values that leave none out.
FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
#: Parameters that do not go with a beam search, and their values that count as not given.
_NEUTRAL_IN_BEAM_SEARCH: tuple[tuple[str, Any], ...] = (
    *FILTERS.items(), ("repetition_penalty", 1.0),
    ("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("logit_bias", {}), ("stop", ()),
    ("logprob_token_ids", None),
    ("allowed_token_ids", None), ("bad_words", ()), ("pooling", None),
    ("prompt_only", False), ("extra_args", {}),
)  # fmt: skip

#: The numeric parameters, in the order of their declaration.
PARAMETERS = tuple(
    Parameter(each.name, *each.metadata["declared"])
    for each in fields(SamplingParams)
    if "declared" in each.metadata
)


def _as_words(name: str, words: Any) -> tuple[str, ...]:
    """Returns one text or several as a tuple. Raises `RequestError`."""
    if isinstance(words, str):
        return (words,)
    try:
        return tuple(words or ())
    except TypeError as error:
        message = f"{name} must be a text or a list of texts, not {words!r}"
        raise RequestError(message, param=name) from error


def _check_words(name: str, words: tuple[str, ...], max_words: int, max_chars: int) -> None:
    """Raises `RequestError` unless these words or stop strings can be looked for."""
    if len(words) > max_words:
        raise RequestError(
            f"{name} may hold at most {max_words} strings, not {len(words)}", param=name
        )
    if any(not isinstance(word, str) or not word for word in words):
        raise RequestError(f"{name} must hold non-empty strings", param=name)
    length = sum(map(len, words))
    if length > max_chars:
        raise RequestError(
            f"{name} may hold at most {max_chars} characters in all, not {length}", param=name
        )


def _check_logit_bias(biases: Mapping[int, float]) -> None:
    """Raises `RequestError` unless these biases can be added to logits."""
    if not isinstance(biases, Mapping):
        raise RequestError("logit_bias must be a dict from token ids to biases", param="logit_bias")
    _as_token_ids("logit_bias", biases, MAX_LOGIT_BIAS)
    for token, bias in biases.items():
        # not `abs(bias) > ...`: NaN must not pass
        if not (
            isinstance(bias, int | float) and -MAX_LOGIT_BIAS_VALUE <= bias <= MAX_LOGIT_BIAS_VALUE
        ):
            raise RequestError(
                f"logit_bias of token {token} must be between -{MAX_LOGIT_BIAS_VALUE:g} and "
                f"{MAX_LOGIT_BIAS_VALUE:g}, not {bias}",
                param="logit_bias",
            )


def _as_token_ids(name: str, ids: Collection[int], limit: int) -> tuple[int, ...]:
    """Returns token ids as integers.

    Raises `RequestError` naming the parameter if there are more than `limit`, or if one is no
    integer, negative or beyond int32.
    """
    if not isinstance(ids, Collection):
        raise RequestError(f"{name} must hold token ids, not be {ids!r}", param=name)
    if len(ids) > limit:
        raise RequestError(f"{name} may hold at most {limit} token ids, not {len(ids)}", param=name)
    try:
        values = tuple(operator.index(token) for token in ids)
    except TypeError as error:
        raise RequestError(f"{name} must hold token ids: {error}", param=name) from error
    if values and not (min(values) >= 0 and max(values) <= MAX_INT32):
        raise RequestError(f"{name} must hold token ids from 0 to {MAX_INT32}", param=name)
    return values
