"""Measures the chat page in headless Chromium while long answers stream in.

    python scripts/bench_page.py [--tokens 20000] [--rate 200] [--only TEXT,...] [--shot FILE]

The page and its files are the server's; the answer is scripted, one event a token. `--rate` is in
tokens a second, 0 sends as fast as the page takes them. For each kind of text a line says:

- frames: median and worst time between two animation frames (ms), over the first and last fifth;
- long: tasks of the main thread over 50 ms, their number and the longest;
- busy: time that tasks of the main thread took a token (us), over the first and last fifth;
- the size of the JavaScript heap and the DOM nodes at the end, and the time until the end.

A browser without a GPU draws on the processor: what else runs on the machine lengthens frames.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from aioinfer.api.server import create_app
from bench_loop import make_frontend
from tests.functional.chromium import Page, open_page
from tests.functional.scripted_chat import INFO, delta, end, token
from tests.scripted_server import sse

WATCH = """(() => {
    const seen = window.seen = { frames: [], tasks: [] };
    new PerformanceObserver((list) => {
        for (const each of list.getEntries()) seen.tasks.push([each.startTime, each.duration]);
    }).observe({ type: "longtask" });
    window.shown = () => document.querySelector(".reply")?.textContent.length ?? 0;
    const frame = (now) => { seen.frames.push(now); requestAnimationFrame(frame); };
    requestAnimationFrame(frame);
})()"""
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


async def counts(page: Page) -> dict[str, float]:
    metrics = (await page.send("Performance.getMetrics"))["metrics"]
    return {each["name"]: each["value"] for each in metrics}


async def measure(page: Page, kind: str, tokens: int, shot: str) -> dict[str, Any]:
    """Has one answer stream in, and returns what the browser counted meanwhile."""
    await page.until("document.querySelector('#status')?.dataset.state === 'live'")
    if kind == "probabilities":
        await page.run("document.querySelector('[name=logprobs]').click()")
    await page.send("Performance.enable", timeDomain="threadTicks")
    await page.run(WATCH)
    await page.run(
        f"document.querySelector('#prompt').value = {json.dumps(kind)};"
        "window.begin = performance.now(); document.querySelector('#composer').requestSubmit()"
    )
    if kind == "thoughts":
        await page.until("document.querySelector('.thought')")
        await page.run("document.querySelector('.thought').open = true")
    marks = [await counts(page)]
    for part in (0.2, 0.8):
        while await page.run(  # noqa: ASYNC110
            f"!({IDLE}) && window.shown() < {part * tokens * 4}"
        ):
            await asyncio.sleep(0.3)  # to look at a long text takes time, too
        marks.append(await counts(page))
    await page.until(IDLE, 1200)
    ended = await page.run("performance.now() - window.begin")
    marks.append(await counts(page))
    if shot:
        shown = await page.send("Page.captureScreenshot")
        Path(shot).write_bytes(base64.b64decode(shown["data"]))  # noqa: ASYNC240
    seen = await page.run("window.seen")
    return {"marks": marks, "ended": ended, **seen, "begin": await page.run("window.begin")}


def report(kind: str, tokens: int, found: dict[str, Any]) -> str:
    begin, ended, marks = found["begin"], found["ended"], found["marks"]
    frames = [at - begin for at in found["frames"] if begin < at < begin + ended]
    gaps = list(itertools.pairwise(frames))

    def during(first: float, last: float) -> str:
        within = [b - a for a, b in gaps if first * ended <= a < last * ended] or [math.nan]
        return f"{statistics.median(within):.0f}/{max(within):.0f}"

    def busy(first: int, last: int) -> float:
        spent = marks[last]["TaskDuration"] - marks[first]["TaskDuration"]
        return 1e6 * spent / (tokens * 0.2)

    long = [duration for at, duration in found["tasks"] if begin < at]
    heap = marks[-1]["JSHeapUsedSize"] / 1e6
    return (
        f"| {kind} | {during(0, 0.2)} | {during(0.8, 1)} | {len(long)}, {max(long, default=0):.0f} "
        f"| {busy(0, 1):.0f} | {busy(2, 3):.0f} | {heap:.0f} | {marks[-1]['Nodes']:.0f} "
        f"| {ended / 1e3:.1f} |"
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
    print(
        "| text | frames, first fifth | frames, last | long tasks | us a token, first | last "
        "| heap MB | nodes | s |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with open_page(Path(folder)) as page:
            for kind in arguments.only.split(",") if arguments.only else TEXTS:
                await page.open(url)
                found = await measure(page, kind, arguments.tokens, arguments.shot)
                print(report(kind, arguments.tokens, found), flush=True)
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
