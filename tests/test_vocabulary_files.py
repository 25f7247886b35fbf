"""Tokenizers of bare vocabularies, against transformers on the same folder and against the
`tokenizer.json` that the vocabulary was taken from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from aioinfer.errors import ConfigError
from aioinfer.text import byte_level_bpe
from aioinfer.text.tokenizer import Tokenizer
from tests.encoder_models import word_pieces
from tests.real_tokenizers import TEXTS, bare_folder, qwen_folder, smollm2_folder

pytestmark = pytest.mark.slow

#: Special tokens of SmolLM2's vocabulary in the places of RoBERTa's.
ROBERTA = {
    "bos_token": "<|im_start|>", "cls_token": "<|im_start|>", "eos_token": "<|im_end|>",
    "sep_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
    "mask_token": {"content": "<file_sep>", "lstrip": True, "rstrip": False, "normalized": False},
}  # fmt: skip
OPT = {"bos_token": "<|im_start|>", "eos_token": "<|im_start|>", "unk_token": "<|im_start|>"}
WORDS = {
    "bos_token": "[CLS]", "cls_token": "[CLS]", "eos_token": "[SEP]", "sep_token": "[SEP]",
    "unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]",
}  # fmt: skip
TYPED_MASK = {"mask_token": ROBERTA["mask_token"] | {"__type": "AddedToken"}}


class Case(NamedTuple):
    """A vocabulary, what `config.json`, `tokenizer_config.json` and `special_tokens_map.json` have,
    and the ids around a text."""

    vocabulary: str
    model_type: str | None = None
    config: dict[str, Any] | None = None
    special_tokens: dict[str, Any] | None = None
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


CASES = {
    "gpt2": Case("gpt2", "gpt2"),
    "space": Case("space", None, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
    "opt": Case("gpt2", "opt", {"add_bos_token": True} | OPT, prefix=(1,)),
    "roberta": Case("gpt2", "roberta", None, ROBERTA, (1,), (2,)),
    "bart": Case(
        "gpt2", None, {"tokenizer_class": "BartTokenizer"} | ROBERTA | TYPED_MASK, None, (1,), (2,)
    ),
    "phi": Case("gpt2", "phi"),
    "qwen2": Case("qwen", "qwen2"),
    "bert": Case("bert", "bert", None, None, (2,), (3,)),
    "distilbert": Case("bert", None, {"tokenizer_class": "DistilBertTokenizer"}, None, (2,), (3,)),
    "mpnet": Case("bert", "mpnet", None, WORDS, (2,), (3,)),
}


def write(originals: dict[str, Path], case: Case, folder: Path) -> Path:
    """Writes the folder of a case."""
    files: dict[str, Any] = {
        "config": case.model_type and {"model_type": case.model_type},
        "tokenizer_config": case.config,
        "special_tokens_map": case.special_tokens,
    }
    given = {name: content for name, content in files.items() if content is not None}
    return bare_folder(originals[case.vocabulary], folder, **given)


@pytest.fixture(scope="module")
def originals(tokenizer_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns files in the format of `tokenizer.json` by the names of vocabularies: Qwen's, and the
    first words of SmolLM2's, which are read in a tenth of the time of all."""
    folder = tmp_path_factory.mktemp("originals")
    smollm2 = json.loads((smollm2_folder(tokenizer_cache) / "tokenizer.json").read_text("utf-8"))
    vocab = {word: index for word, index in smollm2["model"]["vocab"].items() if index < 4096}
    merges = [(a, b) for a, b in smollm2["model"]["merges"] if {a, b, a + b} <= vocab.keys()]
    backend = byte_level_bpe.build(vocab, merges)
    backend.save(str(folder / "gpt2"))
    written = json.loads(backend.to_str())
    written["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True
    (folder / "space").write_text(json.dumps(written), "utf-8")
    words = word_pieces()
    words.no_padding()
    words.no_truncation()
    words.save(str(folder / "bert"))
    names = {name: folder / name for name in ("gpt2", "space", "bert")}
    return names | {"qwen": qwen_folder(tokenizer_cache) / "tokenizer.json"}


class Bare(NamedTuple):
    """A folder's tokenizer, that of transformers, and the original without ids around a text."""

    case: Case
    ours: Tokenizer
    reference: Any
    original: Backend


@pytest.fixture(scope="module", params=CASES)
def bare(
    request: pytest.FixtureRequest,
    originals: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Bare:
    case = CASES[request.param]
    folder = write(originals, case, tmp_path_factory.mktemp("bare") / "folder")
    original = Backend.from_file(str(originals[case.vocabulary]))
    ours = Tokenizer.load(folder)
    if case.model_type is None:  # transformers must have one
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    original.add_special_tokens([ours.special_text(index) for index in sorted(ours.special_ids)])
    return Bare(case, ours, AutoTokenizer.from_pretrained(folder), original)


def check(bare: Bare, text: str) -> None:
    ids = bare.ours.encode(text)
    assert ids == bare.reference(text).input_ids
    plain = bare.ours.encode(text, add_special_tokens=False)
    assert ids == [*bare.case.prefix, *plain, *bare.case.suffix]
    if "<file_sep>" not in text:  # a mask includes the space before it
        assert plain == bare.original.encode(text, add_special_tokens=False).ids


def test_ids_are_those_of_transformers_and_of_the_original(bare: Bare) -> None:
    for text in [*TEXTS, "a [MASK] b", "x <file_sep>y", " [SEP][CLS]", "<|im_end|> z"]:
        check(bare, text)
    assert bare.ours.special_tokens.prefix == bare.case.prefix
    assert bare.ours.special_tokens.suffix == bare.case.suffix
    assert bare.ours.eos_token_id == bare.reference.eos_token_id
    assert bare.ours.vocab_size == len(bare.reference)


@settings(deadline=None, max_examples=60)
@given(text=st.text() | st.text(alphabet="aB1é世 \n\t.'[]|<>MASKim_start"))
def test_ids_of_any_text(bare: Bare, text: str) -> None:
    check(bare, text)


def test_a_mask_of_roberta_includes_a_space_before_it(
    originals: dict[str, Path], tmp_path: Path
) -> None:
    named = ROBERTA | {"mask_token": "<file_sep>"}
    case = CASES["roberta"]._replace(special_tokens=named)
    ours = Tokenizer.load(write(originals, case, tmp_path / "folder"))
    mask = ours.encode("<file_sep>", add_special_tokens=False)
    assert len(mask) == 1
    assert ours.encode("a <file_sep>b") == [1, *ours.encode("a")[1:2], *mask, *ours.encode("b")[1:]]


def test_added_tokens_of_the_config(originals: dict[str, Path], tmp_path: Path) -> None:
    added = {
        "content": "<tool>", "lstrip": False, "rstrip": False, "normalized": False,
        "single_word": False, "special": True,
    }  # fmt: skip
    written = json.loads(originals["gpt2"].read_text("utf-8"))["model"]["vocab"]
    for number, index in enumerate([len(written), len(written) + 1]):
        config = {"added_tokens_decoder": {str(index): added}}
        case = CASES["gpt2"]._replace(config=config)
        folder = write(originals, case, tmp_path / str(number))
        if index == len(written):
            ours = Tokenizer.load(folder)
            assert ours.encode("<tool>") == [index]
            assert index in ours.special_ids
        else:  # the library would number it in turn
            with pytest.raises(ConfigError, match=r"'<tool>' has the id \d+ in the tokenizer's"):
                Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("gpt2"), "cannot be told from tokenizer_class = None with model_type = None"),
        (Case("gpt2", "llama"), "model_type = 'llama'"),
        (Case("gpt2", "llama", {"tokenizer_class": "GPT2TokenizerFast"}), "cannot be told"),
        (Case("gpt2", "qwen3_5", {"tokenizer_class": "Qwen2Tokenizer"}), "model.tokenizer name"),
        (Case("bert", "bert", {"tokenizer_class": "BertJapaneseTokenizer"}), "cannot be told"),
        (Case("gpt2", "qwen2", {"auto_map": {"AutoTokenizer": ["a.B", None]}}), "in Python: let"),
        (Case("bert", "roberta"), "RobertaTokenizer lacks vocab.json and merges.txt"),
        (Case("gpt2", "bert"), "BertTokenizer lacks vocab.txt"),
        (Case("gpt2", "opt", None, OPT), "set add_bos_token there"),
        (Case("gpt2", "opt", {"add_bos_token": True, "bos_token": "</s>"}), "no file gives an id"),
        (Case("gpt2", "roberta"), "no file gives an id for the special token '<"),
        (Case("gpt2", "gpt2", {"bos_token": ["a"]}), "GPT2Tokenizer cannot read the vocabulary"),
    ],
    ids=str,
)
def test_folders_that_do_not_say_enough_are_refused(
    case: Case, message: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(write(originals, case, tmp_path / "folder"))


def test_lower_casing_is_as_the_config_says(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = write(originals, CASES["bert"], tmp_path / "folder")
    with (folder / "vocab.txt").open("a") as file:
        file.write("The\n")
    with pytest.raises(ConfigError, match=r"upper-case words such as 'The'.*set do_lower_case"):
        Tokenizer.load(folder)
    for lowers in (True, False):
        (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowers}))
        ours = Tokenizer.load(folder)
        assert ours.encode("The") == AutoTokenizer.from_pretrained(folder)("The").input_ids
        assert (ours.encode("The") == ours.encode("the")) is lowers
