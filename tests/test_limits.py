"""Limits of API keys: rates, accounts, and 429 over a socket. No model is behind it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.api.http.keys import ApiKey, ApiKeys
from aioinfer.api.http.limits import Account, Accounts, Rate, TokenCharge, duration_text
from aioinfer.config import load_config
from aioinfer.engine.output import RequestOutput
from aioinfer.errors import RateLimitError, RequestError
from tests.test_server import make_server, serve

# ---------------------------------------------------------------- rates


def test_a_rate_allows_its_limit_at_once_and_then_as_it_flows_back() -> None:
    rate = Rate(60)
    for left in range(59, -1, -1):
        assert rate.wait_s(1, 100.0) == 0
        rate.charge(1, 100.0)
        assert rate.remaining(100.0) == left
    assert rate.wait_s(1, 100.0) == pytest.approx(1)
    assert rate.wait_s(7, 100.0) == pytest.approx(7)
    assert rate.reset_s(100.0) == pytest.approx(60)
    assert rate.wait_s(1, 101.0) == 0
    assert (rate.remaining(101.0), rate.remaining(160.0), rate.remaining(999.0)) == (1, 60, 60)


def test_more_than_the_limit_passes_when_nothing_is_used_and_is_worked_off() -> None:
    rate = Rate(100)
    assert rate.wait_s(250, 0.0) == 0
    rate.charge(250, 0.0)
    assert rate.remaining(0.0) == -150
    assert rate.wait_s(1, 0.0) == pytest.approx(90.6)
    assert rate.wait_s(250, 0.0) == pytest.approx(150)


def test_what_was_not_used_is_given_back() -> None:
    rate = Rate(100)
    rate.charge(80, 0.0)
    rate.charge(-60, 0.0)
    assert rate.remaining(0.0) == 80
    rate.charge(-10, 1000.0)
    assert rate.remaining(1000.0) == 100, "no more than the limit"


@given(
    limit=st.integers(1, 10_000),
    events=st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 30)), min_size=1, max_size=60),
)
def test_no_more_passes_than_a_minutes_worth_and_the_rate(
    limit: int, events: list[tuple[int, float]]
) -> None:
    """In any time t no more than limit · (1 + t / 60) passes, of amounts within the limit; and what
    waits as long as it should passes."""
    rate, now, passed = Rate(limit), 0.0, []
    for amount, pause in events:
        amount = min(amount, limit)
        now += pause
        wait = rate.wait_s(amount, now)
        if wait:
            assert rate.wait_s(amount, now + wait + 1e-5) == 0
        else:
            rate.charge(amount, now)
            passed.append((now, amount))
    for index, (begin, _) in enumerate(passed):
        total = 0
        for when, amount in passed[index:]:
            total += amount
            assert total <= limit * (1 + (when - begin) / 60) + 0.01 * limit


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (0.0001, "1ms"), (0.12, "120ms"), (1, "1s"), (1.5, "1.5s"), (59.999, "59.999s"),
        (60, "1m0s"), (90.25, "1m30.25s"), (360, "6m0s"),
    ],
)  # fmt: skip
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


# ---------------------------------------------------------------- accounts


def output(prompt: int, *generated: int) -> RequestOutput:
    """An output of this many prompt tokens and as many tokens of each sequence."""
    return cast(
        RequestOutput, SimpleNamespace(prompt_token_ids=[0] * prompt, num_generated=sum(generated))
    )


def test_tokens_are_reserved_and_settled() -> None:
    account = Account(ApiKey("a", tokens_per_minute=100))
    assert account.tokens is not None
    first, second = TokenCharge(account, 60), TokenCharge(account, 40)
    with pytest.raises(RateLimitError) as caught:
        TokenCharge(account, 10)
    assert (caught.value.kind, caught.value.retry_after_s) == ("tokens", 6)
    first.settle([output(10, 3, 4)])
    second.settle([])  # its prompt was rejected after all
    assert 83 <= account.tokens.remaining(time.monotonic()) <= 99, "17 used, or what is left of it"
    assert (account.num_prompt_tokens, account.num_generated_tokens) == (10, 7)
    assert account.num_rejected == {"requests": 0, "tokens": 1, "concurrency": 0}


def test_without_max_tokens_the_excess_is_worked_off_first() -> None:
    account = Account(ApiKey("a", tokens_per_minute=600))
    TokenCharge(account, 10).settle([output(10, 1200)])
    with pytest.raises(RateLimitError) as caught, account.request():
        pass
    assert caught.value.kind == "tokens"
    assert 55 <= caught.value.retry_after_s <= 62
    assert account.num_requests == 0
    assert account.headers()["x-ratelimit-remaining-tokens"] == "0"


def test_requests_at_a_time_are_bounded_and_given_back_however_they_end() -> None:
    account = Account(ApiKey("a", max_concurrent_requests=1))

    def fail() -> None:
        with account.request():
            with pytest.raises(RateLimitError, match="1 requests at a time"), account.request():
                pass
            raise ValueError("it fails")

    for _ in range(3):
        with pytest.raises(ValueError, match="it fails"):
            fail()
    assert account.num_concurrent == 0
    assert account.num_requests == 3
    assert account.headers() == {}


def test_what_goes_on_behind_a_reply_counts() -> None:
    account = Account(ApiKey("a", max_concurrent_requests=1))
    with account.request(), account.occupied():
        assert account.num_concurrent == 2
    with account.occupied(), pytest.raises(RateLimitError), account.request():
        pass
    assert account.num_concurrent == 0


def test_a_rejected_request_is_charged_nothing() -> None:
    account = Account(ApiKey("a", requests_per_minute=2, max_concurrent_requests=1))
    assert account.requests is not None
    with account.request():
        for _ in range(5):
            with pytest.raises(RateLimitError), account.request():
                pass
    with account.request():
        assert account.headers()["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.parametrize(
    ("bound", "asked", "priority"),
    [
        (0, None, 0), (0, 7, 7), (2, None, 2), (2, 2, 2), (2, 9, 9), (-3, None, 0), (-3, -3, -3),
    ],
)  # fmt: skip
def test_priorities_down_to_the_bound(bound: int, asked: int | None, priority: int) -> None:
    account = Account(ApiKey("a", min_priority=bound))
    assert account.priority(asked) == priority
    with pytest.raises(RequestError, match=f"may be {bound} or above") as caught:
        account.priority(bound - 1)
    assert (caught.value.status, caught.value.param) == (400, "priority")


def keys_of(tmp_path: Path, text: str) -> ApiKeys:
    file = tmp_path / "keys"
    file.write_text(text)
    config = load_config(None, {"model.path": "x", "server.api_keys": str(file)})
    return ApiKeys.load(config.server)


def test_accounts_go_on_when_the_keys_are_read_again(tmp_path: Path) -> None:
    accounts = Accounts(keys_of(tmp_path, '[a]\nkey="1"\nrequests_per_minute=5\n[b]\nkey="2"'))
    before = accounts.find("Bearer 1")
    assert before is not None
    with before.request():
        accounts.set_keys(
            keys_of(tmp_path, '[a]\nkey="3"\nrequests_per_minute=5\nmax_concurrent_requests=1')
        )
        assert accounts.find("Bearer 1") is None
        assert accounts.find("Bearer 2") is None
        assert accounts.find("Bearer 3") is before
        with pytest.raises(RateLimitError, match="at a time"), before.request():
            pass
    assert before.headers()["x-ratelimit-remaining-requests"] == "4"
    assert [account.key.name for account in accounts] == ["a"]


def used_tokens(account: Account) -> float:
    """Returns which part of the tokens of a minute is used up."""
    assert account.tokens is not None
    return 1 - account.tokens.remaining(time.monotonic()) / account.tokens.limit


@pytest.mark.parametrize("limit", [100, 1_000_000, 10_000_000])
def test_a_reload_gives_nobody_a_fresh_burst(tmp_path: Path, limit: int) -> None:
    """Three quarters are used up before, and after it whatever the limit is."""
    accounts = Accounts(keys_of(tmp_path, '[a]\nkey="1"\ntokens_per_minute=1000000'))
    account = accounts.find("Bearer 1")
    assert account is not None
    TokenCharge(account, 750_000)
    for _ in range(3):
        accounts.set_keys(keys_of(tmp_path, f'[a]\nkey="1"\ntokens_per_minute={limit}'))
        assert accounts.find("Bearer 1") is account
        assert 0.70 < used_tokens(account) <= 0.76
    with pytest.raises(RateLimitError, match=f"{limit} tokens a minute"):
        TokenCharge(account, limit // 2)


@pytest.mark.parametrize("limit", [100, 1_000_000, 10_000_000])
def test_what_was_reserved_before_a_reload_is_given_back(tmp_path: Path, limit: int) -> None:
    accounts = Accounts(keys_of(tmp_path, '[a]\nkey="1"\ntokens_per_minute=1000000'))
    account = accounts.find("Bearer 1")
    assert account is not None
    TokenCharge(account, 500_000)
    running = TokenCharge(account, 400_000)
    accounts.set_keys(keys_of(tmp_path, f'[a]\nkey="1"\ntokens_per_minute={limit}'))
    running.settle([])
    assert 0.45 < used_tokens(account) <= 0.51, "what the other request has used stays used"


def test_a_key_that_is_gone_for_a_while_is_remembered(tmp_path: Path) -> None:
    text = '[a]\nkey="1"\nrequests_per_minute=2\nmax_concurrent_requests=1\n'
    accounts = Accounts(keys_of(tmp_path, text))
    before = accounts.find("Bearer 1")
    assert before is not None
    with before.request():
        for _ in range(2):
            accounts.set_keys(keys_of(tmp_path, '[b]\nkey="2"'))
            assert accounts.find("Bearer 1") is None
        accounts.set_keys(keys_of(tmp_path, text))
        assert accounts.find("Bearer 1") is before
        with pytest.raises(RateLimitError, match="at a time"), before.request():
            pass
    assert before.headers()["x-ratelimit-remaining-requests"] == "1"


# ---------------------------------------------------------------- over a socket


async def post(http: aiohttp.ClientSession, key: str) -> tuple[int, dict[str, str], Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with http.post("/v1/completions", headers=headers, data=b"{") as response:
        return response.status, dict(response.headers), await response.json()


async def test_what_is_beyond_a_limit_is_answered_429(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text('[few]\nkey = "few"\nrequests_per_minute = 2\n[many]\nkey = "many"\n')
    async with serve(api_keys=str(file)) as (_, url), aiohttp.ClientSession(url) as http:
        for left in ("1", "0"):
            status, headers, _ = await post(http, "few")
            assert status == 400, "the body is looked at"
            assert headers["x-ratelimit-limit-requests"] == "2"
            assert headers["x-ratelimit-remaining-requests"] == left
            assert headers["x-ratelimit-reset-requests"].endswith("s")
            assert "x-ratelimit-limit-tokens" not in headers
        status, headers, body = await post(http, "few")
        assert status == 429
        assert 1 <= int(headers["Retry-After"]) <= 30
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert body["error"].pop("message").startswith("the limit of 2 requests a minute")
        assert body["error"] == {"type": "requests", "param": None, "code": "rate_limit_exceeded"}
        status, headers, _ = await post(http, "many")
        assert status == 400
        assert not any(name.lower().startswith("x-ratelimit") for name in headers)
        async with http.get("/version", headers={"Authorization": "Bearer few"}) as response:
            assert response.status == 200, "GET requests do not count"


async def test_keys_are_read_again_and_a_broken_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aioinfer")
    file = tmp_path / "keys"
    file.write_text('[x]\nkey = "old"\n')
    server = make_server(api_keys=str(file))
    async with aiohttp.ClientSession(await server.start()) as http:
        assert (await post(http, "old"))[0] == 400
        file.write_text('[y]\nkey = "new"\n[x]\nkey = sk-secret\n')
        await server.reload_keys()
        assert (await post(http, "old"))[0] == 400
        assert (await post(http, "new"))[0] == 401
        file.write_text('[x]\nkey = "new"\n')
        await server.reload_keys()
        assert (await post(http, "old"))[0] == 401
        assert (await post(http, "new"))[0] == 400
    await server.close()
    own = [record for record in caplog.records if record.name == "aioinfer.api.http.limits"]
    lines = [record.getMessage() for record in own]
    assert len(lines) == 2
    assert lines[0].startswith("the API keys stay as they were: server.api_keys")
    assert lines[1] == "the API keys were read again: 1 names"
    assert "secret" not in caplog.text
