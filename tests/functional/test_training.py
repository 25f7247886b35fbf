"""What a trainer asks of the server: sleep, new weights, their version in answers, and token ids
with log-probabilities."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.torch import load_file

from tests.executor_runs import tiny_llama
from tests.functional.conftest import Served, serve
from tests.trainer_group import broadcast_file
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

ADMIN = {"Authorization": "Bearer admin-key"}
BODY = {"prompt": [5, 9, 13], "max_tokens": 20, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest_asyncio.fixture(loop_scope="session")
async def trained(folder: Path) -> AsyncIterator[Served]:
    settings = {
        "model.path": str(folder), "model.tokenizer": "none", "model.max_model_len": 120,
        "parallel.executor": "inline", "server.admin_key": "admin-key",
    }  # fmt: skip
    async with serve(**settings) as served:
        yield served


async def call(served: Served, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    async with served.http.post(path, json=body or None, headers=ADMIN) as response:
        reply = await response.json()
        assert response.status == status, reply
        return reply


async def complete(served: Served, **more: Any) -> tuple[dict[str, Any], str]:
    async with served.http.post("/v1/completions", json=BODY | more) as response:
        assert response.status == 200, await response.text()
        return await response.json(), response.headers["X-Weight-Version"]


async def test_requests_wait_while_the_model_sleeps(trained: Served) -> None:
    before, _ = await complete(trained, return_token_ids=True)
    assert await trained.get("/is_sleeping", headers=ADMIN) == {"is_sleeping": False}
    assert await call(trained, "/sleep?level=1&mode=wait") == {"status": "sleeping"}
    assert await trained.get("/is_sleeping", headers=ADMIN) == {"is_sleeping": True}
    assert await trained.get("/is_paused", headers=ADMIN) == {"is_paused": True}
    async with trained.http.get("/health/ready") as response:
        assert (response.status, "sleeps" in await response.text()) == (503, True)
    waiting = asyncio.ensure_future(complete(trained, return_token_ids=True))
    await until(lambda: trained.engine.scheduler.num_waiting == 1)
    assert await call(trained, "/wake_up?tags=weights") == {"status": "sleeping"}
    assert await call(trained, "/wake_up?tags=kv_cache") == {"status": "awake"}
    assert (await waiting)[0]["choices"] == before["choices"]
    for path in ("/sleep?level=3", "/sleep?mode=now", "/wake_up?tags=all", "/pause?clear_cache=2"):
        await call(trained, path, 400)


async def test_after_abort_the_client_is_told_when_to_come_again(trained: Served) -> None:
    await call(trained, "/sleep?mode=abort")
    async with trained.http.post("/v1/completions", json=BODY) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
    await call(trained, "/wake_up")
    await complete(trained)


async def test_answers_name_the_weights(trained: Served, other: Path) -> None:
    first, version = await complete(trained, return_token_ids=True)
    assert version == "0"
    assert "weight_version" not in first["usage"]
    reply = await call(
        trained, "/update_weights_from_disk", model_path=str(other), weight_version="step-3"
    )
    assert (reply["success"], reply["weight_version"]) == (True, "step-3")
    second, version = await complete(trained, return_token_ids=True)
    assert (version, second["usage"]["weight_version"]) == ("step-3", "step-3")
    assert second["choices"][0]["token_ids"] != first["choices"][0]["token_ids"]
    await call(trained, "/update_weight_version", new_version="best")
    for broken in ("a\n", "\0b"):  # no response could have it as a header
        error = await call(trained, "/update_weight_version", 400, new_version=broken)
        assert "must be a string without control characters, not" in error["error"]["message"]
    assert await trained.get("/weight_info", headers=ADMIN) == {"weight_version": "best"}
    error = await call(trained, "/update_weights_from_disk", 400, model_path="/nowhere")
    assert error["error"]["param"] == "model_path"
    assert (await complete(trained))[1] == "best"


async def test_a_stream_over_an_update_names_both(trained: Served, other: Path) -> None:
    options = {"stream_options": {"include_usage": True}, "return_token_ids": True}
    streaming = asyncio.ensure_future(
        trained.stream("/v1/completions", **BODY | {"max_tokens": 100}, **options)
    )
    scheduler = trained.engine.scheduler
    await until(lambda: scheduler.running and scheduler.running[0].num_output > 3)
    await call(trained, "/update_weights_from_disk", model_path=str(other))
    *events, last = await streaming
    tokens = [
        token
        for event in events
        for each in event["choices"]
        for token in each.get("token_ids", ())
    ]
    assert len(tokens) == 100
    assert last["usage"]["weight_versions"] == ["0", "1"]


async def test_token_ids_come_with_their_log_probabilities(trained: Served) -> None:
    reply, _ = await complete(
        trained, logprobs=0, return_token_ids=True, return_tokens_as_token_ids=True
    )
    (choice,) = reply["choices"]
    assert choice["prompt_token_ids"] == BODY["prompt"]
    assert len(choice["token_ids"]) == 20
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])


async def test_a_trainer_brings_tensors(trained: Served, other: Path) -> None:
    """Over a process group, which a trainer forms in this process; what is wrong is refused before
    anything is waited for."""
    before, _ = await complete(trained, return_token_ids=True)
    tensors = load_file(other / "model.safetensors")
    info: dict[str, Any] = {
        "names": [*tensors],
        "dtype_names": ["float32"] * len(tensors),
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
    await call(trained, "/update_weights", 409, update_info=info)
    await call(trained, "/start_weight_update")
    error = await call(trained, "/update_weights", 400, update_info=info)
    assert "no group was joined" in error["error"]["message"]
    await call(trained, "/resume", 409)
    await call(trained, "/finish_weight_update")  # without a body
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
    error = await call(
        trained, "/init_weight_transfer_engine", 400, init_info=group | {"timeout_s": 0.5}
    )
    assert "did not form" in error["error"]["message"]

    trainer = asyncio.create_task(
        asyncio.to_thread(broadcast_file, port, 2, other / "model.safetensors")
    )
    await call(trained, "/init_weight_transfer_engine", init_info=group | {"timeout_s": 20})
    await call(trained, "/start_weight_update")
    wrong = info | {"shapes": [[2], *info["shapes"][1:]]}
    error = await call(trained, "/update_weights", 400, update_info=wrong)
    assert "has the shape" in error["error"]["message"]
    await call(trained, "/update_weights", update_info=info)
    handles = [{"GPU": {"storage": ""}}] * len(tensors)
    error = await call(trained, "/update_weights", 400, update_info=info | {"ipc_handles": handles})
    assert "need workers on that GPU" in error["error"]["message"]
    reply = await call(trained, "/finish_weight_update", weight_version="step-1")
    assert reply["weight_version"] == "step-1"
    await trainer
    after, version = await complete(trained, return_token_ids=True)
    assert version == "step-1"
    assert after["choices"][0]["token_ids"] != before["choices"][0]["token_ids"]
    await call(trained, "/update_weights_from_disk", model_path=str(other))
    same, _ = await complete(trained, return_token_ids=True)
    assert same["choices"] == after["choices"]


async def test_methods_of_workers(trained: Served) -> None:
    error = await call(trained, "/collective_rpc", 400, method="sleep")
    assert "parallel.worker_extension has no method 'sleep'" in error["error"]["message"]
