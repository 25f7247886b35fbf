"""Workers on the nodes of Ray clusters, all of whose nodes are this machine: where ranks are
placed, what they answer, how a lost node is reported and replaced, and that nothing of Ray is
left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import until

pytestmark = [pytest.mark.extended, pytest.mark.slow]

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from aioinfer import AsyncLLM, SamplingParams  # noqa: E402
from aioinfer.engine.engine import EngineState  # noqa: E402
from aioinfer.engine.frontend import Frontend  # noqa: E402
from aioinfer.errors import ConfigError, EngineDeadError  # noqa: E402
from aioinfer.executor import ray_cluster  # noqa: E402
from aioinfer.executor.inline import InlineExecutor  # noqa: E402
from aioinfer.executor.ray import RayExecutor  # noqa: E402
from aioinfer.llm import LLM  # noqa: E402
from tests.executor_runs import PROMPT, Run, greedy, tiny_config, tiny_llama  # noqa: E402
from tests.functional.conftest import SMOLLM2  # noqa: E402
from tests.tiny_models import tiny_model  # noqa: E402
from tests.worker_processes import is_worker, living  # noqa: E402

GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
Processes = set[psutil.Process]
PARTS = ("raylet", "gcs_server", "ray::", "ray/_private")


def descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def left_over(others: set[psutil.Process]) -> list[str]:
    """Returns the command lines of Ray's processes and of workers below this process, without those
    of `others`."""
    lines = []
    for child in descendants() - others:
        try:
            line = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        if is_worker(child) or any(part in line for part in PARTS):
            lines.append(line)
    return lines


def wait_until_nothing_is_left(others: set[psutil.Process]) -> None:
    deadline = time.monotonic() + 30
    while (lines := left_over(others)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert lines == []


@contextmanager
def cluster_of(*num_cpus: int) -> Iterator[Cluster]:
    """A cluster with a node for each number; this process is on the first."""
    others = descendants()
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": num_cpus[0], "include_dashboard": False}
    )
    try:
        for number in num_cpus[1:]:
            cluster.add_node(num_cpus=number)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        wait_until_nothing_is_left(others)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """Two nodes of one and two places."""
    with cluster_of(1, 2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray finds none by itself; what a test sets is undone behind it."""
    monkeypatch.setenv("RAY_ADDRESS", "local")


def settings(cluster: Cluster, ranks: int, **more: Any) -> dict[str, Any]:
    os.environ["RAY_ADDRESS"] = cluster.address
    return {
        "executor": "ray",
        "tensor_parallel_size": ranks,
        "model.tokenizer": "none",
    } | more


async def expected_tokens(folder: Path, count: int) -> list[int]:
    run = Run(InlineExecutor(tiny_config(folder, executor="inline"), folder))
    await run.start()
    tokens = await greedy(run, count)
    await run.executor.shutdown()
    return tokens


def nodes_of(executor: Any) -> list[list[int]]:
    return [node.ranks for node in executor._placement.nodes]


ENDLESS = """
import sys
from aioinfer import LLM, SamplingParams
settings = {"parallel.executor": "ray", "parallel.tensor_parallel_size": 2, "cache.num_blocks": 64,
            "parallel.device": "cpu", "parallel.cpu_threads": 1, "model.tokenizer": "none"}
llm = LLM(sys.argv[1], settings=settings, progress=False)
print("started", flush=True)
while True:
    llm.generate([[5, 3, 17]], SamplingParams(max_tokens=100, ignore_eos=True))
"""


def wait_until_ended(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    """Some may be left that have ended and whose new parent has not asked for their status."""
    deadline = time.monotonic() + timeout_s
    while (left := [process.pid for process in living(processes)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.2)
    assert left == []


@pytest.fixture(scope="module")
def killed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Processes, Processes]:
    """The processes of a program that was killed: its ranks and most of Ray, and agents of Ray."""
    root = Path(__file__).parents[1]
    script = tmp_path_factory.mktemp("script") / "endless.py"
    script.write_text(ENDLESS)
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "RAY_ADDRESS": "local"},
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        try:
            assert program.stdout is not None
            assert any(line == "started\n" for line in program.stdout)
            children = psutil.Process(program.pid).children(recursive=True)
            lines = [" ".join(child.cmdline()) for child in children]
            assert all(any(part in line for line in lines) for part in ("raylet", "gcs_server"))
        finally:
            program.kill()
    agents = {child for child, line in zip(children, lines, strict=True) if "Agent" in line}
    return set(children) - agents, agents


@pytest.mark.timeout(300)
def test_a_program_that_is_killed(killed: tuple[Processes, Processes]) -> None:
    """Its ranks and the Ray that it has started end at once, but for two agents of Ray's."""
    wait_until_ended(killed[0], 30)


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (2, 1)])
async def test_a_group_stays_within_a_node(
    pair: Cluster, folder: Path, ranks: int, nodes: int
) -> None:
    """Also if that is not the driver's."""
    run = Run(RayExecutor(tiny_config(folder, **settings(pair, ranks)), folder))
    await run.start()
    assert nodes_of(run.executor) == [list(range(ranks))]
    assert await greedy(run, 7) == await expected_tokens(folder, 7)
    await run.executor.shutdown()
    assert run.failures == []


