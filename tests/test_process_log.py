"""Log lines: their two forms, that no text can forge one, and that nobody waits for who reads."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer import process_log
from aioinfer.process_log import FieldsMessage, JsonFormatter, LimitedLog, LogWriter, TextFormatter
from tests.waiting import until


def record(message: object, *args: object) -> logging.LogRecord:
    return logging.LogRecord("aioinfer.x", logging.INFO, "file", 1, message, args, None)


def test_fields_as_text() -> None:
    fields = {
        "id": "a b", "key": None, "path": "/v1", "number": 5, "ms": 1.5, "empty": "", "q": '"',
    }  # fmt: skip
    assert str(FieldsMessage("request", fields)) == (
        'request id="a b" path=/v1 number=5 ms=1.5 empty="" q="\\""'
    )


@given(text=st.text(), other=st.text())
def test_no_text_makes_a_second_line_or_another_field(text: str, other: str) -> None:
    message = FieldsMessage("request", {"id": text, "status": 200})
    for formatter in (TextFormatter(), JsonFormatter()):
        for line in (record(message), record(text), record("%s and %s", text, other)):
            assert len(formatter.format(line).splitlines()) == 1
    shown = str(message)
    assert shown.endswith(" status=200")
    if " " in text or "=" in text or '"' in text:
        assert shown.startswith('request id="')
    parsed = json.loads(JsonFormatter().format(record(message)))
    assert (parsed["id"], parsed["status"], parsed["event"]) == (text, 200, "request")


def test_a_json_line_has_the_traceback_in_it() -> None:
    try:
        raise ValueError("it\nfailed")
    except ValueError as error:
        failed = record("a handler failed")
        failed.exc_info = (type(error), error, error.__traceback__)
    line = JsonFormatter().format(failed)
    parsed = json.loads(line)
    assert "\n" not in line
    found = (parsed["level"], parsed["logger"], parsed["message"])
    assert found == ("INFO", "aioinfer.x", "a handler failed")
    assert "ValueError: it\nfailed" in parsed["exception"]
    assert parsed["time"].endswith("+00:00")


@pytest.mark.parametrize("form", ["text", "json"])
def test_records_are_written_while_the_block_runs(form: str, tmp_path: Path) -> None:
    log, file = logging.getLogger("aioinfer.test_process_log"), tmp_path / "log"
    with file.open("wb") as stream:
        with LogWriter(form, stream.fileno()) as writer:
            log.info("one of %d", 2)
            log.debug("unseen")
            logging.getLogger("library").info("unseen")
            logging.getLogger("library").warning("another")
            # not through a logger: pytest would report it, and pytest-xdist cannot send it
            writer.handle(record("a lone \ud800"))
        log.info("unseen")
    lines = file.read_text("utf-8").splitlines()
    assert len(lines) == 3
    assert "one of 2" in lines[0]
    assert "another" in lines[1]
    assert "a lone \\ud800" in lines[2]


def test_a_pipe_that_nobody_reads_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe takes 64 KiB; then the thread waits, the queue fills, and lines are dropped."""
    monkeypatch.setattr(process_log, "_MAX_QUEUED", 50)
    monkeypatch.setattr(process_log, "_LAST_LINES_S", 0.05)
    log = logging.getLogger("aioinfer.test_process_log")
    out, into = os.pipe()
    with LogWriter("text", into) as writer:
        for _ in range(500):
            log.info("x" * 5000)
        assert writer.num_dropped > 0
    assert writer._thread.is_alive(), "the end of the block does not wait for it"
    text = bytearray()

    def read() -> None:
        while data := os.read(out, 2**16):
            text.extend(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    writer._thread.join(60)
    os.close(into)
    reader.join(60)
    os.close(out)
    reported = sum(int(number) for number in re.findall(rb"(\d+) lines were dropped", text))
    assert text.count(b": xxx") + reported + writer.num_dropped == 500


def test_dropped_lines_are_counted_in_the_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process_log, "_MAX_QUEUED", 0)
    log, file = logging.getLogger("aioinfer.test_process_log"), tmp_path / "log"
    with file.open("wb") as stream, LogWriter("text", stream.fileno()):
        log.info("dropped")
        log.info("dropped")
        monkeypatch.setattr(process_log, "_MAX_QUEUED", 10)
        log.info("written")
    first, second = file.read_text().splitlines()
    assert first.endswith("2 lines were dropped: stderr is not read fast enough")
    assert second.endswith("written")


def test_a_process_ends_although_nobody_reads_its_log() -> None:
    program = (
        "import logging\nfrom aioinfer.process_log import LogWriter\n"
        "with LogWriter('text'):\n"
        "    for _ in range(100): logging.getLogger('aioinfer').info('x' * 5000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    assert process.wait(60) == 0
    assert process.stderr is not None
    process.stderr.close()


LOGGER = logging.getLogger("tests.limited_log")


async def test_events_are_logged_together(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog(LOGGER, "odd things", interval_s=0.2)
    for number in range(1000):
        log.count(f"of {number}")
    assert caplog.messages == ["odd things: 1, the last of 0"]
    await until(lambda: len(caplog.messages) >= 2)
    assert caplog.messages[1] == "odd things: 999, the last of 999"
    log.close()


async def test_nothing_is_lost_or_logged_twice(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog(LOGGER, "odd things", interval_s=0.05)
    for _ in range(20):
        log.count("")
        await asyncio.sleep(0.01)
    log.close()
    log.close()
    numbers = [int(re.findall(r"\d+", message)[0]) for message in caplog.messages]
    assert sum(numbers) == 20
    assert 0 not in numbers


async def test_after_a_quiet_time_the_first_event_is_logged_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = LimitedLog(LOGGER, "odd things", interval_s=0.01)
    log.count("first")
    await asyncio.sleep(0.2)
    assert len(caplog.messages) == 1
    log.count("second")
    assert len(caplog.messages) == 2
    log.close()
