"""Measures what a quantized format costs a model: the perplexity of a text.

    python scripts/perplexity.py --model FOLDER --formats gptq,awq,fp8 [--tokens 20000]

The folder's weights are rounded to each format (`benchlib/quantized_folder.py`: to nearest, without
calibration) and served by the engine from a temporary folder; `none` stands for the folder itself.
`--set` sets keys of the configuration, such as `cache.dtype=fp8`.

The text is the language reference that CPython ships for its `help()` (`pydoc_data.topics`, under
the Python Software Foundation's licence, version 2), its topics in the order of their names. It is
cut into windows of `--window` tokens, of each of which all tokens but the first are predicted.
Another Python has another text: compare figures with the same digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tokenizers import Tokenizer

from aioinfer import LLM, SamplingParams
from benchlib.quantized_folder import FORMATS, quantize_folder

#: Characters of text that give more tokens than are asked for, for each token.
_CHARACTERS = 8


def read_text(tokens: int) -> str:
    """Returns enough of the text for a number of tokens."""
    return "\n".join(topics[name] for name in sorted(topics))[: tokens * _CHARACTERS]


def cut(folder: Path, text: str, tokens: int, window: int) -> list[list[int]]:
    """Returns the first tokens of a text, in windows of equal length."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids[:tokens]
    return [ids[begin : begin + window] for begin in range(0, len(ids) - window + 1, window)]


def perplexity(
    folder: Path, windows: Sequence[Sequence[int]], settings: Mapping[str, Any]
) -> tuple[float, int]:
    """Returns the perplexity of a model, and the number of tokens that it is of."""
    params = SamplingParams(prompt_logprobs=0, prompt_only=True, max_tokens=1)
    with LLM(str(folder), settings=dict(settings), progress=False) as llm:
        outputs = llm.generate([list(window) for window in windows], params)
    total, count = 0.0, 0
    for output in outputs:
        assert output.prompt_scores is not None
        scores = output.prompt_scores.logprobs
        total -= float(sum(scores))
        count += len(scores)
    return math.exp(total / count), count


def main() -> None:
    """Prints a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--formats", default="none,gptq,gptq-asym,awq,packed-8bit,fp8,int8")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=1000)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    text = read_text(options.tokens)
    windows = cut(options.model, text, options.tokens, options.window)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    print(f"{sum(map(len, windows))} tokens of the text {digest}", flush=True)
    settings: dict[str, Any] = {"cache.enable_prefix_caching": False}
    for pair in options.set:
        key, _, value = pair.partition("=")
        settings[key] = tomllib.loads(f"value = {value}")["value"] if value[:1].isdigit() else value
    results: dict[str, float] = {}
    for name in options.formats.split(","):
        if name != "none" and name not in FORMATS:
            parser.error(f"{name} is none of none, {', '.join(FORMATS)}")
        scratch = Path(tempfile.mkdtemp())
        try:
            folder = options.model
            if name != "none":
                folder = quantize_folder(options.model, scratch / name, name)
            results[name], count = perplexity(folder, windows, settings)
        finally:
            shutil.rmtree(scratch)
        change = results[name] / next(iter(results.values())) - 1
        print(f"{name:12} {results[name]:9.4f} {change:+8.2%}  ({count} tokens)", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"text": digest, "perplexity": results}), "utf-8")


if __name__ == "__main__":
    main()
