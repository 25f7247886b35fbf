"""Models without a file of ours against transformers: logits of all positions, however the text is
cut and batched, and what is refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PersimmonConfig,
    PersimmonForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.fallback import FallbackModel
from aioinfer.models.registry import build_model, families, load_model_config
from tests.paged_model import CPU, PagedModel, model_options
from tests.test_models import TEXTS, VOCAB, assert_close, reference_logits
from tests.tiny_models import randomize

SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "max_position_embeddings": 512, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
#: Layer norms with biases and a window; a scaled head, one norm for both parts of a layer; a merged
#: projection, rotation of a part of the channels; norms by head.
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "starcoder2": (Starcoder2Config, Starcoder2ForCausalLM,
                   {"num_key_value_heads": 2, "sliding_window": 7, "initializer_range": 0.3}),
    "cohere": (CohereConfig, CohereForCausalLM, {"num_key_value_heads": 2, "logit_scale": 0.3}),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM, {"rotary_pct": 0.5}),
    "persimmon": (PersimmonConfig, PersimmonForCausalLM,
                  {"qk_layernorm": True, "initializer_range": 0.3}),
}  # fmt: skip


def save(name: str, folder: Path, **fields: Any) -> Path:
    """Saves a random model into `folder` and returns it."""
    config_class, model_class, own = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SHAPE, **own, **fields}))
    randomize(model)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, group: ParallelGroup | None = None, **options: Any) -> FallbackModel:
    backend = Backend(CPU, torch.float32, group or ParallelGroup.single())
    model = build_model(folder, backend, model_options(**options))
    assert isinstance(model, FallbackModel)
    model.load(folder, "auto", 0, lambda done, total: None)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert theirs.config.architectures[0] not in families()
    expected = reference_logits(theirs)
    assert len(set(torch.cat(expected).argmax(-1).tolist())) > 25
    model = load(folder)
    logits = PagedModel(model, 16).step(dict(enumerate(TEXTS)))
    assert_close([logits[number] for number in range(len(TEXTS))], expected)
    assert_close(PagedModel(model, 4).run_at_random(TEXTS, longest=12, seed=1), expected)
    architecture = theirs.config.architectures[0]
    assert model.describe(16).startswith(f"transformers' modules of {architecture}")


@pytest.mark.parametrize(("served_len", "original"), [(64, 1), (20, 64)])
def test_longrope_by_the_longest_sequence_that_is_served(
    served_len: int, original: int, tmp_path: Path
) -> None:
    """Beside texts on both sides of the original length: transformers, which has the factors of
    each call's longest text, is given another original length, so that they are the same for
    all."""
    rope = {
        "rope_type": "longrope", "rope_theta": 100.0, "attention_factor": 1.1,
        "short_factor": [1.0, 1.2, 1.4, 1.6], "long_factor": [2.0, 3.0, 4.0, 5.0],
    }  # fmt: skip
    folders = [
        save(
            "cohere", tmp_path / str(length), max_position_embeddings=64,
            rope_parameters={**rope, "original_max_position_embeddings": length},
        )
        for length in (20, original)
    ]  # fmt: skip
    theirs = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32).eval()
    expected = reference_logits(theirs)
    model = load(folders[0], max_model_len=served_len)
    assert_close(PagedModel(model, 4).run_at_random(TEXTS, longest=12, seed=1), expected)


def test_weights_are_counted_and_may_be_random(tmp_path: Path) -> None:
    folder = save("cohere", tmp_path)
    read = load(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert read.weights_bytes == 4 * theirs.num_parameters()
    (folder / "model.safetensors").unlink()
    model = build_model(folder, Backend(CPU, torch.float32, ParallelGroup.single()))
    progress: list[tuple[int, int]] = []
    model.load(folder, "dummy", 3, lambda done, total: progress.append((done, total)))
    assert progress == [(read.weights_bytes, read.weights_bytes)]


def test_the_window_is_part_of_what_layers_keep(tmp_path: Path) -> None:
    specs = load(save("starcoder2", tmp_path)).kv_specs
    assert [[spec.window for spec in of_layer] for of_layer in specs] == [[7], [7]]


def test_models_that_cannot_run_are_rejected_by_name(tmp_path: Path) -> None:
    PegasusForConditionalGeneration(
        PegasusConfig(
            vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16,
            decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2,
        )
    ).save_pretrained(tmp_path / "pegasus")  # fmt: skip
    with pytest.raises(ConfigError, match="PegasusForConditionalGeneration is not a decoder"):
        load_model_config(tmp_path / "pegasus")
    MambaForCausalLM(
        MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2)
    ).save_pretrained(tmp_path / "mamba")
    with pytest.raises(ConfigError, match="MambaForCausalLM has "):
        load(tmp_path / "mamba")


def test_code_of_a_checkpoint_is_not_run_unless_trusted(tmp_path: Path) -> None:
    """The code leaves a file behind when it runs."""
    (tmp_path / "config.json").write_text(
        '{"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": '
        '{"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}}'
    )
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\n"
        f"Path({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code = true"):
        load_model_config(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert load_model_config(tmp_path, model_options(trust_remote_code=True)).vocab_size == 32_000
    assert (tmp_path / "ran").exists()


class ThreadRank(ParallelGroup):
    """A rank in a thread of this process; the threads meet at each sum."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, parts: dict[int, Any]):
        super().__init__(rank, size)
        self._barrier, self._parts = barrier, parts

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        self._parts[self.rank] = values
        self._barrier.wait(60)
        total = torch.stack([self._parts[rank] for rank in range(self.size)]).sum(0)
        self._barrier.wait(60)
        return total


@pytest.mark.parametrize("name", ["starcoder2", "gpt_neox"])
def test_ranks_split_a_model_by_its_plan(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(name, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    barrier, parts, lock = threading.Barrier(2), {}, threading.Lock()
    read = AutoModelForCausalLM.from_pretrained

    def read_alone(*arguments: Any, **options: Any) -> Any:
        with lock:  # transformers loads one model at a time in a process
            return read(*arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read_alone)

    def run(rank: int) -> tuple[FallbackModel, list[torch.Tensor]]:
        model = load(folder, ThreadRank(rank, 2, barrier, parts))
        return model, PagedModel(model, 4).run_at_random(TEXTS, longest=12, seed=1)

    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(run, range(2)))
    for model, logits in ranks:
        assert model.weights_bytes < 0.8 * sum(p.nbytes for p in theirs.parameters())
        assert_close(logits, reference_logits(theirs))
        for ours, first in zip(logits, ranks[0][1], strict=True):
            assert torch.equal(ours, first), "ranks sample from the same logits"


def test_a_model_without_a_plan_has_one_rank(tmp_path: Path) -> None:
    folder = save("persimmon", tmp_path)
    config = load_model_config(folder)
    config.check_tensor_parallel(1)
    with pytest.raises(ConfigError, match=r"expert_parallel = true is not supported for "):
        config.check_tensor_parallel(1, expert_parallel=True)
    with pytest.raises(ConfigError, match=r"tp_plan.*PersimmonForCausalLM"):
        config.check_tensor_parallel(2)
