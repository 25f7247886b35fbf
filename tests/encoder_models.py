"""Small random encoders, made and saved by transformers, with a WordPiece tokenizer."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from tests.tiny_models import randomize

#: As transformers names types of models.
FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "modernbert")
_FIELDS: dict[str, dict[str, Any]] = {
    "roberta": {"pad_token_id": 1, "max_position_embeddings": 514, "type_vocab_size": 1},
    "xlm-roberta": {"pad_token_id": 1, "max_position_embeddings": 514, "type_vocab_size": 1},
    "camembert": {"pad_token_id": 1, "max_position_embeddings": 514, "type_vocab_size": 1},
    "mpnet": {"pad_token_id": 1, "max_position_embeddings": 514},
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_heads": 8, "n_layers": 2},
    "modernbert": {"num_hidden_layers": 3,
                   "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                   "local_attention": 8, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2,
                   "eos_token_id": 3},
}  # fmt: skip
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def tiny_encoder(family: str, folder: Path, *, num_labels: int = 2, **fields: Any) -> Any:
    """Saves a random encoder with a classification head and a tokenizer into `folder`, and returns
    the model of transformers.

    Two layers, or three, of 8 heads of 8 channels, and 512 positions. `fields` replace those of the
    configuration.
    """
    tokenizer = word_pieces()
    given: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 8, "max_position_embeddings": 512,
        "pad_token_id": 0, "initializer_range": 0.2, "num_labels": num_labels,
        **_FIELDS.get(family, {}), **fields,
    }  # fmt: skip
    config = CONFIG_MAPPING[family](**given)
    torch.manual_seed(0)
    model = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)](config).eval()
    randomize(model)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return model


def word_pieces() -> Tokenizer:
    """Returns a WordPiece tokenizer as BERT has one: of letters, alone and inside a word, and some
    words."""
    letters = string.ascii_lowercase + string.digits + string.punctuation
    pieces = [*_SPECIAL, *letters, *(f"##{letter}" for letter in letters), "the", "river", "##ing"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.enable_truncation(16)  # as published tokenizers have it, and servers must not
    tokenizer.enable_padding(length=16)
    return tokenizer


def random_texts(lengths: list[int], vocab_size: int) -> list[list[int]]:
    """Returns token ids of texts of these lengths, without the special tokens."""
    return [
        [5 + (7 * i * i + 13 * i + 5 * text) % (vocab_size - 5) for i in range(length)]
        for text, length in enumerate(lengths)
    ]
