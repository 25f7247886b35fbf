r"""Perplexity of a model in several configurations, beside the first of them.

    python scripts/perplexity.py --model FOLDER \
        --with model.quantization=fp8 --with model.quantization=int8 --with cache.dtype=fp8
    python scripts/perplexity.py --model FOLDER --formats gptq,awq --window 1000

Each `--with` is a configuration: `KEY=VALUE`, several of them joined by commas; `--set` holds for
all, the first row (with none of them) included. Each of `--formats` is the folder with its weights
rounded to a format of checkpoints (`benchlib/quantized_folder.py`: to nearest, no calibration). The
text is the language reference that Python
ships (`pydoc_data.topics`; Python Software Foundation License), from its beginning on: `--tokens`
of it, in windows of `--window` tokens, each of which begins without context. The perplexity is exp
of the mean negative log-probability of all tokens but the first of each window, given the tokens
before them in the window (Jelinek et al. 1977); "ratio" is to the first row, and "+-" is two
standard errors of it, from the differences between the two rows' tokens. "expected" is the ratio on
text that the first row's model had written itself: exp of the Kullback-Leibler divergence, which
for small differences is half the mean of their squares. Any rounding makes that worse, whereas it
may move the perplexity of a given text either way.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data import topics
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

# a checkout is enough: only aioinfer's dependencies need be installed
sys.path.insert(0, str(Path(__file__).parent.parent))

from aioinfer import LLM, SamplingParams
from aioinfer.config import load_config
from benchlib.quantized_folder import FORMATS, quantize_folder

#: Tokens of the model's context that a window leaves: for the one that has to be generated.
_RESERVED = 1


def main() -> None:
    options = parse_arguments()
    found = {"as it is": measure(options.settings, options)}
    for given in options.configurations:
        found[given] = measure([*options.settings, *given.split(",")], options)
    for name in options.formats:
        with TemporaryDirectory() as scratch:
            folder = quantize_folder(Path(options.model), Path(scratch) / name, name)
            found[name] = measure([*options.settings, f"model.path={folder}"], options)
    show(list(found), list(found.values()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Perplexity of a model in several configurations.")
    parser.add_argument("--model", required=True, help="as model.path")
    parser.add_argument("--tokens", type=int, default=20_000, help="default: %(default)s")
    parser.add_argument("--window", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--with", dest="configurations", action="append", default=[], metavar="KEY=VALUE,..."
    )
    parser.add_argument(
        "--formats",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME,...",
        help=f"of {', '.join(FORMATS)}",
    )
    options = parser.parse_args()
    if wrong := [name for name in options.formats if name not in FORMATS]:
        parser.error(f"unknown formats: {', '.join(wrong)}")
    options.settings.insert(0, f"model.path={options.model}")
    return options


def measure(settings: Sequence[str], options: argparse.Namespace) -> npt.NDArray[np.float64]:
    """Returns the log-probabilities of the text's tokens in a configuration, window by window.

    Raises `RuntimeError` if one of them is not finite.
    """
    settings = [*settings, f"model.max_model_len={options.window + _RESERVED}"]
    config = load_config(overrides=["cache.enable_prefix_caching=false", *settings])
    with LLM.of(config) as llm:
        tokenizer = llm.frontend.tokenizer
        assert tokenizer is not None
        tokens = tokenizer.encode(reference_text())[: options.tokens]
        windows = [tokens[i : i + options.window] for i in range(0, len(tokens), options.window)]
        outputs = llm.generate(
            [window for window in windows if len(window) > 1],
            SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
        )
    scores = [output.prompt_scores for output in outputs]
    logprobs = [score.logprobs for score in scores if score is not None]
    if len(logprobs) < len(scores):
        raise RuntimeError("a window came back without log-probabilities")
    joined = np.concatenate(logprobs).astype(np.float64)
    if not np.isfinite(joined).all():
        raise RuntimeError("a log-probability is not finite")
    return joined


def reference_text() -> str:
    """Returns the text whose perplexity is measured: 460 000 characters of English and Python."""
    return "\n".join(text for _, text in sorted(topics.topics.items()))


def show(names: Sequence[str], found: Sequence[npt.NDArray[np.float64]]) -> None:
    """Prints the table."""
    digest = hashlib.sha256(reference_text().encode()).hexdigest()[:12]
    title = f"{len(found[0])} tokens, Python {platform.python_version()}, text {digest}"
    table = Table("configuration", "perplexity", "ratio", "+-", "expected", title=title)
    for name, logprobs in zip(names, found, strict=True):
        difference = found[0] - logprobs
        error = 2 * difference.std() / math.sqrt(len(difference))
        ratio = math.exp(difference.mean())
        perplexity = math.exp(-logprobs.mean())
        expected = math.exp(np.square(difference).mean() / 2)
        figures = f"{perplexity:.4f}", f"{ratio:.5f}", f"{error:.5f}", f"{expected:.5f}"
        table.add_row(name, *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
