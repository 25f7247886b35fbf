"""Files and batches over the socket, with the official client; and that batches outlive the
server."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from aioinfer.api.batch import batches, objects, store
from aioinfer.errors import ConfigError
from tests.functional.conftest import Served, openai_client, serve
from tests.waiting import until

pytestmark = [pytest.mark.extended, pytest.mark.asyncio(loop_scope="session")]

SETTINGS = {"parallel.executor": "inline"}


@pytest.fixture(scope="module", autouse=True)
def four_at_a_time() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "CONCURRENCY", 4)
        yield


def line(number: int, **body: Any) -> dict[str, Any]:
    """A request of a completion, greedy and of its own length."""
    usual = {"prompt": f"{number} plus {number} is", "temperature": 0, "max_tokens": 1 + number % 7}
    return {
        "custom_id": f"request-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": usual | body,
    }


def folder_of(served: Served) -> Path:
    """Returns the folder of a server's files."""
    return Path(served.frontend.config.server.files_folder)


def results_of(folder: Path, batch_id: str, kind: str) -> Path:
    """Returns where the results of a batch are."""
    return folder / "files" / f"file-{kind}-{batch_id.removeprefix('batch_')}.data"


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in lines)


def parse(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(item) for item in data.splitlines()]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def filed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("files") / "made"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "MAX_FILE_BYTES", 20_000)
        patch.setattr(store, "MAX_FILES", 12)
        patch.setattr(batches, "MAX_REQUESTS", 40)
        async with serve(**SETTINGS | {"server.files_folder": str(folder)}) as served:
            yield served


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(filed: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(filed) as client:
        yield client


async def upload(client: openai.AsyncOpenAI, data: bytes) -> str:
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(data), "in.jsonl", "batch")
    return file.id


async def begin(client: openai.AsyncOpenAI, data: bytes, **fields: Any) -> str:
    batch = await client.batches.create(
        **{  # type: ignore[arg-type]
            "input_file_id": await upload(client, data),
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"who": "test"},
        }
        | fields
    )
    assert batch.status == "validating"
    return batch.id


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(60):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "cancelled", "expired"):
                return batch
            await asyncio.sleep(0.02)


async def until_answered(client: openai.AsyncOpenAI, batch_id: str, count: int) -> None:
    async with asyncio.timeout(60):
        while (  # noqa: ASYNC110  # the API has no events
            await client.batches.retrieve(batch_id)
        ).request_counts.completed < count:
            await asyncio.sleep(0.02)


