"""Makes the sequences of a request: for each, the scheduler's `Request` and the output.

`Frontend` checks each request by its `RequestLimits` first: its length, the width of a beam search,
its token ids, and how many log-probabilities it may ask for.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from aioinfer.config import SchedulerConfig
from aioinfer.engine.beam_search import Beam, BeamRun
from aioinfer.engine.beam_search_state import BeamSearchState
from aioinfer.engine.encoding import PreparedPrompt
from aioinfer.engine.output import OutputSequence, RequestOutput
from aioinfer.engine.served_model import ServedModel
from aioinfer.errors import RequestError
from aioinfer.features.logprobs.planning import TokenLogprobs
from aioinfer.features.sources.planning import SourceUse
from aioinfer.sampling_params import (
    MAX_BEAM_CANDIDATES,
    MAX_LOGPROBS,
    SamplingParams,
)
from aioinfer.scheduler.features import StepFeature, SubmittedRequest
from aioinfer.scheduler.request import Flow, ForkGroup, Request, Use
from aioinfer.scheduler.scheduler import Scheduler
from aioinfer.text.constraints import CompiledConstraint
from aioinfer.text.detokenizer import Detokenizer

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
                f"{max_tokens} in the output). Please reduce the length of one of them.",
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
            return all(s.fits_forks(prompt_len, max_len, width) for s in schedulers)

        most = self.max_model_len - prompt_len
        room = bisect_left(range(1, most + 1), True, key=lambda length: not fits(length))
        if not room:
            raise RequestError(
                f"{width} beams of a prompt of {prompt_len} tokens do not fit the KV cache",
                param=width_field,
            )
        return room

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


def _check_source(params: SamplingParams) -> None:
    """Raises `RequestError` for what a model with an encoder before its decoder cannot return."""
    for name in ("prompt_logprobs", "pooling"):
        if getattr(params, name) is not None:
            raise RequestError(
                f"{name} is not supported for models with an encoder before the decoder", param=name
            )


class SequenceMaker:
    """Makes sequences for one model."""

    def __init__(
        self,
        model: ServedModel,
        config: SchedulerConfig,
        features: Iterable[StepFeature],
        seed: int | None,
    ):
        """`features`: all that requests may use; `seed` seeds the seeds of requests that bring
        none."""
        self._model = model
        self._config = config
        self._features = tuple(features)
        self._extra_args = {name for feature in self._features for name in feature.extra_args}
        self._seeds = random.Random(seed)

    def make(
        self,
        output: RequestOutput,
        prompt: PreparedPrompt,
        constraint: CompiledConstraint | None,
        max_len: int,
        priority: int,
        flow: Flow,
    ) -> None:
        """Makes the n sequences of a request.

        Raises `RequestError` if it asks too much of a feature.
        """
        params, tokens, pictures = output.params, prompt.tokens, prompt.pictures
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        end_tokens = self._model.defaults.end_tokens(params)
        if params.prompt_only or params.beam_search is not None:
            end_tokens = frozenset()  # a search finds them
        if prompt.source is not None:
            _check_source(params)
        group = ForkGroup() if params.num_sequences > 1 else None
        self._check_arguments(params)
        submitted = SubmittedRequest(
            params, tokens, constraint, self._model.vocab_size, self._model.hidden_size,
            self._config.max_num_batched_tokens, output.report_progress, prompt.variant,
            is_whole=self._model.is_encoder, pictures=prompt.pictures,
            source=prompt.source,
        )  # fmt: skip
        before = output.prompt_token_ids if prompt.source is None else prompt.tokens.tolist()
        make_detokenizer = self._detokenizers(output, before)
        for index in range(params.num_sequences):
            uses = self._uses(submitted, index)
            request = Request(
                output.request_id,
                tokens[:],
                len(tokens),
                params,
                max_len,
                (seed + index) % 2**64,
                end_tokens,
                priority,
                prompt.hashes[:],
                prompt.root,
                group=group,
                uses=uses,
                flow=flow,
                num_expected=len(tokens) - 1 if index else 0,  # the first computes the prompt
                spans=() if pictures is None else pictures.spans,
                rotary_offset=0 if pictures is None else pictures.rotary_offset,
                source=next((use.source for use in uses if isinstance(use, SourceUse)), None),
            )
            detokenizer = None if make_detokenizer is None else make_detokenizer()
            output.sequences.append(OutputSequence(index, request, output, detokenizer))
        if group is not None:
            group.awaited = output.sequences[0].request.uses
        if params.beam_search is not None:
            self._make_beams(output, make_detokenizer)

    def _check_arguments(self, params: SamplingParams) -> None:
        """Raises `RequestError` for an argument that no feature takes."""
        if unknown := params.extra_args.keys() - self._extra_args:
            known = ", ".join(sorted(self._extra_args)) or "none"
            raise RequestError(
                f"no feature of this server takes the argument {min(unknown)!r}; known are {known}",
                param="vllm_xargs",
            )

    def _uses(self, submitted: SubmittedRequest, index: int) -> tuple[Use, ...]:
        found = (feature.use_of(submitted, index) for feature in self._features)
        return tuple(use for use in found if use is not None)

    def _detokenizers(
        self, output: RequestOutput, before: list[int]
    ) -> Callable[[], Detokenizer] | None:
        """Returns what makes a detokenizer of a request's output; None if it has no text.
        `before`: the token ids that the text goes on from."""
        params, tokenizer = output.params, self._model.tokenizer
        if tokenizer is None or params.prompt_only:
            return None
        return partial(
            tokenizer.detokenizer,
            before,
            params.skip_special_tokens,
            params.shown_token_ids,
        )

    def _make_beams(
        self, output: RequestOutput, make_detokenizer: Callable[[], Detokenizer] | None
    ) -> None:
        """Makes the sequences of a request the beams of a search: each samples one token, and then
        waits for the search's choice."""
        params, requests = output.params, [sequence.request for sequence in output.sequences]
        assert params.beam_search is not None
        search = BeamSearchState(
            params.beam_search,
            self._model.defaults.end_tokens(params),
            requests[0].max_len - requests[0].prompt_len,
            min_tokens=params.min_tokens,
            num_logprobs=params.logprobs,
        )
        run = BeamRun(search, requests, make_detokenizer)
        logprobs = TokenLogprobs(min(search.num_candidates, self._model.vocab_size))
        for request in requests:
            others = [use for use in request.uses if not isinstance(use, TokenLogprobs)]
            request.uses = (*others, logprobs, Beam(run))
            request.plan_limit = min(request.max_len, request.prompt_len + 1)
