"""The limits of a request: its length, the width of a beam search, its token ids, and the outputs
of its prompt's rows.

`Frontend` checks each request before it is routed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from aioinfer.config import SchedulerConfig
from aioinfer.engine.encoding import PreparedPrompt
from aioinfer.engine.served_model import ServedModel
from aioinfer.errors import RequestError
from aioinfer.ipc.prompt_rows import MAX_LOGPROB_BYTES, logprob_bytes
from aioinfer.sampling_params import (
    ALL_TOKENS,
    MAX_BEAM_CANDIDATES,
    MAX_LOGPROBS,
    SamplingParams,
)
from aioinfer.scheduler.prompt_rows import (
    PromptPool,
    PromptProgress,
    PromptRows,
    PromptScores,
    PromptStates,
)
from aioinfer.scheduler.scheduler import Scheduler

#: Bytes of hidden states that a request may ask for: they are held until all have come.
MAX_REQUEST_STATE_BYTES = 32 * 2**20
#: Log-probabilities that a request may ask for at all of its positions together, where it asks for
#: more than 20 at each: a reply with so many has some 100 MB.
MAX_REQUEST_LOGPROBS = 2**20


class RequestLimits:
    """The limits of the engines of a frontend.

    Attributes:
        max_model_len: the longest sequence, prompt included, that every engine can hold.
    """

    def __init__(
        self,
        model: ServedModel,
        config: SchedulerConfig,
        schedulers: Sequence[Scheduler],
        max_model_len: int,
    ):
        self._model = model
        self._config = config
        self._schedulers = schedulers
        self.max_model_len = max_model_len

    def end_of(self, prompt_len: int, params: SamplingParams) -> int:
        """Returns the length, prompt included, at which a request ends.

        Raises `RequestError` if it could never fit.
        """
        if params.prompt_only:
            return prompt_len + 1  # ends with the first sampled token, which is dropped
        room = self.max_model_len - prompt_len
        if room < 1:  # the prompt itself may be as long as that, if nothing is generated
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, the "
                f"prompt has {prompt_len} tokens, which leave none for the output. Please reduce "
                "the length of the input prompt.",
                param="prompt",
                code="context_length_exceeded",
            )
        if params.beam_search is not None:
            room = self._room_of_beams(prompt_len, params)
        max_tokens = params.max_tokens
        if max_tokens is None:  # a default must not cause the rejection of a request
            default = self._model.defaults.max_tokens
            max_tokens = room if default is None else min(room, max(default, params.min_tokens))
        if max_tokens > room and room < self.max_model_len - prompt_len:
            raise RequestError(
                f"max_tokens is {max_tokens}, but the KV cache holds {params.num_sequences} beams "
                f"of at most {room} output tokens at a time",
                param="max_tokens",
            )
        if max_tokens > room:
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you "
                f"requested {prompt_len + max_tokens} tokens ({prompt_len} in the prompt, "
                f"{max_tokens} in the output: max_tokens). Please reduce the length of one of "
                "them.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if params.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but at most {max_tokens} tokens fit",
                param="min_tokens",
            )
        return prompt_len + max_tokens

    def check_logprobs(self, prompt_len: int, max_tokens: int, params: SamplingParams) -> None:
        """Raises `RequestError` if a request asks for too many log-probabilities.

        Args:
            prompt_len: of the prompt, in tokens.
            max_tokens: that the output may have.
            params: of the request.
        """
        for name, length in (
            ("logprobs", max_tokens * params.n),
            ("prompt_logprobs", prompt_len),
        ):
            wanted = getattr(params, name)
            most = self._config.max_logprobs
            if wanted is None:
                continue
            count = self._num_logprobs(wanted)
            if most >= 0 and (wanted if wanted >= 0 else count) > most:
                all_tokens = "" if wanted >= 0 else f", which are all {count} tokens"
                raise RequestError(
                    f"{name} must be in [0, {most}], not {wanted}{all_tokens}; the server's "
                    f"scheduler.max_logprobs = {wanted if wanted >= 0 else -1} permits it",
                    param=name,
                )
            if count > MAX_LOGPROBS and count * length > MAX_REQUEST_LOGPROBS:
                raise RequestError(
                    f"{name} is {wanted}, which are {count} at each of {length} positions; a "
                    f"request may ask for {MAX_REQUEST_LOGPROBS} in all",
                    param=name,
                )

    def _num_logprobs(self, wanted: int) -> int:
        """Returns how many of the likeliest tokens there are where `wanted` are wanted."""
        vocab_size = self._model.vocab_size
        return vocab_size if wanted < 0 else min(wanted, vocab_size)

    def _room_of_beams(self, prompt_len: int, params: SamplingParams) -> int:
        """Returns how many tokens a beam search can generate, at least 1: all of its beams have to
        fit the KV cache at the same time.

        Raises `RequestError` if it could not run at all.
        """
        assert params.beam_search is not None
        width, width_field = params.num_sequences, params.beam_search.width_field
        schedulers = self._schedulers
        if width > self._config.max_num_seqs:
            raise RequestError(
                f"a beam search of width {width} needs as many slots, and this server has "
                f"{self._config.max_num_seqs} (scheduler.max_num_seqs)",
                param=width_field,
            )
        ends = len(self._model.defaults.end_tokens(params))
        if width + ends > min(MAX_BEAM_CANDIDATES, self._model.vocab_size):
            raise RequestError(
                f"a beam search may have {MAX_BEAM_CANDIDATES} beams and end tokens together, and "
                f"no more than the model has tokens; here are {width} beams and {ends} end tokens",
                param="stop_token_ids",
            )

        def fits(max_tokens: int) -> bool:
            max_len = prompt_len + max_tokens
            return all(s.fits_beams(prompt_len, max_len, width) for s in schedulers)

        most = self.max_model_len - prompt_len
        room = bisect_left(range(1, most + 1), True, key=lambda length: not fits(length))
        if not room:
            raise RequestError(
                f"{width} beams of a prompt of {prompt_len} tokens do not fit the KV cache",
                param=width_field,
            )
        return room

    def prompt_rows(self, prompt: PreparedPrompt, params: SamplingParams) -> PromptRows | None:
        """Returns the requested outputs of a prompt's rows. Raises `RequestError` if the results of
        a step could be too long."""
        if params.pooling == ALL_TOKENS:
            self.check_states(len(prompt.tokens))
            return PromptStates.of(len(prompt.tokens), self._model.hidden_size)
        if params.pooling is not None:
            return PromptPool(params.pooling, len(prompt.tokens), self._model.hidden_size)
        if params.prompt_logprobs is None:
            return PromptProgress(len(prompt.tokens)) if params.reports_progress else None
        budget, count = (
            self._config.max_num_batched_tokens, self._num_logprobs(params.prompt_logprobs),
        )  # fmt: skip
        if budget * logprob_bytes(count) > MAX_LOGPROB_BYTES:
            raise RequestError(
                f"prompt_logprobs is {params.prompt_logprobs}: too many for steps of {budget} "
                "tokens (scheduler.max_num_batched_tokens)",
                param="prompt_logprobs",
            )
        return PromptScores.of(prompt.tokens, count)

    def check_states(self, num_tokens: int) -> None:
        """Raises `RequestError` if the hidden states of so many tokens are too many for one
        request."""
        most = MAX_REQUEST_STATE_BYTES // (4 * self._model.hidden_size)
        if num_tokens > most:
            raise RequestError(
                f"the hidden states of {num_tokens} tokens are too many for one request, which may "
                f"have those of {most}",
                param="prompt",
            )

    def check_token_ids(self, params: SamplingParams) -> None:
        """Raises `RequestError` naming a field with a token id that the model does not have."""
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
            ("logprob_token_ids", params.logprob_token_ids or ()),
        ):
            if any(not 0 <= token < self._model.vocab_size for token in ids):
                raise RequestError(
                    f"{name} holds a token id outside of 0 to {self._model.vocab_size - 1}",
                    param=name,
                )
