"""Bodies of requests in the API of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from aioinfer.api.decoding import Body
from aioinfer.api.prompts import Prompt, Prompts, is_single, split_prompts
from aioinfer.api.protocol import Ignored, IgnoredFields, Int32, Int64, Length, Seconds
from aioinfer.api.structured_output import NOT_GIVEN, is_given, json_grammar
from aioinfer.errors import RequestError
from aioinfer.sampling_params import (
    MAX_LOGIT_BIAS_VALUE,
    MAX_SORTED_LOGPROBS,
    GrammarSpec,
    SamplingParams,
)


class Sampling(IgnoredFields, kw_only=True):
    """Sampling fields of `/completion` and `/infill`, and the fields that select the content of
    their replies.

    Fields of methods that are not supported (`dry_multiplier`, `mirostat`, `xtc_probability` and
    the like) are refused unless they switch their method off (`fields.REFUSED`); the other
    parameters of these methods are taken and have no effect.
    """

    n_predict: Int32 | None = None
    max_tokens: Length | None = None
    n_cmpl: Int32 | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Int32 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: list[tuple[int | str, float | bool]] | dict[str, float | bool] | None = None
    n_probs: Int32 | None = None
    post_sampling_probs: bool | None = None
    grammar: str | None = None
    json_schema: msgspec.Raw = NOT_GIVEN
    ignore_eos: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    response_fields: list[str] | None = None
    # parameters of methods that are off
    dry_allowed_length: Ignored = None
    dry_base: Ignored = None
    dry_penalty_last_n: Ignored = None
    dry_sequence_breakers: Ignored = None
    dynatemp_exponent: Ignored = None
    mirostat_eta: Ignored = None
    mirostat_tau: Ignored = None
    xtc_threshold: Ignored = None
    # of how prompts are cached
    n_cache_reuse: Ignored = None
    n_discard: Ignored = None

    def check(self) -> None:
        """See `Body.check`."""
        if self.grammar and is_given(self.json_schema):
            raise RequestError(
                "grammar and json_schema cannot be combined: an output follows one grammar",
                param="json_schema",
            )
        if not 0 <= (self.n_probs or 0) <= MAX_SORTED_LOGPROBS:
            raise RequestError(
                f"n_probs must be in [0, {MAX_SORTED_LOGPROBS}], not {self.n_probs}",
                param="n_probs",
            )
        if self.post_sampling_probs and not self._is_greedy:
            raise RequestError(
                "post_sampling_probs needs a temperature of 0: otherwise probabilities are those "
                "before sampling",
                param="post_sampling_probs",
            )
        window = self.repeat_last_n
        if window not in (None, 0, -1) and self._has_penalties:
            raise RequestError(
                "repeat_last_n must be -1 or 0: penalties count all of the text, or are off",
                param="repeat_last_n",
            )

    @property
    def _is_greedy(self) -> bool:
        return self.temperature is not None and self.temperature <= 0

    @property
    def _has_penalties(self) -> bool:
        penalties = (self.presence_penalty, self.frequency_penalty)
        return any(penalties) or self.repeat_penalty not in (None, 1)

    @property
    def max_length(self) -> int | None:
        """The length of the output in tokens; None for as much as fits."""
        given = self.n_predict if self.n_predict is not None else self.max_tokens
        return None if given is None or given < 0 else given

    def sampling_fields(self) -> dict[str, Any]:
        """Returns the sampling parameters that were given, under the names of `SamplingParams`;
        without `logit_bias`, whose texts have to be encoded."""
        names = ("top_k", "top_p", "min_p", "ignore_eos")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.temperature is not None:
            fields["temperature"] = max(0.0, self.temperature)
        if self.repeat_last_n != 0:
            fields["repetition_penalty"] = self.repeat_penalty
            fields["presence_penalty"] = self.presence_penalty
            fields["frequency_penalty"] = self.frequency_penalty
        if self.seed is not None and self.seed != -1:  # which stands for any
            fields["seed"] = self.seed
        if self.stop:
            fields["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.max_length == 0:
            fields["prompt_only"] = True
        else:
            fields["max_tokens"] = self.max_length
        fields["n"] = self.n_cmpl
        fields["logprobs"] = self.n_probs or None
        fields["reports_progress"] = bool(self.return_progress and self.stream)
        if self.grammar:
            fields["grammar"] = GrammarSpec("lark", self.grammar)
        elif is_given(self.json_schema):
            fields["grammar"] = json_grammar("json_schema", self.json_schema, "json_schema")
        return {name: value for name, value in fields.items() if value is not None}

    def biases(self) -> list[tuple[int | str, float]]:
        """Returns the pairs of `logit_bias`: a token id or a text, and the number that is added to
        its logits. `false` stands for never."""
        given = self.logit_bias or []
        pairs: list[Any] = list(given.items()) if isinstance(given, dict) else given
        found = []
        for token, bias in pairs:
            if isinstance(token, str) and isinstance(given, dict) and token.isdecimal():
                token = int(token)
            found.append((token, -MAX_LOGIT_BIAS_VALUE if bias is False else float(bias)))
        return found

    def settings(self, params: SamplingParams) -> Mapping[str, Any]:
        """Returns `generation_settings`: the effective parameters, under llama.cpp's names."""
        length = -1 if self.max_length is None else self.max_length
        return {
            "n_predict": length,
            "max_tokens": length,
            "seed": -1 if params.seed is None else params.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_last_n": -1,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop": params.stop,
            "ignore_eos": params.ignore_eos,
            "stream": bool(self.stream),
            "n_probs": self.n_probs or 0,
            "post_sampling_probs": bool(self.post_sampling_probs),
            "grammar": self.grammar or "",
            "logit_bias": [
                # JSON has no infinity: llama.cpp has null for what never comes
                {"token": token, "bias": None if bias == -MAX_LOGIT_BIAS_VALUE else bias}
                for token, bias in params.logit_bias.items()
            ],
        }


class LlamaCompletion(Sampling, kw_only=True):
    """`POST /completion`."""

    token_field: ClassVar[str] = "prompt"

    prompt: Prompts

    def check(self) -> None:
        """See `Body.check`."""
        super().check()
        self.prompts()

    @property
    def is_single(self) -> bool:
        """Whether the reply is one object, not a list of them."""
        return is_single(self.prompt) and (self.n_cmpl or 1) == 1

    def prompts(self) -> list[Prompt]:
        """Returns the prompts one by one."""
        return split_prompts(self.prompt, "prompt")


class ExtraFile(Struct, kw_only=True):
    """A file of the project around a gap."""

    text: str
    filename: str | None = None


class InfillRequest(Sampling, kw_only=True):
    """`POST /infill`. The gap is behind `prompt`, which goes on with `input_prefix`."""

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: list[ExtraFile] | None = None


class LlamaEmbedding(Body, kw_only=True):
    """`POST /embedding`."""

    content: Prompts | None = None
    input: Prompts | None = None
    embd_normalize: Int32 | None = None
    timeout_s: Seconds | None = None

    def check(self) -> None:
        """See `Body.check`."""
        if (self.content is None) == (self.input is None):
            raise RequestError("either content or input must be given", param="content")
        if self.embd_normalize not in (None, -1, 2):
            raise RequestError(
                "embd_normalize must be 2 (the Euclidean norm) or -1 (none), not "
                f"{self.embd_normalize}",
                param="embd_normalize",
            )
        self.prompts()

    def prompts(self) -> list[Prompt]:
        """Returns the inputs one by one."""
        if self.content is None:
            return split_prompts(self.input, "input")
        return split_prompts(self.content, "content")
