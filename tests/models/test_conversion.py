"""Conversion of real files: every stored type, and little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from transformers import AutoConfig

from aioinfer.checkpoint.gguf_file import GgufFile
from tests.models.files import GEMMA, QWEN

ROOT = Path(__file__).parents[2]
#: Of all memory that a process may write to, file pages aside; the model has 2.5 GB.
MEMORY_LIMIT = 1 << 30
CONVERT = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]), int(sys.argv[1])))
from aioinfer.checkpoint.gguf import convert_gguf
convert_gguf(Path(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.mark.parametrize("name", [QWEN, GEMMA])
def test_every_stored_type_is_dequantized_as_the_gguf_package_does(
    name: str, converted: Callable[[str], Path], gguf_path: Callable[[str], Path]
):
    """The last tensor of each type, whose name in the folder is found by its values' size."""
    file = GgufFile(gguf_path(name))
    by_type = {
        tensor.type: tensor
        for tensor in file.tensors.values()
        if tensor.name.endswith(("_q.weight", "_v.weight", "ffn_up.weight", "ffn_down.weight"))
    }
    assert len(by_type) >= 3
    names = {"attn_q": "self_attn.q_proj", "attn_v": "self_attn.v_proj",
             "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip
    with safe_open(converted(name) / "model.safetensors", framework="np") as stored:
        for kind, tensor in by_type.items():
            _, layer, stem, _ = tensor.name.split(".")
            values = stored.get_tensor(f"model.layers.{layer}.{names[stem]}.weight")
            assert values.dtype == np.float32
            expected = gguf.dequantize(tensor.rows, kind)
            assert np.array_equal(values, expected), tensor.name


def test_a_model_of_2_gigabytes_is_converted_in_1(tmp_path: Path, gguf_path: Callable[[str], Path]):
    subprocess.run(
        [sys.executable, "-c", CONVERT, str(MEMORY_LIMIT), str(gguf_path(QWEN)), str(tmp_path)],
        check=True,
        cwd=ROOT,
    )
    file = tmp_path / "model.safetensors"
    assert file.stat().st_size > 2 * MEMORY_LIMIT
    file.unlink()


def test_the_configuration_of_gemma_3_270m(converted: Callable[[str], Path]):
    """As published, as far as a GGUF file of it goes."""
    config = AutoConfig.from_pretrained(converted(GEMMA))
    assert (config.model_type, config.architectures) == ("gemma3_text", ["Gemma3ForCausalLM"])
    found = (config.hidden_size, config.intermediate_size, config.num_hidden_layers)
    assert found == (640, 2048, 18)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 256)
    assert (config.query_pre_attn_scalar, config.sliding_window) == (256, 512)
    found = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert found == [5, 11, 17]
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000
    assert config.tie_word_embeddings
    assert config.final_logit_softcapping is None
    found = json.loads((converted(GEMMA) / "generation_config.json").read_text())
    assert found == {"bos_token_id": 2, "eos_token_id": 1}
