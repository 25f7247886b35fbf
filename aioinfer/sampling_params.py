"""How a request wants its tokens chosen and when it wants them to end.

Shared by everything from the HTTP layer to the sampler, so it imports nothing of the rest but
errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from aioinfer.errors import RequestError

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOPS = 64
MAX_INT32 = 2**31 - 1  # what the step plan has room for
#: Below this a temperature is taken as greedy: dividing logits by it would overflow float32.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request. A wrong value raises `RequestError` naming the field.

    Attributes:
        n: completions for one prompt; they share the prompt's KV blocks.
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probabilities reach this, in (0, 1].
        min_p: drop tokens less probable than this fraction of the most probable one's.
        seed: the same seed gives the same text, whatever else is in the batch. None draws one.
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
        logprobs: report the log-probabilities of each chosen token and this many of the likeliest.
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _check("n", self.n, 1, MAX_N)
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_k", self.top_k, -1, MAX_INT32)
        _check("top_p", self.top_p, 0.0, 1.0, low_excluded=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_excluded=True)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("seed", self.seed, -(2**63), 2**64 - 1)
        _check("max_tokens", self.max_tokens, 1, MAX_INT32)
        _check("min_tokens", self.min_tokens, 0, MAX_INT32)
        _check("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_stops()
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise RequestError(
                    f"logit_bias of token {token} must be between -100 and 100, not {bias}",
                    param="logit_bias",
                )

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise RequestError(
                f"stop may hold at most {MAX_STOPS} strings, not {len(self.stop)}", param="stop"
            )
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError("stop must hold non-empty strings", param="stop")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )

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


def _check(
    name: str, value: float | None, low: float, high: float, *, low_excluded: bool = False
) -> None:
    """Raises `RequestError` unless `value` is None or a finite number in [low, high] (or (low,
    high])."""
    if value is None:
        return
    too_low = value <= low if low_excluded else value < low
    if not math.isfinite(value) or too_low or value > high:
        raise RequestError(
            f"{name} must be in {'(' if low_excluded else '['}{low}, {high}], not {value}",
            param=name,
        )
