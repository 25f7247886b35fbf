r"""Throughput and latency with pictures over HTTP: a model with random weights that reads them.

    python scripts/bench_pictures.py                        # the shape of Qwen3-VL-8B, all rows
    python scripts/bench_pictures.py --rows new,same --requests 512 --json pictures.json
    python scripts/bench_pictures.py --model FOLDER --side 512

Rows, each streamed chats of `--input-len` tokens of text in and `--output-len` tokens out, with
`--streams` requests in flight at a time:
    text    no request has a picture
    new     each has a picture of its own, of `--side` pixels squared, a JPEG
    same    all have one picture, behind texts that differ: its embeddings are on the device, and no
            keys are in the prefix cache
    long    no request has a picture, and each as many tokens as one with a picture
    beside  every eighth stream asks for texts alone beside such as in "new"; times between tokens
            are those of the texts

`of_text` is the rate of requests in parts of the row "text"'s. What a picture costs beside its
tokens is what "new" and "same" take beyond "long": `repeat_of_first`, in the row "long", is the
cost of a repeated picture in parts of that of a new one, by the medians of the times to the first
token (of `--streams 1`: several requests wait for one another) and by seconds a request.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchlib.server_process import ServerProcess, exiting_at_signals

ROWS = ("text", "new", "same", "long", "beside")
_WORDS = 151_936
_SPECIAL = {
    "<|im_start|>": 151_644, "<|im_end|>": 151_645, "<|vision_start|>": 151_652,
    "<|vision_end|>": 151_653, "<|image_pad|>": 151_655,
}  # fmt: skip
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>{% endfor %}<|im_start|>"
)
QWEN3_VL_8B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
    "dtype": "bfloat16", "image_token_id": 151_655, "video_token_id": 151_656,
    "vision_start_token_id": 151_652, "vision_end_token_id": 151_653, "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_text", "vocab_size": _WORDS, "hidden_size": 4096,
        "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5_000_000, "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl", "depth": 27, "hidden_size": 1152, "num_heads": 16,
        "intermediate_size": 4304, "hidden_act": "gelu_pytorch_tanh", "patch_size": 16,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 4096,
        "num_position_embeddings": 2304, "in_channels": 3,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}  # fmt: skip
_PROCESSOR = {
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536}, "patch_size": 16,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip


def write_model(folder: Path) -> Path:
    """Writes the shape of Qwen3-VL-8B, and a tokenizer with a word for each token."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_VL_8B), "utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR), "utf-8")
    config = {"chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    words = {f"word{token}": token for token in range(_WORDS)}
    for text, token in _SPECIAL.items():
        del words[f"word{token}"]
        words[text] = token
    tokenizer = Tokenizer(models.WordLevel(words, "word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in _SPECIAL]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_picture(side: int, seed: int) -> str:
    """Returns a random picture as a data URL: a JPEG of some hundred kilobytes at 1 024 pixels."""
    small = np.random.default_rng(seed).integers(0, 256, (side // 8, side // 8, 3), np.uint8)
    buffer = io.BytesIO()
    image = Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)
    image.save(buffer, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@dataclass(slots=True)
class Record:
    """What came of a request: seconds until the first token, between later ones, and how many
    tokens the prompt had."""

    has_picture: bool
    ttft: float = 0.0
    between: list[float] = field(default_factory=list)
    prompt_tokens: int = 0


class Bench:
    """The rows so far, of one run of the script against a server."""

    def __init__(self, options: argparse.Namespace, url: str):
        self._options, self._url = options, url
        self._numbers = np.random.default_rng(1)
        self._seed = 0
        self._text_rate: float | None = None
        self._picture_tokens = 0
        self.rows: list[dict[str, Any]] = []

    def run(self) -> None:
        """Warms the server up, and measures all rows."""
        found, _ = asyncio.run(self._send_all(["new", "text"] * 4))
        tokens = {record.has_picture: record.prompt_tokens for record in found}
        self._picture_tokens = tokens[True] - tokens[False]  # all pictures have as many
        for row in ROWS:
            if row in self._options.rows:
                self._measure(row)

    def _measure(self, row: str) -> None:
        count, streams = self._options.requests, self._options.streams
        if row == "same":  # encoded once before
            asyncio.run(self._send_all(["same"]))
        kinds = [row] * count
        if row == "beside":
            kinds = ["text" if number % 8 == 0 else "new" for number in range(count)]
        found, seconds = asyncio.run(self._send_all(kinds))
        shown = [r for r in found if row != "beside" or not r.has_picture]
        between = [each for record in shown for each in record.between]
        rate = count / seconds
        figures: dict[str, Any] = {
            "row": row, "streams": streams, "requests": count, "requests_per_s": round(rate, 2),
            "prompt_tokens": found[0].prompt_tokens,
            "ttft_p50_ms": percentile([r.ttft for r in shown], 50),
            "ttft_p99_ms": percentile([r.ttft for r in shown], 99),
            "itl_p50_ms": percentile(between, 50), "itl_p99_ms": percentile(between, 99),
        }  # fmt: skip
        if row == "text":
            self._text_rate = rate
        elif self._text_rate is not None:
            figures["of_text"] = round(rate / self._text_rate, 3)
        if row == "long":
            figures["repeat_of_first"] = self._repeat_of_first(figures)
        self.rows.append(figures)
        print(json.dumps(figures), flush=True)

    def _repeat_of_first(self, long: dict[str, Any]) -> dict[str, float]:
        """Returns what a repeated picture costs in parts of a new one, each beyond a text of as
        many tokens; nothing without these rows."""
        rows = {figures["row"]: figures for figures in self.rows}
        if not {"new", "same"} <= rows.keys():
            return {}
        new, same = rows["new"], rows["same"]

        def part(cost: Callable[[dict[str, Any]], float]) -> float:
            return round((cost(same) - cost(long)) / (cost(new) - cost(long)), 3)

        return {
            "ttft_p50": part(lambda row: row["ttft_p50_ms"]),
            "seconds_a_request": part(lambda row: 1.0 / row["requests_per_s"]),
        }

    def _bodies(self, kinds: Sequence[str]) -> list[bytes]:
        """Returns a body for each kind; pictures are made in threads, the one of "same" once."""
        side, count = self._options.side, kinds.count("new")
        seeds = range(self._seed + 1, self._seed + 1 + count)
        self._seed += count
        with ThreadPoolExecutor() as threads:
            new = threads.map(lambda seed: make_picture(side, seed), seeds)
            same = make_picture(side, 0) if "same" in kinds else ""
            urls = (
                same if kind == "same" else next(new) if kind == "new" else "" for kind in kinds
            )
            return [
                self._body(url, self._picture_tokens if kind == "long" else 0)
                for kind, url in zip(kinds, urls, strict=True)
            ]

    def _body(self, url: str, more: int) -> bytes:
        """Returns a body with a picture or none, its text `more` tokens longer than the others'."""
        options, words = self._options, self._numbers
        drawn = words.integers(1, options.vocab_size, options.input_len + more)
        text = " ".join(f"word{word}" for word in drawn)
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if url:
            content.append({"type": "image_url", "image_url": {"url": url}})
        body = {
            "messages": [{"role": "user", "content": content}], "max_tokens": options.output_len,
            "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        return json.dumps(body).encode()

    async def _send_all(self, kinds: Sequence[str]) -> tuple[list[Record], float]:
        """Returns the records of requests of these kinds, `streams` at a time, and the seconds that
        all took; bodies are made before."""
        bodies = list(zip(kinds, self._bodies(kinds), strict=True))
        found: list[Record] = []
        free = asyncio.Semaphore(self._options.streams)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._url, connector=connector) as http:

            async def send(kind: str, body: bytes) -> None:
                try:
                    found.append(await self._send(http, kind, body))
                finally:
                    free.release()

            began = perf_counter()
            async with asyncio.TaskGroup() as group:
                for kind, body in bodies:
                    await free.acquire()
                    group.create_task(send(kind, body))
            return found, perf_counter() - began

    async def _send(self, http: aiohttp.ClientSession, kind: str, body: bytes) -> Record:
        record, sent, last = Record(kind in ("new", "same")), perf_counter(), 0.0
        headers = {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=None)
        async with http.post(
            "/v1/chat/completions", data=io.BytesIO(body), headers=headers, timeout=timeout
        ) as reply:
            if reply.status != 200:
                raise RuntimeError(f"status {reply.status}: {(await reply.text())[:500]}")
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if usage := event.get("usage"):
                    record.prompt_tokens = usage["prompt_tokens"]
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                if not event["choices"] or "role" in event["choices"][0]["delta"]:
                    continue
                now = perf_counter()
                if last:
                    record.between.append(now - last)
                else:
                    record.ttft = now - sent
                last = now
        return record


def percentile(times: Sequence[float], part: float) -> float:
    """Returns a percentile in ms; NaN of nothing."""
    return round(1000 * float(np.percentile(times, part)), 2) if times else float("nan")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line of JSON for each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", type=Path, help="default: the shape of Qwen3-VL-8B")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256, help="of each row")
    parser.add_argument("--input-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--side", type=int, default=1024, help="pixels of a picture's side")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    options = parser.parse_args(arguments)
    options.rows = options.rows.split(",")
    if unknown := set(options.rows).difference(ROWS):
        parser.error(f"--rows: there is no {', '.join(sorted(unknown))}")
    with ExitStack() as stack:
        stack.enter_context(exiting_at_signals())
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = options.model or write_model(work / "model")
        fields = json.loads((model / "config.json").read_text("utf-8"))
        options.vocab_size = fields.get("text_config", fields)["vocab_size"]
        file = work / "server.toml"
        file.write_text("", "utf-8")
        settings = [
            f"model.path={model}", "model.load_format=dummy", "model.max_model_len=8192",
            f"scheduler.max_num_seqs={options.streams}", *options.settings,
        ]  # fmt: skip
        server = stack.enter_context(ServerProcess(file, settings))
        print(f"ready after {server.ready_s:.1f} s", file=sys.stderr, flush=True)
        bench = Bench(options, server.url)
        bench.run()
    if options.json is not None:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in bench.rows), "utf-8")


if __name__ == "__main__":
    main()
