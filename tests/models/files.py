"""The names of the GGUF files that `make models` puts together."""

from __future__ import annotations

QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
GEMMA = "gemma-3-270m-q4_k_m.gguf"