@pytest.mark.sample
async def test_a_group_over_two_nodes(tmp_path: Path) -> None:
    """Where no node has room for it, of two stages and of two tensor-parallel ranks; the driver's
    node has the first rank."""
    folder = tiny_model("qwen2", tmp_path / "qwen2", tie_word_embeddings=True)
    expected = await expected_tokens(folder, 7)
    with cluster_of(1, 1) as cluster:
        for more in ({"parallel.pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}):
            config = tiny_config(folder, **settings(cluster, 1) | more)
            run = Run(RayExecutor(config, folder))
            await run.start()
            assert nodes_of(run.executor) == [[0], [1]]
            assert await greedy(run, 7) == expected
            own = ray_cluster.own_node()[0]
            assert run.executor._placement.nodes[0].node_id == own  # type: ignore[attr-defined]
            await run.executor.shutdown()
            assert run.failures == []


async def test_real_weights_over_two_nodes(pair: Cluster) -> None:
    """And masks, which travel to the other node."""
    prompts = ["The capital of France is", "Two and two are"]
    params = [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=0, max_tokens=8, allowed_token_ids=[28, 33, 216]),
    ]
    common = {
        "cache.num_blocks": 64, "scheduler.max_num_seqs": 4, "parallel.cpu_threads": 1,
        "model.max_model_len": 256, "model.quantization": "none",
    }  # fmt: skip

    def tokens(**more: Any) -> list[list[int]]:
        given = {"parallel." + name: value for name, value in more.items()}
        with LLM(SMOLLM2, settings=common | given, progress=False) as llm:
            return [output.token_ids for output in llm.generate(prompts, params)]

    one = await asyncio.to_thread(tokens, executor="inline")
    os.environ["RAY_ADDRESS"] = pair.address
    three = await asyncio.to_thread(tokens, executor="ray", tensor_parallel_size=3)
    assert one == three
    assert set(one[1]) <= {28, 33, 216}


async def test_a_node_is_lost_and_another_one_joins(tmp_path: Path) -> None:
    """It is named within ten seconds; the stream goes on with the same tokens once there is room
    again."""
    folder = tiny_llama(tmp_path)
    with cluster_of(1, 1) as cluster:
        (node,) = cluster.worker_nodes
        frontend = await Frontend.launch(tiny_config(folder, **settings(cluster, 2)))
        llm, engine = AsyncLLM(frontend), frontend.engines[0]
        whole = [list(o.token_ids) async for o in await llm.add_request(PROMPT, GREEDY)][-1]
        tokens: list[int] = []
        async for output in await llm.add_request(PROMPT, GREEDY):
            if not tokens:
                cluster.remove_node(node, allow_graceful=False)
                lost = time.monotonic()
                asyncio.get_running_loop().call_later(12, lambda: cluster.add_node(num_cpus=1))
                await until(lambda: engine.state is not EngineState.SERVING)
                assert time.monotonic() - lost < 10
            tokens = list(output.token_ids)
        assert tokens == whole
        assert len(tokens) == 100
        # all tokens may have come before the node was lost
        await until(lambda: engine.metrics.restarts >= 1)
        await frontend.close()


async def test_no_room(pair: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "PLACEMENT_TIMEOUT_S", 2.0)
    config = tiny_config(folder, **settings(pair, 2, **{"parallel.cpu_threads": 4}))
    with pytest.raises(EngineDeadError, match="no room for 2 ranks of 4 CPU; free are 3 CPU"):
        await Run(RayExecutor(config, folder)).start()


async def test_a_start_that_is_cancelled(pair: Cluster, folder: Path) -> None:
    """While it waits for room; what was reserved is given back."""
    config = tiny_config(folder, **settings(pair, 2, **{"parallel.cpu_threads": 4}))
    run = Run(RayExecutor(config, folder))
    start = asyncio.create_task(run.start())
    await asyncio.sleep(4)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not ray.is_initialized()


async def test_a_cluster_that_is_not_there(folder: Path) -> None:
    os.environ["RAY_ADDRESS"] = "ray://127.0.0.1:1"
    config = tiny_config(folder, executor="ray")
    with pytest.raises(ConfigError, match="has to run on a node"):
        await Run(RayExecutor(config, folder)).start()


async def test_a_ray_of_its_own(folder: Path) -> None:
    """It ends with the executor."""
    others = descendants()
    run = Run(RayExecutor(tiny_config(folder, executor="ray", tensor_parallel_size=2), folder))
    await run.start()
    assert await greedy(run, 7) == await expected_tokens(folder, 7)
    await run.executor.shutdown()
    assert not ray.is_initialized()
    await asyncio.to_thread(wait_until_nothing_is_left, others)


def test_parts_of_a_group() -> None:
    assert ray_cluster.part_sizes(8) == [8, 4, 2, 1]
    assert ray_cluster.part_sizes(3) == [3, 1]
    assert ray_cluster.part_sizes(1) == [1]


@pytest.mark.timeout(300)
def test_agents_of_a_killed_program_end(killed: tuple[Processes, Processes]) -> None:
    """They first try for a minute to report that the rest is gone; so this is the last test."""
    wait_until_ended(killed[1], 150)
