r"""Measures the chat page in headless Chromium while long answers stream in.

    PYTHONPATH=. python scripts/bench_page.py [--tokens 20000] [--rate 200] [--only TEXT,...] \
        [--shot FILE]

The page and its files are the server's; the answer is scripted, one event a token. `--rate` is in
tokens a second, 0 sends as fast as the page takes them. For each kind of text a line says:

- frame: CPU time that the renderer's main thread takes from one frame to the next (ms), median and
  worst, over the first and the last fifth, and the worst of all, the end of the answer included;
- script, layout, paint: the CPU time of the worst frame's parts (ms);
- token: CPU time of the main thread a token (us), over the first and last fifth;
- the size of the JavaScript heap, the DOM nodes and the time at the end.

CPU times come from Chromium's trace (`tdur`, the thread's clock): other load of the machine does
not lengthen them, but for caches and clock rates that are shared.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from aioinfer.api.server import create_app
from bench_loop import make_frontend
from tests.functional.chromium import Page, open_page
from tests.functional.scripted_chat import INFO, delta, end, token
from tests.scripted_server import sse

CATEGORIES = ("devtools.timeline", "disabled-by-default-devtools.timeline")
PARTS = {
    "FunctionCall": "script", "FireAnimationFrame": "script", "TimerFire": "script",
    "RunMicrotasks": "script", "UpdateLayoutTree": "layout", "Layout": "layout",
    "PrePaint": "paint", "Paint": "paint", "Layerize": "paint", "Commit": "paint",
    "MinorGC": "memory", "MajorGC": "memory", "V8.GC": "memory",
}  # fmt: skip
IDLE = "!document.querySelector('#send').hidden"
WORDS = ("the", "engine", "plans", "a", "step", "and", "*then*", "sends", "it,", "with", "`tokens`")


def words(number: int, count: int) -> str:
    return " ".join(WORDS[(number * 7 + at) % len(WORDS)] for at in range(count))


def mixed(number: int) -> str:
    """Returns a section with a paragraph, a formula, code, a table and a list."""
    rows = "".join(f"| {row} | {words(row, 2)} | {number} |\n" for row in range(6))
    code = "".join(f"    total += {row} * step  # {number}\n" for row in range(10))
    items = "".join(f"{item + 1}. {words(item, 6)}\n" for item in range(5))
    return (
        f"## Section {number}\n\n{words(number, 60)} $x_{{{number}}}^2 = \\frac{{1}}{{2}}$.\n\n"
        f"```python\ndef step_{number}():\n{code}```\n\n| a | b | c |\n|--:|---|---|\n{rows}\n"
        f"$$\\sum_{{i=0}}^{{{number}}} i$$\n\n{items}\n"
    )


TEXTS: dict[str, tuple[str, Callable[[int], str]]] = {
    "nothing": ("", lambda n: " "),
    "mixed": ("", mixed),
    "code": ("```python\n", lambda n: f"    value_{n} = compute({n}, scale=0.5)  # {n}\n"),
    "list": ("", lambda n: f"- item {n}: {words(n, 8)}\n"),
    "table": ("| a | b |\n|---|---|\n", lambda n: f"| {n} | {words(n, 8)} |\n"),
    "maths list": ("", lambda n: f"{n + 1}. so $a_{{{n}}} = \\sqrt{{{n}}}$ {words(n, 4)}\n"),
    "paragraph": ("", lambda n: f"{words(n, 12)} "),
    "thoughts": ("", lambda n: f"{words(n, 12)}\n"),
    "probabilities": ("", lambda n: f"{words(n, 30)}\n\n"),
}


def pieces(kind: str, count: int) -> Iterator[str]:
    """Yields the text of a kind in `count` tokens, of about four characters each."""
    head, part = TEXTS[kind]
    text = itertools.chain(head, itertools.chain.from_iterable(map(part, itertools.count())))
    return ("".join(itertools.islice(text, 4)) for _ in range(count))


def event(kind: str, piece: str) -> dict[str, Any]:
    if kind == "thoughts":
        return delta(reasoning_content=piece)
    if kind == "probabilities":
        return token(piece, -0.7, *((f"other{at}", -2.0 - at) for at in range(4)))
    return delta(content=piece)


def answering(tokens: int, rate: float) -> Callable[[web.Request], Any]:
    """Returns a handler that streams a text of the kind that the last message names."""

    async def answer(request: web.Request) -> web.StreamResponse:
        kind = (await request.json())["messages"][-1]["content"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        begin = time.perf_counter()
        for number, piece in enumerate(pieces(kind, tokens)):
            await response.write(sse(event(kind, piece)))
            late = time.perf_counter() - begin - number / rate if rate else 0
            await asyncio.sleep(max(0.0, -late))
        await response.write(sse(*end("stop")))
        return response

    return answer


@dataclass(slots=True)
class Frame:
    """What the main thread did up to a commit: `end` in us of the trace, CPU times in us."""

    end: int
    cpu: int
    parts: dict[str, int]


def frames_of(trace: list[dict[str, Any]]) -> list[Frame]:
    """Returns the frames of the page's main thread; the last is what came behind the last commit.

    A part within another one (a layout that a script asks for) counts as the inner one.
    """
    threads = [
        (event["pid"], event["tid"])
        for event in trace
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    ]
    busiest = max(threads, key=lambda thread: sum(_is_of(event, thread) for event in trace))
    frames, frame, end_of_task = [], Frame(0, 0, {}), -1
    inner: list[dict[str, Any]] = []
    for event in trace:
        if event["ph"] != "X" or not _is_of(event, busiest):
            continue
        end = event["ts"] + event.get("dur", 0)
        if event["name"] == "RunTask" and event["ts"] >= end_of_task:
            if any(part["name"] == "Commit" for part in inner):
                frames.append(frame)
                frame = Frame(end, 0, {})
            inner, end_of_task = [], end
            frame.cpu += event.get("tdur", 0)
            frame.end = end
        elif event["name"] in PARTS:
            inner.append(event)
            name = PARTS[event["name"]]
            frame.parts[name] = frame.parts.get(name, 0) + event.get("tdur", 0)
            around = [part for part in inner[:-1] if part["ts"] + part.get("dur", 0) > event["ts"]]
            if around:
                frame.parts[PARTS[around[-1]["name"]]] -= event.get("tdur", 0)
    return [*frames, frame]


def _is_of(event: dict[str, Any], thread: tuple[int, int]) -> bool:
    return (event["pid"], event["tid"]) == thread


async def measure(page: Page, kind: str, tokens: int, shot: str) -> str:
    """Has one answer stream in, and returns the line of what the browser did meanwhile."""
    await page.until("document.querySelector('#status')?.dataset.state === 'live'")
    if kind == "probabilities":
        await page.run("document.querySelector('[name=logprobs]').click()")
    await page.send("Performance.enable")
    await page.start_trace(*CATEGORIES)
    await page.run(
        f"document.querySelector('#prompt').value = {json.dumps(kind)};"
        "window.begin = performance.now(); document.querySelector('#composer').requestSubmit()"
    )
    if kind == "thoughts":
        await page.until("document.querySelector('.thought')")
        await page.run("document.querySelector('.thought').open = true")
    while not await page.run(IDLE):  # noqa: ASYNC110  # a test more often would be work, too
        await asyncio.sleep(0.5)
    seconds = await page.run("performance.now() - window.begin") / 1e3
    if kind == "probabilities":
        await page.run(
            "[...document.querySelectorAll('.tool')]"
            ".find((made) => made.textContent === 'Probabilities').click()"
        )
    await asyncio.sleep(2)  # the answer is kept, and its tokens are shown
    trace = await page.end_trace()
    metrics = (await page.send("Performance.getMetrics"))["metrics"]
    if shot:
        shown = await page.send("Page.captureScreenshot")
        Path(shot).write_bytes(base64.b64decode(shown["data"]))  # noqa: ASYNC240
    counts = {each["name"]: each["value"] for each in metrics}
    heap, nodes = counts["JSHeapUsedSize"] / 1e6, counts["Nodes"]
    return (
        f"| {kind} {report(frames_of(trace), tokens)} | {heap:.0f} | {nodes:.0f} | {seconds:.1f} |"
    )


def report(frames: list[Frame], tokens: int) -> str:
    first = frames[0].end
    length = frames[-1].end - 2e6 - first

    def during(begin: float, end: float) -> list[int]:
        within = [each.cpu for each in frames if begin <= (each.end - first) / length <= end]
        return within or [0]

    def line(cpu: list[int]) -> str:
        return f"{statistics.median(cpu) / 1e3:.1f} / {max(cpu) / 1e3:.1f}"

    worst = max(frames, key=lambda frame: frame.cpu)
    parts = " ".join(
        f"{name} {us / 1e3:.0f}" for name, us in sorted(worst.parts.items()) if us >= 500
    )
    at = (worst.end - first) / length
    start, end = during(0, 0.2), during(0.8, 1)
    token = [sum(each) / (0.2 * tokens) for each in (start, end)]
    return (
        f"| {line(start)} | {line(end)} | {worst.cpu / 1e3:.1f} at {at:.0%} ({parts}) "
        f"| {sum(each.cpu > 50_000 for each in frames)} of {len(frames)} "
        f"| {token[0]:.0f} | {token[1]:.0f}"
    )


async def run(arguments: argparse.Namespace) -> None:
    frontend = await make_frontend(4, 0.005, {})
    outer = web.Application()

    async def info(request: web.Request) -> web.Response:
        return web.json_response(INFO)

    outer.router.add_post("/llm/v1/chat/completions", answering(arguments.tokens, arguments.rate))
    outer.router.add_get("/llm/page/info", info)
    outer.add_subapp("/llm", await create_app(frontend.config, frontend))
    runner = web.AppRunner(outer, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/llm/"
    print(f"load of the machine at the start: {os.getloadavg()[0]:.1f}; frames in ms of CPU time")
    print(
        "| text | first fifth, median / worst | last fifth | worst | over 50 ms "
        "| us a token, first | last | heap MB | nodes | s |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with open_page(Path(folder)) as page:
            for kind in arguments.only.split(",") if arguments.only else TEXTS:
                await page.open(url)
                line = await measure(page, kind, arguments.tokens, arguments.shot)
                print(line, flush=True)
    await runner.cleanup()
    await frontend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=200.0, help="tokens a second; 0: no limit")
    parser.add_argument("--only", default="", help="kinds of text, with commas")
    parser.add_argument("--shot", default="", help="a file for a picture of the end")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