@pytest.mark.sample
async def test_a_batch_is_answered_in_order(filed: Served, client: openai.AsyncOpenAI) -> None:
    lines = [line(number) for number in range(12)]
    lines[7] = line(7, temperature=-1)
    batch = await ended(client, await begin(client, jsonl(lines)))
    counts = batch.request_counts
    assert batch.status == "completed"
    assert (counts.total, counts.completed, counts.failed) == (12, 11, 1)
    assert batch.metadata == {"who": "test"}
    results = parse((await client.files.content(batch.output_file_id)).content)
    assert [r["custom_id"] for r in results] == [r["custom_id"] for r in lines if r != lines[7]]
    for request, result in list(zip([r for r in lines if r != lines[7]], results, strict=True))[:4]:
        own = await filed.post("/v1/completions", **request["body"])
        assert result["error"] is None
        assert result["response"]["status_code"] == 200
        assert result["response"]["body"]["choices"] == own["choices"]
        assert result["response"]["request_id"] in result["response"]["body"]["id"]
    (bad,) = parse((await client.files.content(batch.error_file_id)).content)
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("request-7", 400)
    assert bad["response"]["body"]["error"]["param"] == "temperature"
    assert batch.id in [found.id async for found in client.batches.list(limit=1)]
    listed = [file.id async for file in client.files.list(purpose="batch_output")]
    assert {batch.output_file_id, batch.error_file_id} <= set(listed)
    for file_id in (batch.output_file_id, batch.error_file_id, batch.input_file_id):
        assert (await client.files.delete(file_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(batch.input_file_id)


async def test_a_batch_of_embeddings(filed: Served, client: openai.AsyncOpenAI) -> None:
    url, body = "/v1/embeddings", {"input": ["a river", "a stream"]}
    data = jsonl([{"custom_id": "1", "method": "POST", "url": url, "body": body}])
    file = await client.files.create(file=data, purpose="batch")
    created = await client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h"
    )
    batch = await ended(client, created.id)
    (result,) = parse((await client.files.content(batch.output_file_id)).content)
    vectors = [each["embedding"] for each in result["response"]["body"]["data"]]
    own = await filed.post(url, **body)
    for vector, expected in zip(vectors, own["data"], strict=True):
        assert vector == pytest.approx(expected["embedding"], abs=1e-4)


@pytest.mark.parametrize(
    ("data", "code", "place"),
    [
        (b"", "empty_file", 1),
        (jsonl([line(1)]) + b"\n{", "invalid_json_line", 3),
        (jsonl([line(1), line(2), line(1)]), "duplicate_custom_id", 3),
        (jsonl([line(1) | {"url": "/v1/chat/completions"}]), "invalid_url", 1),
        (jsonl([line(1) | {"method": "GET"}]), "invalid_method", 1),
        (jsonl([line(1, stream=True)]), "invalid_body", 1),
        (jsonl([line(number) for number in range(41)]), "too_many_requests", 41),
    ],
)
async def test_a_wrong_input_fails_as_a_whole(
    filed: Served, client: openai.AsyncOpenAI, data: bytes, code: str, place: int
) -> None:
    steps = filed.engine.scheduler.stats.steps
    batch = await ended(client, await begin(client, data))
    assert batch.status == "failed"
    assert [(fault.code, fault.line) for fault in batch.errors.data] == [(code, place)]
    assert filed.engine.scheduler.stats.steps == steps
    await client.files.delete(batch.input_file_id)


async def test_a_batch_can_be_cancelled(filed: Served, client: openai.AsyncOpenAI) -> None:
    lines = [line(number, max_tokens=200, ignore_eos=True) for number in range(30)]
    batch_id = await begin(client, jsonl(lines))
    scheduler = filed.engine.scheduler
    await until(lambda: len(scheduler.running) == 4)
    file_id = (await client.batches.retrieve(batch_id)).input_file_id
    with pytest.raises(openai.ConflictError):
        await client.files.delete(file_id)
    assert (await client.batches.cancel(batch_id)).status == "cancelling"
    batch = await ended(client, batch_id)
    assert batch.status == "cancelled"
    assert batch.request_counts.completed < 30
    await until(lambda: scheduler.is_idle)
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch_id)
    await client.files.delete(file_id)


FORM = "multipart/form-data; boundary=b"
PART = b"--b\r\nContent-Disposition: form-data; "


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b""),
        (f"{FORM}{'b' * 80}", b"--b\r\n"),
        (FORM, b""),
        (FORM, b"--b\r\n--b--\r\n"),
        (FORM, b"no boundary at all"),
        (FORM, PART + b'name="file"; filename="f"\r\n\r\nnever ends'),
        (FORM, PART + b'name="purpose"\r\n\r\n' + b"x" * 20_000 + b"\r\n--b--\r\n"),
        (FORM, PART + b'name="expires_after"\r\n\r\n1\r\n--b--\r\n'),
        (FORM, PART + b'name="purpose"\r\n\r\nbatch\r\n--b--\r\n'),
        (FORM, (PART + b'name="file"\r\nContent-Length: x\r\n\r\nx\r\n') * 2 + b"--b--\r\n"),
    ],
)
async def test_what_is_no_form_is_refused(filed: Served, kind: str, body: bytes) -> None:
    async with filed.http.post("/v1/files", data=body, headers={"Content-Type": kind}) as response:
        assert response.status == 400, await response.text()
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    folder = folder_of(filed) / "files"
    assert await asyncio.to_thread(lambda: list(folder.glob("*.new"))) == []


async def test_a_page_of_another_origin_cannot_upload(filed: Served) -> None:
    for origin, status in (("https://evil.example", 403), ("null", 403), (filed.url, 200)):
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"x", filename="x")
        async with filed.http.post("/v1/files", data=form, headers={"Origin": origin}) as response:
            assert response.status == status, await response.text()
            reply = await response.json()
    async with filed.http.delete(f"/v1/files/{reply['id']}") as response:
        assert response.status == 200


