"""Which beams go on and which hypotheses are kept, alone and with a scheduler. That the results are
those of transformers is tested with models in functional/test_beam_search.py."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioinfer.config import SchedulerConfig, load_config
from aioinfer.engine.beam_search import Beam, BeamRun, BeamSearches
from aioinfer.engine.beam_search_state import BeamSearchState, Decision
from aioinfer.engine.emission import Emission
from aioinfer.engine.encoding import PreparedPrompt
from aioinfer.engine.metrics import EngineMetrics
from aioinfer.engine.open_requests import OpenRequests
from aioinfer.engine.output import RequestOutput
from aioinfer.engine.sequence_maker import SequenceMaker
from aioinfer.errors import GenerationError, RequestError
from aioinfer.features.host import Host
from aioinfer.features.logprobs.planning import Planning
from aioinfer.features.logprobs.sections import LogprobRows, Logprobs
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.sampling_params import BeamSearch as Settings
from aioinfer.sampling_params import BeamSearchParams, SamplingParams
from aioinfer.scheduler.block_pool import root_hash
from aioinfer.scheduler.request import ONE_FLOW, Request, RequestStatus
from aioinfer.scheduler.steps import StepOutput
from tests.symbolic_worker import expected_output
from tests.test_forks import CheckedHarness, ForkWorker

VOCABULARY = 8
#: The tokens of a hypothesis, and its score.
Found = tuple[list[int], np.float32]
END = 9


def search(width: int = 2, max_tokens: int = 5, **fields: Any) -> BeamSearchState:
    kept = {name: fields.pop(name) for name in ("min_tokens", "num_logprobs") if name in fields}
    return BeamSearchState(Settings(width, **fields), frozenset([END]), max_tokens, **kept)


def advance(tested: BeamSearchState, *rows: dict[int, float]) -> Decision | None:
    """`rows`: log-probabilities of the likeliest tokens of each beam, likeliest first."""
    tokens = np.array([list(row) for row in rows], np.int32)
    logprobs = np.array([list(row.values()) for row in rows], np.float32)
    return tested.advance(tokens, logprobs, lambda beam: [100 + beam])


def test_a_beam_goes_on_where_it_is() -> None:
    """And the place of one that does not is taken by another's second token."""
    tested = search()
    assert advance(tested, {1: -1.0, 2: -2.0, 3: -9.0}) == Decision([0, 0], [1, 2])
    rows = {1: -9.0, 2: -9.5, 3: -9.9}, {4: -0.5, 5: -0.6, 6: -9.0}
    assert advance(tested, *rows) == Decision([1, 1], [5, 4])


def test_an_end_counts_among_the_likeliest_of_all_alone() -> None:
    tested = search(max_tokens=2)
    assert advance(tested, {1: -1.0, 2: -2.0, END: -3.0}) == Decision([0, 0], [1, 2])
    assert not tested.hypotheses, "it was the third"
    assert advance(tested, {END: -1.0, 2: -7.0, 3: -8.0}, {1: -1.5, 3: -8.0, 4: -9.0}) is None
    found = [(one.tokens, one.end_token, float(one.score)) for one in tested.hypotheses]
    assert found == [([100, END], END, -1.0), ([101, 1], None, -1.75)]


def test_no_end_before_min_tokens() -> None:
    tested = search(min_tokens=1)
    assert advance(tested, {END: -0.1, 1: -1.0, 2: -2.0}) == Decision([0, 0], [1, 2])
    assert not tested.hypotheses


@pytest.mark.parametrize(("early", "rounds"), [(True, 3), (False, 4), ("never", 5)])
def test_early_stopping(early: Any, rounds: int) -> None:
    """There are two hypotheses after three rounds, the worse with -4.1 / 3. The best beam has
    -2.6 / 3 then, and after one more -6 / 4, or, at the maximum length, -6 / 5."""
    tested = search(early_stopping=early)
    hopeless = {1: -90.0, 2: -91.0, 3: -92.0}
    steps: list[tuple[dict[int, float], ...]] = [
        ({1: -1.0, 2: -1.2, END: -3.0},),
        ({END: -1.0, 3: -1.1, 4: -8.0}, {1: -7.0, 2: -8.0, 3: -9.0}),
        ({4: -0.5, END: -2.0, 5: -9.0}, {1: -9.0, 2: -9.1, 3: -9.2}),
        ({1: -3.4, 2: -8.0, 3: -9.0}, hopeless),
        (hopeless, hopeless),
    ]
    ends = [advance(tested, *rows) is None for rows in steps[:rounds]]
    assert ends == [False] * (rounds - 1) + [True]
    scores = [float(one.score) for one in tested.hypotheses]
    assert scores == pytest.approx([-1.0, -4.1 / 3])


