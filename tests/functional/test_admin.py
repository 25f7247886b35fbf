"""What acts on the whole server: who may do so, and what it does to requests that run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from functools import partial

import numpy as np
import pytest
import pytest_asyncio

from aioinfer.features.expert_load.planning import ExpertLoad
from aioinfer.features.expert_load.planning import Planning as ExpertReports
from aioinfer.features.expert_load.sections import ExpertTokens
from tests.functional.conftest import Served, serve
from tests.waiting import until

pytestmark = [pytest.mark.extended, pytest.mark.asyncio(loop_scope="session")]

COMPLETIONS = "/v1/completions"
STORY = {"prompt": "Once upon a time", "ignore_eos": True, "temperature": 0}
ADMIN = {"Authorization": "Bearer admin-key"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def administered() -> AsyncIterator[Served]:
    settings = {"parallel.executor": "inline", "server.admin_key": "admin-key"}
    async with serve(**settings) as served:
        yield served


async def admin(served: Served, path: str, status: int = 200, **body: object) -> dict[str, object]:
    return await served.post(path, status, headers=ADMIN, **body)


@pytest.mark.sample
@pytest.mark.parametrize(
    "path", ["/pause", "/resume", "/sleep", "/wake_up", "/abort", "/reset_prefix_cache"]
)
async def test_only_an_admin_key_opens_them(
    served: Served, administered: Served, path: str
) -> None:
    assert (await served.post(path, 403))["error"]["code"] == "no_admin_key"
    assert (await administered.post(path, 401))["error"]["code"] == "invalid_admin_key"
    assert not administered.frontend.control.is_paused


async def test_a_stream_pauses_and_goes_on_with_the_text_that_it_would_have_had(
    administered: Served,
) -> None:
    whole = await administered.complete(**STORY, max_tokens=60)
    streaming = asyncio.ensure_future(administered.stream(COMPLETIONS, **STORY, max_tokens=60))
    scheduler = administered.engine.scheduler
    await until(lambda: scheduler.running and scheduler.running[0].num_output > 3)
    assert await admin(administered, "/pause") == {"status": "paused"}
    await until(lambda: not scheduler.num_in_flight)
    known = scheduler.running[0].num_output
    assert known < 60
    waiting = asyncio.ensure_future(administered.complete(prompt="Hello", max_tokens=2))
    await until(lambda: scheduler.num_waiting == 1)
    await administered.get("/health/ready", 503)
    load = await administered.get("/load")
    counts = [load[name] for name in ("server_load", "running", "waiting", "paused")]
    assert counts == [2, 1, 1, True]
    await asyncio.sleep(0.2)
    assert scheduler.running[0].num_output == known
    assert not streaming.done()
    assert await admin(administered, "/resume") == {"status": "running"}
    events = await streaming
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
    assert (await waiting)["finish_reason"] == "length"
    await administered.get("/health/ready")


async def test_abort_ends_a_request_with_what_it_has(administered: Served) -> None:
    scheduler = administered.engine.scheduler
    headers = {"X-Request-Id": "to-be-ended"}
    body = {**STORY, "max_tokens": 400, "n": 2}
    posting = asyncio.ensure_future(administered.post(COMPLETIONS, headers=headers, **body))
    other = asyncio.ensure_future(administered.complete(**STORY, max_tokens=40))
    await until(lambda: len(scheduler.running) == 3 and scheduler.running[-1].num_output > 5)
    await admin(administered, "/abort", 404, request_id="to-be")
    await admin(administered, "/abort", 400)
    ended = await admin(administered, "/abort", request_id="cmpl-to-be-ended")
    assert ended == {"status": "aborted", "count": 1}
    choices = (await posting)["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]  # type: ignore[index]
    assert all(choice["text"] for choice in choices)
    assert (await other)["finish_reason"] == "length"
    await admin(administered, "/abort", 404, request_id="to-be-ended")
    await until(lambda: scheduler.is_idle)
    scheduler.check_integrity()


async def test_after_a_reset_a_prompt_is_computed_anew(administered: Served) -> None:
    body = {"prompt": "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 2, "max_tokens": 1}

    async def cached() -> int:
        reply = await administered.post(COMPLETIONS, **body)
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    await cached()
    assert await cached() > 0
    await admin(administered, "/reset_prefix_cache")
    assert await cached() == 0
    assert await cached() > 0
    administered.engine.scheduler.check_integrity()


async def test_what_the_server_says_of_itself(served: Served) -> None:
    card = await served.get("/v1/models/org/alias")
    assert (card["id"], card["parent"], card["max_model_len"]) == ("org/alias", None, 512)
    info = await served.get("/tokenizer_info")
    assert info["special_tokens"]["eos_token"] == "<|im_end|>"
    assert info["special_token_ids"]["eos_token"] == 2
    # where lm-eval's remote tokenizer looks for them
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", "<|im_start|>")
    assert "<|im_start|>" in info["chat_template"]


async def test_the_load_of_experts_and_a_placement_of_it(
    served: Served, administered: Served
) -> None:
    """Of reports as a worker sends them; a dense model, as this one is, has none of its own."""
    get = partial(administered.get, headers=ADMIN)
    await served.get("/experts/placement", 403)
    await administered.get("/experts/placement", 401)
    assert (await get("/experts/placement", 404))["error"]["code"] == "nothing_counted"
    async with administered.http.get("/metrics") as response:
        assert "expert" not in await response.text()
    reports = administered.engine.features.of(ExpertReports)
    places = np.array([[0, 1, 2, 3]], np.int32)
    tokens = np.array([[60, 10, 20, 30]], np.int32)
    reports.load.add(ExpertTokens(np.array([5], np.int32), places, places // 2, tokens), 0.0)
    try:
        placed = await get("/experts/placement?ranks=2&copies=2")
        assert placed == {"version": 1, "layers": {"5": [[0, 2, 3], [0, 1, 3]]}}
        for query in ("ranks=0", "ranks=x", "copies=-1", "ranks=7&copies=2"):
            error = (await get(f"/experts/placement?{query}", 400))["error"]
            assert error["param"] in query
        async with administered.http.get("/metrics") as response:
            text = await response.text()
        for name, more, value in (
            ("expert_tokens_total", "", 120.0),
            ("expert_rank_tokens_total", ',rank="0"', 70.0),
            ("expert_rank_tokens_total", ',rank="1"', 50.0),
            ("expert_imbalance", ',layer="5"', 2.0),
        ):
            lines = re.findall(rf"^aioinfer:{name}{{.*}} .*$", text, re.M)
            (line,) = (line for line in lines if more.strip(",") in line)
            assert line.endswith(f" {value}")
    finally:
        reports.load = ExpertLoad()
