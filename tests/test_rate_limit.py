"""The rate limit: which handlers enter in which iteration of the event loop."""

from __future__ import annotations

import asyncio

from aioinfer.api.http.limits import MAX_REQUESTS, RateLimiter


async def enter(
    rate_limiter: RateLimiter, name: int, iteration: list[int], entered: list[tuple[int, int]]
) -> None:
    await rate_limiter.enter()
    entered.append((name, iteration[0]))


async def count_iterations(iteration: list[int]) -> None:
    while True:
        iteration[0] += 1
        await asyncio.sleep(0)


async def burst(
    rate_limiter: RateLimiter, number: int, gone: frozenset[int] = frozenset()
) -> list[tuple[int, int]]:
    """Sends `number` tasks through together, of which `gone` are cancelled while they wait; returns
    (task, iteration of the loop)."""
    iteration, entered = [0], []
    counting = asyncio.ensure_future(count_iterations(iteration))
    tasks = [
        asyncio.ensure_future(enter(rate_limiter, name, iteration, entered))
        for name in range(number)
    ]
    await asyncio.sleep(0)
    for name in gone:
        assert not tasks[name].done(), "it had entered already"
        tasks[name].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    counting.cancel()
    return entered


def max_in_an_iteration(entered: list[tuple[int, int]]) -> int:
    iterations = [iteration for _, iteration in entered]
    return max(map(iterations.count, iterations))


async def test_a_burst_enters_in_order_over_many_iterations() -> None:
    entered = await burst(RateLimiter(), 10 * MAX_REQUESTS)
    assert [name for name, _ in entered] == list(range(10 * MAX_REQUESTS))
    assert max_in_an_iteration(entered) == MAX_REQUESTS
    iterations = {iteration for _, iteration in entered}
    assert 10 <= len(iterations) <= max(iterations) <= 24


async def test_few_do_not_wait() -> None:
    rate_limiter = RateLimiter()
    for _ in range(3):
        entered = await burst(rate_limiter, MAX_REQUESTS)
        assert len({iteration for _, iteration in entered}) == 1
        await asyncio.sleep(0)


async def test_cancelled_handlers_delay_nobody() -> None:
    last = 4 * MAX_REQUESTS
    entered = await burst(RateLimiter(), last + 1, frozenset(range(MAX_REQUESTS, last)))
    assert [name for name, _ in entered] == [*range(MAX_REQUESTS), last]
    assert entered[-1][1] <= 4


async def test_a_later_handler_does_not_overtake() -> None:
    rate_limiter, order = RateLimiter(), []

    async def pass_through(name: int) -> None:
        await rate_limiter.enter()
        order.append(name)

    first = [asyncio.ensure_future(pass_through(name)) for name in range(3 * MAX_REQUESTS)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await pass_through(99)
    await asyncio.gather(*first)
    assert order == [*range(3 * MAX_REQUESTS), 99]
