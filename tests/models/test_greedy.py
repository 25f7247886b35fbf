"""Real models give, token by token, what transformers gives: 10 prompts of 48 tokens each, greedy,
in float32, on the same dequantized weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from aioinfer import LLM, SamplingParams
from aioinfer.models.registry import families
from aioinfer.text.tokenizer import Tokenizer
from tests.models.files import GEMMA, QWEN

NUM_TOKENS = 48
CODE_PROMPTS = [
    "def fibonacci(n: int) -> int:\n",
    "# Reads a CSV file and prints the sum of its second column.\nimport csv\n",
    "class Stack:\n    def __init__(self):\n",
    "SELECT name, COUNT(*) FROM orders",
    "fn main() {\n    let numbers = vec![3, 1, 2];\n",
    "// quicksort in JavaScript\nfunction quicksort(items) {\n",
]
PROSE_PROMPTS = [
    "The capital of France is", "Once upon a time, in a small village by the sea,",
    "Water boils at 100 degrees Celsius because", "Le petit prince habite",
    "Die Geschichte der Stadt beginnt im Jahr",
    "List of planets in the solar system:\n1. Mercury\n2.", "In 1969, the first humans",
    "The quick brown fox jumps over the lazy dog. " * 60 + "And then the fox",
]  # fmt: skip
# The last prompt is longer than Gemma's window of 512 tokens.
PROMPTS = {QWEN: CODE_PROMPTS + PROSE_PROMPTS[:3] + PROSE_PROMPTS[-1:], GEMMA: CODE_PROMPTS[:2]
           + PROSE_PROMPTS}  # fmt: skip
#: A text that any model of English finds likely, and a model with misread weights does not.
PASSAGE = (
    "The sun rises in the east and sets in the west. During the day it gives us light and heat, "
    "and at night we can see the moon and the stars. People have looked at the sky for thousands "
    "of years and have used it to tell the time and to find their way across the sea."
)
requires_gemma = pytest.mark.skipif(
    "Gemma3ForCausalLM" not in families(),
    reason="aioinfer.models.registry knows no Gemma3ForCausalLM",
)


def load_reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", [QWEN, pytest.param(GEMMA, marks=requires_gemma)])
def test_greedy_tokens_are_those_of_transformers(name: str, converted: Callable[[str], Path]):
    """A sequence is transformers' greedy one if each of its tokens is the most likely after those
    before it, which one forward pass over all of them tells."""
    folder, prompts = converted(name), PROMPTS[name]
    assert len(prompts) == 10
    settings = {"model.dtype": "float32", "model.max_model_len": 1024, "cache.cpu_memory_gib": 1.0}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), settings=settings, progress=False) as llm:
        outputs = llm.generate(prompts, params)
    reference = load_reference(folder)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.token_ids
        assert len(tokens) == NUM_TOKENS
        whole = torch.tensor([[*output.prompt_token_ids, *tokens]])
        with torch.inference_mode():
            logits = reference(whole, logits_to_keep=NUM_TOKENS + 1).logits[0, :-1]
        assert tokens == logits.argmax(-1).tolist(), prompt[:40]


@pytest.mark.parametrize("name", [QWEN, pytest.param(GEMMA, marks=pytest.mark.extended)])
def test_plain_english_is_likely(name: str, converted: Callable[[str], Path]):
    """Weights in the wrong order or off by one (Gemma's norms) give perplexities of thousands."""
    folder = converted(name)
    reference = load_reference(folder)
    ids = torch.tensor([Tokenizer.load(folder).encode(PASSAGE)])
    with torch.inference_mode():
        loss = reference(ids, labels=ids).loss.item()
    assert loss < 3.0  # a perplexity of 20