def test_log_probabilities_follow_the_beams() -> None:
    tested = search(max_tokens=2, num_logprobs=1)
    advance(tested, {1: -1.0, 2: -2.0, 3: -9.0})
    advance(tested, {1: -9.0, 2: -9.5, 3: -9.9}, {4: -0.5, 5: -0.6, 6: -9.0})
    last = tested.hypotheses[1].last
    assert last is not None
    found = [(one.token, one.logprob, one.top) for one in last.chain()]
    assert found[0] == (2, -2.0, [(1, -1.0)])
    assert found[1][0] == 5
    assert found[1][2] == [(4, -0.5)]


def reference(logprobs_of: Any, prompt: list[int], params: SamplingParams) -> list[Found]:
    """Returns (tokens, score) of the hypotheses of a search, the best first: the rules of
    `engine.beam_search` on plain lists, with `logprobs_of` (tokens) of the whole vocabulary."""
    found: list[Found] = []
    given = params.beam_search
    assert given is not None
    assert params.max_tokens is not None
    ends, width, most = set(params.stop_token_ids), given.width, params.max_tokens
    beams: list[tuple[list[int], np.float32]] = [([], np.float32(0))]
    for length in range(1, most + 1):
        options = [
            ([*tokens, token], total + np.float32(value), token in ends)
            for tokens, total in beams
            for token, value in enumerate(logprobs_of([*prompt, *tokens]).tolist())
            if not (token in ends and length <= params.min_tokens)
        ]
        options.sort(key=lambda option: -option[1])
        for tokens, total, is_end in options[:width]:
            if is_end or length == most:
                found.append((tokens, total / np.float32(length**given.length_penalty)))
                found.sort(key=lambda one: -one[1])
                del found[width:]
        beams = [(tokens, total) for tokens, total, is_end in options if not is_end][:width]
        if len(found) == width:
            reach = most if given.early_stopping == "never" and given.length_penalty > 0 else length
            best = beams[0][1] / np.float32(reach**given.length_penalty)
            if given.early_stopping is True or best <= found[-1][1]:
                break
    return found


def logprobs_of(tokens: Sequence[int]) -> np.ndarray:
    """Returns the log-probabilities float32 [`VOCABULARY`] behind `tokens`."""
    rng = np.random.default_rng([len(tokens), *tokens])
    logits = rng.normal(size=VOCABULARY).astype(np.float32) * 2
    return logits - np.log(np.exp(logits).sum(dtype=np.float32))


def drive(params: SamplingParams, prompt: list[int]) -> list[Found]:
    """Returns the hypotheses of a `BeamSearchState` that is driven by plain lists."""
    assert params.beam_search is not None
    assert params.max_tokens is not None
    tested = BeamSearchState(
        params.beam_search,
        frozenset(params.stop_token_ids),
        params.max_tokens,
        min_tokens=params.min_tokens,
    )
    beams: list[list[int]] = [[]]
    while True:
        rows = np.stack([logprobs_of([*prompt, *beam]) for beam in beams])
        tokens = np.argsort(-rows, axis=1, kind="stable")[:, : tested.num_candidates]
        values = np.take_along_axis(rows, tokens, 1)
        decision = tested.advance(tokens.astype(np.int32), values, beams.__getitem__)
        if decision is None:
            return [(one.tokens, one.score) for one in tested.hypotheses]
        beams = [
            [*beams[parent], token]
            for parent, token in zip(decision.parents, decision.tokens, strict=True)
        ]


