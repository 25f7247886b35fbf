"""Sentencepiece's BPE as a `tokenizers.Tokenizer`: one kind of tokenizer object serves all models.

Called by `Tokenizer.load` for a folder that has only a `tokenizer.model`, and by `gguf_tokenizer`.
The format follows Kudo and Richardson 2018 (github.com/google/sentencepiece): a piece has a score,
and encoding merges the neighbours that make the piece of the highest score, leftmost first.
`tokenizers` wants that as an ordered list of merges.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from aioinfer.errors import ConfigError

#: Where a space is put before a text, as the training of most models did: nowhere; before the whole
#: text (transformers' `legacy = false`); or also after each special token (`legacy = true`).
PrefixSpace = Literal["never", "first", "always"]


class PieceType(IntEnum):
    """The types of pieces, in sentencepiece's models and in GGUF files alike."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Pieces(NamedTuple):
    """A vocabulary in the order of its ids."""

    texts: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]


def read_model(file: Path) -> tuple[Pieces, dict[str, str]]:
    """Reads a sentencepiece model.

    Returns:
        The pieces, and the special tokens by name (`{"bos_token": "<s>", ...}`), as far as it has
        them.

    Raises:
        ConfigError: not a sentencepiece model, or one of a kind that no supported model family
            uses.
    """
    # pulls in protobuf, which no other kind of tokenizer needs
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(file.read_bytes())
    except Exception:  # protobuf's DecodeError; but it takes many other files for an empty message
        proto.Clear()
    if not proto.pieces:
        raise ConfigError(f"{file} is not a sentencepiece model")
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    unsupported = {
        "an algorithm other than BPE": trainer.model_type != trainer.BPE,
        "text normalization": bool(normalizer.precompiled_charsmap)
        or normalizer.remove_extra_whitespaces,
        "whitespace as a suffix": trainer.treat_whitespace_as_suffix,
        "no space before the text": not normalizer.add_dummy_prefix,
    }
    for feature, present in unsupported.items():
        if present:
            raise ConfigError(
                f"{file} has {feature}, which is not supported: model.tokenizer "
                f"must name a folder with a tokenizer.json"
            )
    pieces = Pieces(
        [p.piece for p in proto.pieces],
        [p.score for p in proto.pieces],
        [p.type for p in proto.pieces],
    )
    ids = {
        "bos_token": trainer.bos_id,
        "eos_token": trainer.eos_id,
        "unk_token": trainer.unk_id,
        "pad_token": trainer.pad_id,
    }
    return pieces, {name: pieces.texts[i] for name, i in ids.items() if i >= 0}


def build(pieces: Pieces, prefix_space: PrefixSpace) -> Tokenizer:
    """Makes the tokenizer. On text without special tokens its ids equal the sentencepiece
    library's.

    (With one exception: "first" does not put a space before a text that begins with one. So do
    transformers and the published tokenizers of models with `legacy = false`.)
    """
    ids = {text: index for index, text in enumerate(pieces.texts)}
    byte_fallback = PieceType.BYTE in pieces.types
    unknown = [
        text
        for text, kind in zip(pieces.texts, pieces.types, strict=True)
        if kind == PieceType.UNKNOWN
    ]
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            _merges(pieces),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    )
    if prefix_space == "always":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            "▁", prepend_scheme=prefix_space, split=False
        )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space != "never":
        steps.append(decoders.Strip(" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    add_special_pieces(tokenizer, pieces.texts, pieces.types)
    return tokenizer


def add_special_pieces(tokenizer: Tokenizer, texts: Sequence[str], types: Sequence[int]) -> None:
    """Makes control and user-defined pieces tokens that are matched whole in a text, before it is
    split; only control and unknown pieces are special."""
    added = (PieceType.CONTROL, PieceType.USER_DEFINED, PieceType.UNKNOWN)
    tokenizer.add_tokens(
        [
            AddedToken(text, normalized=False, special=kind != PieceType.USER_DEFINED)
            for text, kind in zip(texts, types, strict=True)
            if kind in added
        ]
    )


def add_bos_eos(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes encoding add `bos` before a text and `eos` after it; None leaves one out."""
    template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template,
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {bos, eos} if token],
    )


def _merges(pieces: Pieces) -> list[tuple[str, str]]:
    """Returns the merges that lead to each piece, the highest score first.

    Where a piece has several, the one with the longest left half comes first: sentencepiece merges
    pairs of equal scores from the left, which builds up the left half of a run (of spaces, say)
    first.
    """
    scores = {
        text: score
        for text, score, kind in zip(*pieces, strict=True)
        if kind in (PieceType.NORMAL, PieceType.USER_DEFINED, PieceType.UNUSED)
    }
    found = [
        (-score, -cut, text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]
