"""The names of the GGUF files that `make test-models` puts together, and `make test-drafts`."""

from __future__ import annotations

QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
LARGER_QWEN = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
GEMMA = "gemma-3-270m-q4_k_m.gguf"