def same(found: Sequence[Found], expected: Sequence[Found]) -> bool:
    tokens = [each[0] for each in found] == [each[0] for each in expected]
    scores = np.array([each[1] for each in found]), np.array([each[1] for each in expected])
    return tokens and bool(np.allclose(*scores, rtol=1e-5))


@st.composite
def searches(draw: st.DrawFn) -> SamplingParams:
    width = draw(st.integers(1, 4))
    return BeamSearchParams(
        beam_width=width,
        n=draw(st.integers(1, width)),
        max_tokens=draw(st.integers(1, 8)),
        min_tokens=draw(st.integers(0, 1)),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3))),
        length_penalty=draw(st.sampled_from([1.0, 0.0, 0.5, 2.0, -1.0])),
        early_stopping=draw(st.sampled_from([True, False, "never"])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
    ).sampling_params()


@given(searches(), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_a_search_finds_what_plain_lists_do(params: SamplingParams, prompt: list[int]) -> None:
    assert same(drive(params, prompt), reference(logprobs_of, prompt, params))


def test_a_search_as_wide_as_the_vocabulary_finds_the_likeliest_outputs() -> None:
    """Of two tokens: of all pairs."""
    for first in range(20):
        params = BeamSearchParams(beam_width=VOCABULARY, max_tokens=2).sampling_params()
        totals = {
            (one, two): logprobs_of([first])[one] + logprobs_of([first, one])[two]
            for one in range(VOCABULARY)
            for two in range(VOCABULARY)
        }
        best = sorted(totals, key=lambda pair: -totals[pair])[:VOCABULARY]
        assert [tuple(tokens) for tokens, _ in drive(params, [first])] == best


# ---------------------------------------------------------------- searches in a scheduler


class BeamWorker(ForkWorker):
    """Answers with the log-probabilities that plans list; samples some token."""

    nan: ClassVar[Callable[[int], bool]] = staticmethod(lambda slot: False)

    def _execute(self, plan: StepPlan) -> StepResult:
        self.ends: list[list[int]] = []
        result = super()._execute(plan)
        listed = plan.section(LogprobRows)
        if listed is not None:
            rows = np.stack([logprobs_of(self.ends[row]) for row in listed.rows])
            count = int(listed.num_top.max())
            tokens = np.argsort(-rows, axis=1, kind="stable")[:, :count].astype(np.int32)
            sampled = np.take_along_axis(rows, result.tokens[listed.rows][:, None] % VOCABULARY, 1)
            result.sections = [
                Logprobs(
                    listed.rows, sampled[:, 0], tokens, np.take_along_axis(rows, tokens, 1),
                    np.zeros(len(rows), np.int32), np.empty(0, np.float32),
                )
            ]  # fmt: skip
        return StepResult.decode(b"".join(bytes(part) for part in result.encode()))

    def _sample(self, slot: int, end: int) -> int:
        self.ends.append(self.tokens[slot][:end])
        return -1 if self.nan(slot) else super()._sample(slot, end)


class BeamHarness(CheckedHarness):
    """The parts of an engine around a scheduler, without workers and the step loop.

    `outputs` are the requests that were added.
    """

    use = Beam
    worker_type = BeamWorker

    def __init__(self, **limits: Any):
        self.requests = OpenRequests(EngineMetrics(), lambda: None)
        self.emission = Emission(self.requests, self._lose)
        host = Host(
            lambda: self.scheduler, lambda: None, self.requests.fail_request, lambda section: None,
            lambda: None, self.requests.metrics, load_config(None, {"model.path": "none"}),
        )  # fmt: skip
        self.searches = BeamSearches(host, self.requests, self.emission)
        parts = [Planning(host), self.searches]
        super().__init__(features=parts, **limits)
        self.requests.scheduler = self.scheduler
        model = SimpleNamespace(
            vocab_size=VOCABULARY, hidden_size=1, tokenizer=None, is_encoder=False,
            defaults=SimpleNamespace(end_tokens=lambda params: frozenset(params.stop_token_ids)),
        )  # fmt: skip
        self.maker = SequenceMaker(model, SchedulerConfig(), parts, 0)
        self.outputs: list[RequestOutput] = []
        self.losses: list[Exception] = []

    def _lose(self, error: Exception) -> None:
        self.losses.append(error)

    def submit(self, prompt: list[int], params: SamplingParams) -> RequestOutput | None:
        """Adds a request; None if it could not run."""
        most = len(prompt) + (params.max_tokens or 1)
        if not self.scheduler.fits_forks(len(prompt), most, params.num_sequences):
            return None
        output = RequestOutput(str(len(self.outputs)), prompt, params)
        prepared = PreparedPrompt(prompt, array("i", prompt), [], root_hash())
        self.maker.make(output, prepared, None, most, 0, ONE_FLOW)
        output.on_abort = self.requests.abort
        self.outputs.append(output)
        self.requests.add(output, 0.0)
        return output

    def update(self) -> StepOutput:
        result = self.worker.results.popleft()
        output = self.scheduler.update(result)
        assert not any(request.use(Beam) and token for request, token in
                       zip(output.requests, output.tokens, strict=True))  # fmt: skip
        self.emission.add(output, result)
        self.emission.emit_portion()
        return output

    async def finish(self) -> None:
        """Steps until all requests have ended and are emitted."""
        for _ in range(3000):
            if self.scheduler.is_idle and not self.worker.results:
                break
            self.step()
            await asyncio.sleep(0)
        assert self.scheduler.is_idle
        async with asyncio.timeout(10):
            await self.requests.wait_idle()
        assert not self.losses
        assert not self.searches._ending
        assert self.scheduler.kv_cache.num_free == sum(self.limits.num_blocks)
        assert not self.requests.metrics.open_requests


async def check_output(output: RequestOutput) -> None:
    """Checks that a search has found what it finds on plain lists."""
    deltas = await output.collect()
    params = output.params
    expected = reference(logprobs_of, output.prompt_token_ids, params)[: params.n]
    assert [delta.token_ids for delta in deltas] == [tokens for tokens, _ in expected]
    for delta, (tokens, score) in zip(deltas, expected, strict=True):
        assert params.beam_search is not None
        total = score * np.float32(len(tokens) ** params.beam_search.length_penalty)
        assert delta.cumulative_logprob == pytest.approx(float(total), rel=1e-4)
        is_end = tokens[-1] in params.stop_token_ids
        assert delta.finish_reason == ("stop" if is_end else "length")
        assert delta.stop_reason == (tokens[-1] if is_end else None)
        assert (delta.logprobs is None) == (params.logprobs is None)
        prefix = list(output.prompt_token_ids)
        for each in delta.logprobs or ():
            values = logprobs_of(prefix)
            best = np.argsort(-values, kind="stable")[: params.logprobs].tolist()
            assert each.logprob == pytest.approx(float(values[each.token_id]), rel=1e-5)
            assert [token for token, _ in each.top] == best
            prefix.append(each.token_id)
        assert delta.logprobs is None or prefix[-len(tokens) :] == tokens


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_searches_in_a_scheduler_find_what_plain_lists_do(data: st.DataObject) -> None:
    """Several at a time beside other requests, in few slots and blocks, in chunks, and with lost
    workers in the middle of a round."""
    draw = data.draw
    budget = draw(st.sampled_from([2, 5, 32]), "budget")

    async def run() -> None:
        harness = BeamHarness(
            depth=draw(st.sampled_from([1, 2]), "depth"),
            block_size=draw(st.sampled_from([1, 4]), "block_size"),
            num_blocks=draw(st.integers(20, 64), "blocks"),
            max_num_seqs=draw(st.integers(2, 8), "max_num_seqs"),
            token_budget=budget,
            prefill_cap=budget,
            prefix_caching=draw(st.booleans(), "caching"),
        )
        for _ in range(draw(st.integers(1, 5), "arrivals")):
            prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
            params = draw(
                st.one_of(searches(), st.just(SamplingParams(temperature=0, max_tokens=9)))
            )
            harness.submit(prompt, params)
            for _ in range(draw(st.integers(0, 5))):
                harness.step()
                await asyncio.sleep(0)
            if draw(st.integers(0, 5)) == 0:
                harness.restart()
        await harness.finish()
        for output in harness.outputs:
            if output.params.beam_search is not None:
                await check_output(output)
            else:
                (sequence,), (delta,) = output.sequences, await output.collect()
                assert delta.token_ids == expected_output(sequence.request)

    asyncio.run(run())


def params_of(width: int = 3, max_tokens: int = 9, **fields: Any) -> SamplingParams:
    return BeamSearchParams(beam_width=width, max_tokens=max_tokens, **fields).sampling_params()


async def test_an_aborted_search_ends_alone() -> None:
    harness = BeamHarness(num_blocks=64)
    aborted, kept = harness.submit([1, 2], params_of()), harness.submit([1, 2], params_of())
    assert aborted is not None
    assert kept is not None
    for _ in range(5):
        harness.step()
    aborted.abort()
    harness.scheduler.check_integrity()
    assert {sequence.request.status for sequence in aborted.sequences} == {RequestStatus.FINISHED}
    await harness.finish()
    await check_output(kept)


async def test_a_search_that_is_cut_short_has_its_best_outputs_so_far() -> None:
    harness = BeamHarness(num_blocks=64, depth=1)
    output = harness.submit([1, 2], params_of(n=2))
    assert output is not None
    for _ in range(6):
        harness.step()
    (run,) = {sequence.request.use(Beam).run for sequence in output.sequences}
    assert run.num_tokens > 2
    harness.searches.cut_short(output)
    harness.searches.cut_short(output)
    await harness.finish()
    deltas = await output.collect()
    assert [delta.finish_reason for delta in deltas] == ["abort", "abort"]
    expected = reference(logprobs_of, [1, 2], params_of(n=2, max_tokens=run.num_tokens))[:2]
    assert [delta.token_ids for delta in deltas] == [tokens for tokens, _ in expected]


async def test_a_beam_without_a_token_fails_its_search_alone() -> None:
    harness = BeamHarness(num_blocks=64, depth=1)
    failing, kept = harness.submit([1, 2], params_of()), harness.submit([3], params_of())
    assert failing is not None
    assert kept is not None
    for _ in range(4):
        harness.step()
    harness.worker.nan = lambda slot: slot == failing.sequences[1].request.slot
    harness.step()
    harness.worker.nan = lambda slot: False
    with pytest.raises(GenerationError, match="logits held NaN"):
        await failing.collect()
    await harness.finish()
    await check_output(kept)


async def test_a_search_that_raises_fails_alone() -> None:
    harness = BeamHarness(num_blocks=64, depth=1)
    failing, kept = harness.submit([1, 2], params_of()), harness.submit([3], params_of())
    assert failing is not None
    assert kept is not None
    search = failing.sequences[0].request.use(Beam).run.search
    search._scores = np.zeros(7, np.float32)
    await harness.finish()
    with pytest.raises(GenerationError, match="the beam search could not go on"):
        await failing.collect()
    await check_output(kept)


def test_rows_of_a_round_are_kept_until_all_have_come() -> None:
    params = params_of(2)
    requests = [Request("x", array("i", [1, 2]), 2, params, 9) for _ in range(2)]
    run = BeamRun(search(), requests, None)
    tokens, values = np.array([1, 2, 3, 4], np.int32), np.array([-1, -2, -3, -4], np.float32)
    assert not run.take(requests[0], tokens, values)
    assert not run.take(requests[0], tokens, values), "a row that was computed again"
    assert run.take(requests[1], tokens, values)
    assert run.advance() == Decision([0, 0], [1, 2]), "by the first beam alone"
    for request, token in zip(requests, (1, 2), strict=True):
        request.tokens.extend([token, 7])  # the second one is sampled, and counts for nothing
    assert not run.take(requests[1], tokens, values - 1)
    assert run.take(requests[0], tokens, values)
    assert [found.tokens for found in run.best_so_far(2)] == [[1], [2]]
    assert run.advance() == Decision([0, 0], [1, 2])
    assert run.num_tokens == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 65}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "early_stopping": "no"}, "early_stopping"),
        ({"beam_width": 2, "logprobs": 129}, "logprobs"),
        ({"beam_width": 2, "logprobs": -1}, "logprobs"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**fields).sampling_params()
    assert caught.value.param == param
