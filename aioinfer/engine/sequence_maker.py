"""Makes the sequences of a request: for each, the scheduler's `Request` and the output.

`Frontend` is the only caller.
"""

from __future__ import annotations

import random
from functools import partial

import numpy as np

from aioinfer.engine.beam_search import BeamRun, BeamSearch
from aioinfer.engine.encoding import PreparedPrompt
from aioinfer.engine.output import OutputSequence, RequestOutput
from aioinfer.engine.served_model import ServedModel
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.prompt_rows import PromptProgress, PromptRows
from aioinfer.scheduler.request import Beam, BeamGroup, Flow, ForkGroup, Request
from aioinfer.scheduler.requested_tokens import RequestedTokens
from aioinfer.text.constraints import CompiledConstraint


class SequenceMaker:
    """Makes sequences for one model."""

    def __init__(self, model: ServedModel, seed: int | None):
        """`seed` seeds the seeds of requests that bring none."""
        self._model = model
        self._seeds = random.Random(seed)

    def make(
        self,
        output: RequestOutput,
        prompt: PreparedPrompt,
        constraint: CompiledConstraint | None,
        max_len: int,
        priority: int,
        flow: Flow,
        num_expected: int,
    ) -> None:
        """Makes the n sequences of a request; `num_expected` tokens of the prompt are likely to be
        in the cache."""
        params, tokens, tokenizer = output.params, prompt.tokens, self._model.tokenizer
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        end_tokens = self._model.defaults.end_tokens(params)
        if params.prompt_only:
            end_tokens, tokenizer = frozenset(), None
        if params.beam_search is not None:
            end_tokens = frozenset()  # the search finds them
        group = ForkGroup() if params.num_sequences > 1 else None
        requested = self._requested(params)
        for index in range(params.num_sequences):
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
                requested=requested,
                flow=flow,
                # the first computes the prompt for all
                num_expected=num_expected if index == 0 else len(tokens) - 1,
            )
            detokenizer = None
            if tokenizer is not None:
                detokenizer = tokenizer.detokenizer(
                    output.prompt_token_ids, params.skip_special_tokens, params.shown_token_ids
                )
            restricted = None if constraint is None else constraint.start()
            output.sequences.append(OutputSequence(index, request, output, detokenizer, restricted))

    def _requested(self, params: SamplingParams) -> RequestedTokens | None:
        """Returns the tokens that log-probabilities are requested of; None if none are, or only a
        few of the likeliest."""
        if not params.requests_tokens:
            return None
        if params.logprob_token_ids is None:
            return RequestedTokens(None, self._model.vocab_size)
        ids = np.array(params.logprob_token_ids, np.int32)
        return RequestedTokens(ids, len(ids))

    def make_beams(self, output: RequestOutput) -> None:
        """Makes beams of the sequences of a request: the first then stands for all."""
        params, tokenizer = output.params, self._model.tokenizer
        assert params.beam_search is not None
        requests = [sequence.request for sequence in output.sequences]
        leader = output.sequences[0]
        search = BeamSearch(
            params.beam_search,
            self._model.defaults.end_tokens(params),
            leader.request.max_len - leader.request.prompt_len,
            min_tokens=params.min_tokens,
            num_logprobs=params.logprobs,
        )
        group = BeamGroup([Beam(request) for request in requests], search.num_candidates)
        for request in requests:
            request.beams, request.plan_limit = group, 0
        leader.search = BeamRun(search, group)
        if tokenizer is not None:
            leader.make_detokenizer = partial(
                tokenizer.detokenizer,
                output.prompt_token_ids,
                params.skip_special_tokens,
                params.shown_token_ids,
            )
        output.sequences = [leader]


def attach_rows(prompt_rows: PromptRows, output: RequestOutput) -> None:
    """Makes the first sequence of a request bring the outputs of the prompt's rows."""
    first = output.sequences[0].request
    first.prompt_rows = prompt_rows
    if isinstance(prompt_rows, PromptProgress):
        prompt_rows.report = output.report_progress
    if first.group is not None:
        first.group.prompt_rows = prompt_rows