async def test_bounds_of_uploads(filed: Served, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await upload(client, b"x" * 20_001)
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=b"x", purpose="assistants")
    kept = [file.id async for file in client.files.list()]
    more = [await upload(client, b"x") for _ in range(12 - len(kept))]
    with pytest.raises(openai.BadRequestError, match="at most 12 files"):
        await upload(client, b"x")
    for file_id in more:
        await client.files.delete(file_id)
    assert [file.id async for file in client.files.list()] == kept


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Has writes beyond so many bytes of a file fail as on a full disk: in their middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [9_000, 100])  # the record of a file has more than 100 bytes
async def test_an_upload_for_which_the_disk_has_no_room_leaves_nothing(
    filed: Served, client: openai.AsyncOpenAI, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    files = folder_of(filed) / "files"
    before = await asyncio.to_thread(lambda: set(files.iterdir()))
    with files_of_at_most(room), pytest.raises(openai.APIStatusError) as caught:
        await client.files.create(file=b"x" * (10_000 if room > 100 else 10), purpose="batch")
    assert caught.value.status_code == 507
    assert await asyncio.to_thread(lambda: set(files.iterdir())) == before
    caplog.clear()


async def test_a_batch_whose_results_fill_the_disk_keeps_whole_lines(
    filed: Served, client: openai.AsyncOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [line(number) for number in range(30)]
    file_id = await upload(client, jsonl(lines))
    with files_of_at_most(5_000):
        created = await client.batches.create(
            input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
        )
        batch = await ended(client, created.id)
    assert batch.status == "failed"
    results = parse((await client.files.content(batch.output_file_id)).content)
    assert [r["custom_id"] for r in results] == [f"request-{n}" for n in range(len(results))]
    assert 0 < len(results) == batch.request_counts.completed < 30
    for each in (batch.output_file_id, file_id):
        assert (await client.files.delete(each)).deleted
    caplog.clear()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embedding"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"seconds": 1}}, "output_expires_after"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
    ],
)
async def test_what_a_batch_may_not_be(filed: Served, fields: dict[str, Any], param: str) -> None:
    body = {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"}
    reply = await filed.post(
        "/v1/batches", 404 if param == "input_file_id" else 400, **body | fields
    )
    assert reply["error"]["param"] == param


async def test_without_a_folder_there_are_none(served: Served) -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/files/x/content", "/v1/batches/x"):
        async with served.http.get(path) as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "not_enabled"


async def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    """The first server ends in the midst of a batch; the second computes only what is missing, and
    drops a line that was half written."""
    settings = SETTINGS | {"server.files_folder": str(tmp_path)}
    lines = [line(number, max_tokens=4, ignore_eos=True) for number in range(32)]
    async with (
        serve(**settings) as first,
        openai_client(first) as client,
    ):
        batch_id = await begin(client, jsonl(lines))
        await until_answered(client, batch_id, 8)
    partial = results_of(tmp_path, batch_id, "output")
    written = await asyncio.to_thread(partial.read_bytes)
    num_written = written.count(b"\n")
    assert 8 <= num_written < 32
    await asyncio.to_thread(partial.write_bytes, written + b'{"id": "half')
    async with serve(**settings) as second:
        async with openai_client(second) as client:
            batch = await ended(client, batch_id)
            data = (await client.files.content(batch.output_file_id)).content
        assert sum(second.engine.metrics.finished.values()) == 32 - num_written
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (32, 0)
    assert data.startswith(written)
    assert [result["custom_id"] for result in parse(data)] == [r["custom_id"] for r in lines]


@pytest.mark.sample
async def test_a_batch_that_cannot_be_read_fails(
    filed: Served, client: openai.AsyncOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    """Its input is gone from the disk."""
    file_id = await upload(client, jsonl([line(1)]))
    await asyncio.to_thread(folder_of(filed).joinpath("files", f"{file_id}.data").unlink)
    created = await client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
    )
    batch = await ended(client, created.id)
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert batch.failed_at is not None
    (fault,) = batch.errors.data
    assert fault.code == "server_error"
    assert "FileNotFoundError" in fault.message
    assert str(folder_of(filed)) not in fault.message
    assert (await client.files.delete(file_id)).deleted
    assert "has failed" in caplog.text
    caplog.clear()


async def test_a_batch_whose_results_cannot_be_written_fails(
    filed: Served, client: openai.AsyncOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    """What was answered before is kept, and its files can be deleted."""
    lines = [line(number) for number in range(30)] + [line(30, temperature=-1), line(31)]
    batch_id = await begin(client, jsonl(lines))
    await until_answered(client, batch_id, 1)
    # where the errors should be appended
    await asyncio.to_thread(results_of(folder_of(filed), batch_id, "error").mkdir)
    batch = await ended(client, batch_id)
    assert (batch.status, batch.error_file_id) == ("failed", None)
    assert "IsADirectoryError" in batch.errors.data[0].message
    results = parse((await client.files.content(batch.output_file_id)).content)
    answered = [f"request-{n}" for n in range(32) if n != 30]  # 31 may come at the same time as 30
    assert [r["custom_id"] for r in results] == answered[: len(results)]
    assert len(results) >= batch.request_counts.completed > 0
    for file_id in (batch.output_file_id, batch.input_file_id):
        assert (await client.files.delete(file_id)).deleted
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch_id)
    await until(lambda: filed.engine.scheduler.is_idle)
    caplog.clear()


async def test_a_batch_that_failed_on_a_full_disk_has_failed_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no room for the record of its failure either."""
    settings = SETTINGS | {"server.files_folder": str(tmp_path)}
    lines = [line(number, max_tokens=50, ignore_eos=True) for number in range(9)]
    for start in range(3):
        async with (
            serve(**settings) as served,
            openai_client(served) as client,
        ):
            if not start:
                batch_id = await begin(client, jsonl(lines))
                async with asyncio.timeout(60):
                    while (  # noqa: ASYNC110  # the API has no events
                        await client.batches.retrieve(batch_id)
                    ).status == "validating":
                        await asyncio.sleep(0.02)
                with files_of_at_most(100):
                    batch = await ended(client, batch_id)
                assert "failed without files" in caplog.text
                caplog.clear()
            else:
                batch = await client.batches.retrieve(batch_id)
                assert (await client.batches.list()).data == [batch]
            assert (batch.status, batch.output_file_id) == ("failed", None)
            assert batch.errors.data[0].code == "server_error"
            if start == 2:
                assert (await client.files.delete(batch.input_file_id)).deleted


async def test_what_a_start_finds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A batch that was being cancelled while the server ended is cancelled, one whose results were
    overwritten has failed, and an upload that did not end is gone, also where its content came to
    its end."""
    settings = SETTINGS | {"server.files_folder": str(tmp_path)}
    lines = [line(number, max_tokens=100, ignore_eos=True) for number in range(9)]
    async with (
        serve(**settings) as first,
        openai_client(first) as client,
    ):
        left, broken = [await begin(client, jsonl(lines)) for _ in range(2)]
        async with asyncio.timeout(60):
            for batch_id in (left, broken):
                while (  # noqa: ASYNC110  # the API has no events
                    await client.batches.retrieve(batch_id)
                ).status == "validating":
                    await asyncio.sleep(0.02)

    def change() -> None:
        place = tmp_path / "batches" / f"{left}.json"
        record = json.loads(place.read_bytes())
        assert record["batch"]["status"] == "in_progress"
        record["batch"]["status"] = "cancelling"
        place.write_text(json.dumps(record), "utf-8")
        results_of(tmp_path, broken, "output").write_text("no result\n", "utf-8")
        (tmp_path / "files" / "file-0.new").write_bytes(b"half of an upload")
        (tmp_path / "files" / "file-1.data").write_bytes(b"an upload without a record")

    await asyncio.to_thread(change)
    async with (
        serve(**settings) as second,
        openai_client(second) as client,
    ):
        found = [await ended(client, batch_id) for batch_id in (left, broken)]
        for batch in found:
            assert (await client.files.delete(batch.input_file_id)).deleted
    assert [batch.status for batch in found] == ["cancelled", "failed"]
    assert found[1].errors.data[0].code == "server_error"
    assert await asyncio.to_thread(lambda: list(tmp_path.rglob("*.new"))) == []
    assert not await asyncio.to_thread((tmp_path / "files" / "file-1.data").exists)
    caplog.clear()


async def test_a_damaged_record_ends_the_start_and_is_named(tmp_path: Path) -> None:
    def start() -> None:
        (tmp_path / "files").mkdir()
        (tmp_path / "files" / "file-1.json").write_text('{"owner": "anonymous", "fi', "utf-8")
        store.FileStore(tmp_path)

    with pytest.raises(ConfigError, match=r"files/file-1\.json is damaged"):
        await asyncio.to_thread(start)
