"""The rate_limiter: who is let in when, in turns of the event loop."""

from __future__ import annotations

import asyncio

from aioinfer.api.rate_limit import REQUESTS_A_TURN, RateLimiter


async def enter(
    rate_limiter: RateLimiter, name: int, turn: list[int], entered: list[tuple[int, int]]
) -> None:
    await rate_limiter.enter()
    entered.append((name, turn[0]))


async def count_turns(turn: list[int]) -> None:
    while True:
        turn[0] += 1
        await asyncio.sleep(0)


async def burst(
    rate_limiter: RateLimiter, number: int, gone: frozenset[int] = frozenset()
) -> list[tuple[int, int]]:
    """Sends `number` tasks through together, of which `gone` are cancelled while they wait; returns
    (task, turn of the loop)."""
    turn, entered = [0], []
    counting = asyncio.ensure_future(count_turns(turn))
    tasks = [
        asyncio.ensure_future(enter(rate_limiter, name, turn, entered)) for name in range(number)
    ]
    await asyncio.sleep(0)
    for name in gone:
        assert not tasks[name].done(), "it had entered already"
        tasks[name].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    counting.cancel()
    return entered


def most_in_a_turn(entered: list[tuple[int, int]]) -> int:
    turns = [turn for _, turn in entered]
    return max(map(turns.count, turns))


async def test_a_burst_enters_in_order_over_many_turns() -> None:
    entered = await burst(RateLimiter(), 10 * REQUESTS_A_TURN)
    assert [name for name, _ in entered] == list(range(10 * REQUESTS_A_TURN))
    assert most_in_a_turn(entered) == REQUESTS_A_TURN
    turns = {turn for _, turn in entered}
    assert 10 <= len(turns) <= max(turns) <= 24


async def test_few_do_not_wait() -> None:
    rate_limiter = RateLimiter()
    for _ in range(3):
        entered = await burst(rate_limiter, REQUESTS_A_TURN)
        assert len({turn for _, turn in entered}) == 1
        await asyncio.sleep(0)


async def test_those_who_gave_up_hold_nobody_back() -> None:
    last = 4 * REQUESTS_A_TURN
    entered = await burst(RateLimiter(), last + 1, frozenset(range(REQUESTS_A_TURN, last)))
    assert [name for name, _ in entered] == [*range(REQUESTS_A_TURN), last]
    assert entered[-1][1] <= 4


async def test_who_comes_later_does_not_overtake() -> None:
    rate_limiter, order = RateLimiter(), []

    async def pass_through(name: int) -> None:
        await rate_limiter.enter()
        order.append(name)

    first = [asyncio.ensure_future(pass_through(name)) for name in range(3 * REQUESTS_A_TURN)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await pass_through(99)
    await asyncio.gather(*first)
    assert order == [*range(3 * REQUESTS_A_TURN), 99]
