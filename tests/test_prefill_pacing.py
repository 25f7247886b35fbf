"""How much prefill steps take beside decodes, on a simulated clock: the target is kept, prompts
make progress, and throughput is not worse than with a fixed number of tokens."""

from __future__ import annotations

import random

import pytest

from aioinfer.scheduler.prefill_pacing import MIN_TOKENS, PrefillAllowance
from aioinfer.scheduler.step_time import StepTimes
from tests.timed_worker import Simulation, StepWork, eight_billion, simulate


def noisy(work: StepWork, rng: random.Random = random.Random(0)) -> float:  # noqa: B008
    return eight_billion(work) * rng.uniform(0.97, 1.03)


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[int(part * len(values))]


def loaded(sim: Simulation, prompt: int, output: int, streams: int) -> Simulation:
    """Returns the simulation after five seconds of a load, with nothing measured."""
    sim.prompt_len, sim.output_len, sim.num_streams = prompt, output, streams
    sim.run(5)
    sim.forget()
    return sim


@pytest.mark.parametrize("target_s", [0.02, 0.05, 0.15])
@pytest.mark.parametrize(("prompt", "streams"), [(2000, 64), (16_000, 4)])
def test_the_target_is_kept_and_used(target_s: float, prompt: int, streams: int) -> None:
    sim = loaded(simulate(noisy, target_s=target_s), prompt, 128, streams)
    sim.run(10)
    assert percentile(sim.gaps, 0.99) < 1.08 * target_s
    mixed = [took for _, work, took in sim.steps if work.decodes and work.prefill_tokens]
    assert percentile(mixed, 0.5) > 0.7 * target_s or percentile(sim.first, 0.9) < 0.5


def test_a_target_below_what_decodes_take_leaves_prompts_a_fifth() -> None:
    sim = loaded(simulate(noisy, target_s=0.001), 2000, 128, 64)
    sim.run(5)
    mixed = [(work, took) for _, work, took in sim.steps if work.decodes and work.prefill_tokens]
    assert all(work.prefill_tokens >= min(MIN_TOKENS, 2000) for work, _ in mixed[:-1])
    assert sim.first, "prompts starve"
    alone = max(eight_billion(work._replace(prefill_tokens=1)) for work, _ in mixed)
    assert percentile(sim.gaps, 0.99) < 1.6 * alone


@pytest.mark.parametrize(
    ("prompt", "output", "streams", "seconds"),
    [(2000, 128, 64, 20), (32_000, 64, 8, 200), (500, 100, 48, 5)],
)
def test_without_a_target_it_is_as_fast_as_fixed_chunks(
    prompt: int, output: int, streams: int, seconds: int
) -> None:
    rates, gaps = {}, {}
    for cap in (2048, 8192, None):
        sim = loaded(simulate(noisy, cap=cap), prompt, output, streams)
        rates[cap] = sim.run(seconds)
        gaps[cap] = percentile(sim.gaps, 0.99)
    assert rates[None] > 0.95 * max(rates.values())
    assert gaps[None] < 0.6 * gaps[8192]


def test_few_decodes_take_large_chunks_and_many_small_ones() -> None:
    def largest(streams: int) -> int:
        """Of a prompt beside so many streams, one of which came just now."""
        sim = loaded(simulate(noisy), 1000, 20_000, streams)
        sim.prompt_len = 60_000
        for _ in range(4):
            sim.send()
        sim.run(1)
        return max(w.prefill_tokens for _, w, _ in sim.steps if w.decodes)

    assert largest(1) > 2 * largest(64) > 0


def test_a_step_that_takes_longer_than_it_did_is_shortened() -> None:
    sim = loaded(simulate(noisy, target_s=0.05), 4000, 128, 32)
    sim.law = lambda work: 2.0 * noisy(work)
    sim.run(5)
    sim.forget()
    sim.run(5)
    assert percentile(sim.gaps, 0.99) < 1.08 * 0.05


def test_explicit_chunks_are_what_they_are() -> None:
    sim = loaded(simulate(noisy, cap=700), 5000, 64, 8)
    sim.run(5)
    mixed = [w.prefill_tokens for _, w, _ in sim.steps if w.decodes and w.prefill_tokens]
    assert max(mixed) == 700
    sim = loaded(simulate(noisy, cap=700, target_s=10.0), 5000, 64, 8)
    sim.run(5)
    mixed = [w.prefill_tokens for _, w, _ in sim.steps if w.decodes and w.prefill_tokens]
    assert max(mixed) == 700


def test_an_allowance_is_spent_in_tokens_and_in_time() -> None:
    times = StepTimes()
    times.costs = [0.004, 0.004, 0.0, 0.0, 1e-5, 1e-9]
    times.is_known = True
    allowance = PrefillAllowance(5000, times, 0.02, 10)
    assert allowance.take(300, 10_000) == 300
    assert allowance.tokens_left == 4700
    seconds = 0.02 - times.prefill_seconds(300, 10_000)
    second = allowance.take(50_000, 0)
    assert (300 + second + 10) % 128 == 0
    assert times.prefill_seconds(second, 0) <= seconds < times.prefill_seconds(second + 128, 0)
    assert allowance.tokens_left == 0
    assert PrefillAllowance(5000, times, -1.0).take(9000, 0) == MIN_TOKENS
    fixed = PrefillAllowance(700)
    assert [fixed.take(600, 0), fixed.take(9000, 0), fixed.take(1, 0)] == [600, 100, 0]


def test_an_allowance_is_charged() -> None:
    """In tokens, and in what they would take of the time."""
    times = StepTimes()
    times.costs = [0.004, 0.004, 0.0, 0.0, 1e-5, 1e-9]
    times.is_known = True
    for tokens_left, other in ((4000, None), (1000, None), (5000, times), (1000, times)):
        charged, plain = (PrefillAllowance(tokens_left, other, 0.02) for _ in range(2))
        charged.correct(0, 1500, 0)
        plain.take(1500, 0)
        assert charged.tokens_left == plain.tokens_left
        assert charged.take(300, 1500) == plain.take(300, 1500)
    spent = PrefillAllowance(5000, times, 0.02)
    spent.correct(0, 2500, 0)
    assert spent.tokens_left == 0
