"""Byte-level BPE tokenizers (Radford et al. 2019) out of their parts: a vocabulary and merges, or
the ranked byte sequences of OpenAI's tiktoken and of Mistral's Tekken.

`gguf_tokenizer` and `tekken` call it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from aioinfer.text.detokenizer import BYTE_OF_CHARACTER

#: Converts bytes that were decoded as Latin-1 into GPT-2's alphabet.
_TO_ALPHABET = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def spell(token: bytes) -> str:
    """Returns a token in GPT-2's alphabet, a character a byte."""
    return token.decode("latin-1").translate(_TO_ALPHABET)


def merges_of_ranks(ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns the merges of tokens whose ranks are tiktoken's; both spelled in GPT-2's alphabet.

    tiktoken merges the neighbours whose result has the lowest rank; so the merges are all pairs of
    tokens that make a token, in the order of its rank.
    """
    merges = [
        (rank, ranks[token[:cut]], ranks[token[cut:]], token, cut)
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    merges.sort()
    return [(token[:cut], token[cut:]) for *_, token, cut in merges]


def build(
    vocab: dict[str, int],
    merges: Sequence[tuple[str, str]],
    split: str | None = None,
    *,
    digits_apart: bool = False,
    ignore_merges: bool = False,
) -> Tokenizer:
    """Makes the tokenizer, without special tokens.

    Args:
        vocab: ids by the texts of tokens, spelled in GPT-2's alphabet.
        merges: pairs of tokens, the first to be merged first.
        split: the pattern whose matches are encoded one by one; None is GPT-2's.
        digits_apart: each digit is encoded by itself, before the pattern is looked for.
        ignore_merges: a match that is a token as a whole is that token, regardless of merges.

    Raises:
        ValueError: a merge has a part or a result that is no token.
    """
    try:
        tokenizer = Tokenizer(models.BPE(vocab, list(merges), ignore_merges=ignore_merges))
    except Exception as error:  # tokenizers raises bare exceptions
        raise ValueError(str(error)) from error
    steps: list[Any] = []
    if digits_apart:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
