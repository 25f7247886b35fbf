"""The bound of the queue by its numbers, and deadlines of requests that have not been submitted
yet."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from aioinfer.api.admission import AdmissionControl, Deadline
from aioinfer.config import load_config
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import RequestOutput
from aioinfer.engine.recovery import EngineState
from aioinfer.errors import OverloadedError, RequestError
from aioinfer.sampling_params import SamplingParams
from tests.test_server import make_server


def admission(
    *,
    slots: int = 4,
    running: int = 4,
    waiting: int = 0,
    waiting_of: Mapping[str, int] | None = None,
    engines: int = 1,
    **limits: Any,
) -> AdmissionControl:
    settings = {"model.path": "none", "scheduler.max_num_seqs": slots} | {
        f"scheduler.{name}": value for name, value in limits.items()
    }
    scheduler = SimpleNamespace(
        num_free_slots=slots - running,
        num_waiting=waiting,
        num_waiting_of=lambda flow: (waiting_of or {}).get(flow, 0),
    )
    engine = SimpleNamespace(scheduler=scheduler, state=EngineState.SERVING)
    return AdmissionControl(
        cast(
            Frontend,
            SimpleNamespace(config=load_config(None, settings), engines=[engine] * engines),
        )
    )


@pytest.mark.parametrize(
    ("running", "waiting", "bound", "room"),
    [
        (4, 0, 3, 3), (4, 2, 3, 1), (4, 3, 3, 0), (4, 9, 3, 0), (2, 0, 3, 5), (2, 1, 3, 4),
        (1, 0, 0, 3), (4, 0, 0, 0),
    ],
)  # fmt: skip
def test_free_slots_are_room_beyond_the_bound(
    running: int, waiting: int, bound: int, room: int
) -> None:
    tested = admission(running=running, waiting=waiting, max_waiting_requests=bound)
    if room:
        tested.check(room)
    with pytest.raises(OverloadedError, match=f"{waiting} requests wait") as caught:
        tested.check(room + 1)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)


def test_the_bound_is_of_all_engines_together() -> None:
    admission(engines=3, running=2, waiting=2, max_waiting_requests=10).check(10)
    with pytest.raises(OverloadedError, match="6 requests wait"):
        admission(engines=3, running=2, waiting=2, max_waiting_requests=10).check(11)


def test_without_bounds_all_may_wait() -> None:
    admission(waiting=10**6, max_waiting_requests=None).check(10**6)
    with pytest.raises(OverloadedError):
        admission(waiting=4096).check(1)


def test_what_never_has_room_is_not_asked_to_come_again() -> None:
    with pytest.raises(
        RequestError, match="20 prompts or sequences are more than the 18"
    ) as caught:
        admission(engines=2, max_waiting_requests=10).check(20)
    assert caught.value.status == 400


def test_what_is_on_its_way_counts_once() -> None:
    tested = admission(max_waiting_requests=6)
    with tested.reserve(4) as use:
        assert tested.coming == 4
        with pytest.raises(OverloadedError), tested.reserve(3):
            pass
        use(2)
        assert tested.coming == 2
    assert tested.coming == 0
    with pytest.raises(ZeroDivisionError), tested.reserve(1):
        _ = 1 / 0
    assert tested.coming == 0


@pytest.mark.parametrize(
    ("waiting", "own", "room"),
    [(0, 0, 100), (40, 0, 60), (40, 40, 20), (50, 50, 0), (60, 30, 10), (100, 0, 0)],
)
def test_one_of_several_keys_leaves_as_much_room_as_it_takes(
    waiting: int, own: int, room: int
) -> None:
    tested = admission(waiting=waiting, waiting_of={"a": own}, max_waiting_requests=100)
    if room:
        tested.check(room, flow="a")
    with pytest.raises(OverloadedError):
        tested.check(room + 1, flow="a")


def test_a_key_may_take_all_free_slots() -> None:
    tested = admission(running=0, max_waiting_requests=0)
    with tested.reserve(3, "a"):
        assert tested.coming_of["a"] == 3
        tested.check(1, flow="a")
        with pytest.raises(OverloadedError):
            tested.check(2, flow="a")
    assert tested.coming_of["a"] == 0


# ---------------------------------------------------------------- deadlines


@pytest.mark.parametrize(
    ("server", "request_s", "expected"),
    [(None, None, None), (5, None, 5), (None, 5, 5), (5, 9, 5), (9, 5, 5), (5, 0.001, 0.001)],
)
async def test_a_request_may_shorten_its_deadline(
    server: float | None, request_s: float | None, expected: float | None
) -> None:
    began = asyncio.get_running_loop().time()
    deadline = Deadline(server)
    async with deadline.guard:
        deadline.shorten(request_s)
        when = deadline.guard.when()
        assert (
            when is expected
            if expected is None
            else when is not None and 0 <= when - began - expected < 0.5
        )


async def test_generations_end_at_the_deadline_and_their_handler_does_not() -> None:
    aborted: list[RequestOutput] = []
    outputs = [RequestOutput("x", [1], SamplingParams(), aborted.append) for _ in range(2)]
    deadline = Deadline(0.05)
    async with deadline.guard:
        deadline.hand_over(outputs)
        for output in outputs:
            with pytest.raises(RequestError, match="longer than it may") as caught:
                await anext(output)
            assert (caught.value.status, caught.value.code) == (504, "timeout")
        await asyncio.sleep(0.05)
    assert aborted == outputs
    assert not deadline.guard.expired()


async def test_a_deadline_can_be_called_off() -> None:
    output = RequestOutput("x", [1], SamplingParams(), lambda _: None)
    deadline = Deadline(0.01)
    async with deadline.guard:
        deadline.hand_over([output])()
        await asyncio.sleep(0.03)
    assert not output.is_finished


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def endless() -> Any:
        yield b'{"prompt": "'
        await asyncio.Event().wait()

    server = make_server(request_timeout_s=0.1)
    async with (
        aiohttp.ClientSession(await server.start()) as http,
        http.post(
            "/tokenize", data=endless(), headers={"Content-Type": "application/json"}
        ) as response,
    ):
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "timeout"
    await asyncio.wait_for(server.drain(), 5)
    await server.close()
