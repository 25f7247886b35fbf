"""Ranks on two hosts, one of them behind a stream and an agent, without a cluster: both hosts are
this machine, and the agent runs on the loop of the test. What they answer, and how the loss of one
is reported."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from torch.distributed import TCPStore

from aioinfer.errors import ConfigError
from aioinfer.executor import remote_host
from aioinfer.executor.host_agent import HostAgent
from aioinfer.executor.host_ranks import HostRanks
from aioinfer.executor.inline import InlineExecutor
from aioinfer.executor.remote_host import RemoteHost
from aioinfer.executor.worker_executor import WorkerExecutor, WorkerHost
from aioinfer.ipc.host_link import HostListener
from aioinfer.ipc.masks import ConstrainedRows
from aioinfer.ipc.placement import place_on_hosts
from tests.executor_runs import Run, broken_plan, decode_plan, greedy, tiny_config, tiny_llama
from tests.test_multiprocess import workers
from tests.tiny_models import tiny_model
from tests.waiting import until

pytestmark = [pytest.mark.extended, pytest.mark.slow]

SECRET = secrets.token_bytes(32)


def own_address() -> str:
    """Returns an address of this machine other than a loopback one: ranks that meet there count as
    ranks of several hosts."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family.name == "AF_INET" and not address.address.startswith("127."):
                return address.address
    pytest.skip("this machine has no network interface")


class TwoHosts(WorkerExecutor):
    """Rank 0 on this host, rank 1 on another."""

    agents: list[asyncio.Task[None]]

    async def _make_hosts(self) -> list[WorkerHost]:
        address = own_address()
        self.store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        places = place_on_hosts(self.groups, [0, 1], (address, self.store.port))
        listener = HostListener("127.0.0.1", SECRET, 1)
        self.agent = HostAgent(self.config, self._folder, 0, places[1:])
        self.task = asyncio.create_task(self.agent.run(listener.address, SECRET, 0))
        self.ranks = HostRanks(self.config, self._folder, 0, places[:1], self.heartbeat, self)
        (connection,) = (await listener.wait()).values()
        return [self.ranks, RemoteHost("the other host", [1], connection, self.heartbeat, self)]

    async def _release(self) -> None:
        await self.task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
async def run(folder: Path) -> AsyncIterator[Run]:
    run = Run(TwoHosts(tiny_config(folder, tensor_parallel_size=2), folder, 0))
    yield run
    await run.executor.shutdown()
    assert workers() == []


def constrained_plan(step_id: int, position: int) -> Any:
    plan = decode_plan(step_id, position)
    plan.sections = [ConstrainedRows(np.zeros(1, np.int32))]
    return plan


async def constrained(run: Run) -> list[int]:
    """Returns nine tokens after `PROMPT`, of which the eighth is the only one that a mask allows,
    and shuts down."""
    tokens = await greedy(run, 7)
    section = ConstrainedRows(np.zeros(1, np.int32))  # by itself: no feature takes it
    run.executor.post_section(section)
    run.executor.post(constrained_plan(7, 12))
    run.executor.post_section(section)
    masks = run.executor.masks_of(7)
    masks[0] = 0
    masks[0, 1] = 1 << 9  # token 41
    run.executor.post_masks(7)
    run.executor.post(decode_plan(8, 13))
    await run.wait_for_results(9)
    await run.executor.shutdown()
    return tokens + [int(result.tokens[0]) for result in run.results[7:]]


@pytest.mark.sample
async def test_two_hosts_give_what_one_gives(folder: Path, run: Run) -> None:
    """Also under a mask: the ranks of both hosts sample the token that it allows, and go on with
    that."""
    expected: list[list[int]] = []
    for each in (Run(InlineExecutor(tiny_config(folder, executor="inline"), folder)), run):
        await each.start()
        expected.append(await constrained(each))
    assert expected[0] == expected[1]
    assert expected[0][7] == 41
    assert run.failures == []


async def test_the_last_stage_on_another_host(tmp_path: Path) -> None:
    """Hidden states, sampled tokens, masks and the results cross between hosts."""
    folder = tiny_model("qwen2", tmp_path / "qwen2", tie_word_embeddings=True)
    staged = tiny_config(folder, **{"parallel.pipeline_parallel_size": 2})
    expected: list[list[int]] = []
    for each in (
        Run(InlineExecutor(tiny_config(folder, executor="inline"), folder)),
        Run(TwoHosts(staged, folder, 0)),
    ):
        report = await each.start()
        expected.append(await constrained(each))
        assert each.failures == []
    assert [list(layers) for layers, _ in report.stages] == [[0], [1]]
    assert expected[0] == expected[1]
    assert expected[0][7] == 41


async def test_what_fails_on_the_other_host_is_named(run: Run) -> None:
    """The rank there, not the one here that waits for it; whatever ends it."""
    await run.start()
    await greedy(run, 3)
    executor: Any = run.executor
    (remote,) = executor.agent._ranks._processes
    await until(lambda: "waiting for a plan after step 2" in executor.heartbeat.describe(1))
    began = time.monotonic()
    remote.kill()
    message = await run.wait_for_failure()
    assert time.monotonic() - began < 5
    assert message.startswith(
        "worker 1 on the other host was killed by SIGKILL: rank 1 was waiting"
    )
    assert "after step 2" in message
    await until(lambda: workers() == [])


async def test_an_error_of_the_other_host_arrives_with_its_trace(run: Run) -> None:
    await run.start()
    run.executor.post(broken_plan(0))
    message = await run.wait_for_failure()
    assert "IndexError" in message


async def test_errors_of_the_start_arrive_as_they_are(folder: Path) -> None:
    config = tiny_config(folder, tensor_parallel_size=2, **{"model.max_model_len": 500})
    with pytest.raises(ConfigError, match=r"model\.max_model_len = 500 needs 125 KV blocks"):
        await Run(TwoHosts(config, folder, 0)).start()
    assert workers() == []


async def test_a_silent_host_is_lost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_host, "LOST_AFTER_S", 2.0)
    await run.start()
    await greedy(run, 2)
    executor: Any = run.executor
    await until(lambda: "waiting for a plan after step 1" in executor.heartbeat.describe(1))
    monkeypatch.setattr(executor.agent._link, "send", lambda *frame: None)
    message = await run.wait_for_failure()
    assert message.startswith("the other host with worker 1 was lost, nothing has come from it for")
    assert "rank 1 was waiting for a plan after step 1" in message


async def test_a_rank_that_is_stopped_there_is_named(run: Run) -> None:
    await run.start()
    await greedy(run, 2)
    executor: Any = run.executor
    ranks = executor.agent._ranks
    ranks.monitor.stopped_after_s = 1.0
    (remote,) = ranks._processes
    psutil.Process(remote.pid).suspend()
    run.executor.post(decode_plan(2, 7))
    message = await run.wait_for_failure()
    assert message.startswith("the other host: worker 1 has not run for")
    assert "it is stopped, as by SIGSTOP" in message
