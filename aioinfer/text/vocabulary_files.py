"""Tokenizers of folders that hold a bare vocabulary: `vocab.json` with `merges.txt` (byte-level
BPE), or `vocab.txt` (WordPiece).

Such files do not say how text is split and lower-cased, or which special tokens are put around it:
a class of transformers does, which `tokenizer_class` names or the type of the model implies. That
class converts the folder. A folder whose class cannot be told, or whose tokens would get ids that
no file of it gives, is refused. `Tokenizer.load` calls `build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from aioinfer.errors import ConfigError
from aioinfer.models.json_file import read_json

_BYTE_LEVEL = ("vocab.json", "merges.txt")
_WORD_PIECES = ("vocab.txt",)
_ADVICE = "or add tokenizer.json, or let model.tokenizer name a folder or id with one"


@dataclass(frozen=True, slots=True)
class _Kind:
    """A class of tokenizers.

    Attributes:
        files: the vocabulary.
        model_types: types of models, as `config.json` has them, that use the class.
        is_generic: folders of other types name the class too, for vocabularies that are split by
            other rules; so it counts only for `model_types`, and in a folder without a type.
    """

    files: tuple[str, ...]
    model_types: frozenset[str]
    is_generic: bool = False


_KINDS = {
    "BertTokenizer": _Kind(_WORD_PIECES, frozenset({"bert", "distilbert"})),
    "MPNetTokenizer": _Kind(_WORD_PIECES, frozenset({"mpnet"})),
    "RobertaTokenizer": _Kind(_BYTE_LEVEL, frozenset({"roberta", "bart"})),
    "WhisperTokenizer": _Kind(_BYTE_LEVEL, frozenset({"whisper"})),
    "CodeGenTokenizer": _Kind(_BYTE_LEVEL, frozenset({"phi"})),
    "GPT2Tokenizer": _Kind(_BYTE_LEVEL, frozenset({"gpt2", "opt"}), is_generic=True),
    "Qwen2Tokenizer": _Kind(
        _BYTE_LEVEL,
        frozenset(
            [
                *("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_audio", "qwen3"),
                *("qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
                *("internvl", "internvl_chat", "mimo"),
            ]
        ),
        is_generic=True,
    ),
}
#: Other names of these classes.
_ALIASES = {
    "DistilBertTokenizer": "BertTokenizer",
    "ElectraTokenizer": "BertTokenizer",
    "BartTokenizer": "RobertaTokenizer",
}


def has_vocabulary(folder: Path) -> bool:
    """Returns whether a folder has one of the files that `build` reads."""
    return any((folder / name).is_file() for name in (*_BYTE_LEVEL, *_WORD_PIECES))


def build(folder: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Makes the tokenizer of a folder, and returns it with its special tokens by name.

    `config` is `tokenizer_config.json`. Added tokens are read from there and from
    `added_tokens.json` and `special_tokens_map.json`. Takes half a second where transformers is not
    imported yet.

    Raises `ConfigError` if the files do not say enough, or contradict each other.
    """
    name = _class_name(folder, config)
    missing = [file for file in _KINDS[name].files if not (folder / file).is_file()]
    if missing:
        raise ConfigError(
            f"{folder}: the vocabulary of a {name} lacks {' and '.join(missing)}: add it, {_ADVICE}"
        )
    import transformers

    try:
        converted = getattr(transformers, name).from_pretrained(
            str(folder), local_files_only=True, **_mask_token(name, folder, config)
        )
        backend: tokenizers.Tokenizer = converted.backend_tokenizer
        special_tokens: dict[str, str] = dict(converted.special_tokens_map)
    except Exception as error:  # of either library, of many kinds
        raise ConfigError(
            f"{folder}: transformers' {name} cannot read the vocabulary: {error}"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    _mark_special(folder, config, backend)
    _check_case(name, folder, config, backend)
    _check_ids(folder, config, backend)
    return backend, special_tokens


def _class_name(folder: Path, config: Mapping[str, Any]) -> str:
    """Returns the name of the class that a folder's vocabulary is for. Raises `ConfigError`."""
    model = read_json(folder / "config.json", missing_ok=True)
    model_type = model.get("model_type")
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    if named is None:
        name = next((name for name, kind in _KINDS.items() if model_type in kind.model_types), "")
    else:
        name = str(named).removesuffix("Fast")
        name = _ALIASES.get(name, name)
    kind, auto_map = _KINDS.get(name), config.get("auto_map")
    has_own_code = isinstance(auto_map, list) or "AutoTokenizer" in (auto_map or {})
    is_for_others = (
        kind is not None
        and kind.is_generic
        and model_type is not None
        and model_type not in kind.model_types
    )
    if kind is None or is_for_others or has_own_code:
        raise ConfigError(
            f"{folder} has no tokenizer.json, tokenizer.model or tekken.json but a bare "
            f"vocabulary, and how that splits text cannot be told from tokenizer_class = "
            f"{named!r} with model_type = {model_type!r}"
            f"{' and a tokenizer in Python' if has_own_code else ''}: let tokenizer_class in "
            f"tokenizer_config.json be the right one of {', '.join(_KINDS)}, {_ADVICE}"
        )
    if model_type == "opt" and "add_bos_token" not in config:
        raise ConfigError(
            f"{folder}: models of the type opt need their BOS token, which only "
            f"tokenizer_config.json asks for: set add_bos_token there, {_ADVICE}"
        )
    return name


def _mask_token(name: str, folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments for the class: RoBERTa's mask includes a space before it, as the published
    `tokenizer.json` have it, which transformers 5 forgets where the folder gives the text alone."""
    if name != "RobertaTokenizer" or "added_tokens_decoder" in config:
        return {}
    named = read_json(folder / "special_tokens_map.json", missing_ok=True).get("mask_token")
    named = config.get("mask_token", "<mask>") if named is None else named
    if not isinstance(named, str):
        return {}
    return {"mask_token": tokenizers.AddedToken(named, lstrip=True, special=True)}


def _mark_special(folder: Path, config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> None:
    """Makes the tokens of `additional_special_tokens` special, which transformers 5 leaves plain
    where `added_tokens.json` has their ids."""
    named = config.get("additional_special_tokens") or read_json(
        folder / "special_tokens_map.json", missing_ok=True
    ).get("additional_special_tokens")
    tokens = {each["content"] if isinstance(each, dict) else each for each in named or ()}
    plain = [
        token.content
        for _, token in sorted(backend.get_added_tokens_decoder().items())
        if token.content in tokens and not token.special
    ]
    backend.add_special_tokens(
        [tokenizers.AddedToken(each, normalized=False, special=True) for each in plain]
    )


def _check_case(
    name: str, folder: Path, config: Mapping[str, Any], backend: tokenizers.Tokenizer
) -> None:
    """Raises `ConfigError` for a vocabulary with upper-case words of which nothing says whether
    text is lower-cased: transformers would do that."""
    if _KINDS[name].files is not _WORD_PIECES or "do_lower_case" in config:
        return
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    for piece in backend.get_vocab(with_added_tokens=False):
        in_brackets = piece[:1] + piece[-1:] in ("[]", "<>")
        if piece not in added and not in_brackets and piece != piece.lower() and piece.isascii():
            raise ConfigError(
                f"{folder}: the vocabulary has upper-case words such as {piece!r}, and nothing "
                f"says whether text is lower-cased: set do_lower_case in tokenizer_config.json, "
                f"{_ADVICE}"
            )


def _check_ids(folder: Path, config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> None:
    """Raises `ConfigError` if a token has another id than the files give it, or one that none of
    them gives: tokens are numbered in turn where they are added."""
    given: dict[str, Any] = dict(read_json(folder / "added_tokens.json", missing_ok=True))
    for index, token in (config.get("added_tokens_decoder") or {}).items():
        given[token["content"]] = int(index)
    expected = backend.get_vocab(with_added_tokens=False) | given
    actual = {token: backend.token_to_id(token) for token in given}
    for index, added in backend.get_added_tokens_decoder().items():
        actual[added.content] = index
    for token, index in actual.items():
        if token not in expected:
            raise ConfigError(
                f"{folder}: no file gives an id for the special token {token!r}: name the right "
                f"one in special_tokens_map.json, or its id in added_tokens.json, {_ADVICE}"
            )
        if index != expected[token]:
            raise ConfigError(
                f"{folder}: the token {token!r} has the id {expected[token]} in the tokenizer's "
                f"files, but comes out as {index}: the files do not fit together; correct them, "
                f"{_ADVICE}"
            )
