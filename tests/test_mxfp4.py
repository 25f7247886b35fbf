"""MXFP4 against transformers' own dequantization, and checkpoints of gpt-oss in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.mxfp4 import dequantize
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.json_file import read_json
from aioinfer.models.quantization import read_quantization
from aioinfer.models.registry import build_model
from tests.mxfp4_models import quantize_experts
from tests.paged_model import CPU, PagedModel, load_model, model_options
from tests.tiny_models import tiny_model

SINGLE = ParallelGroup.single()
TEXTS = {0: list(range(3, 40)), 1: [7], 2: list(range(60, 90))}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and one in bfloat16 with the weights that transformers reads in it."""
    root = tmp_path_factory.mktemp("mxfp4")
    tiny = tiny_model("gpt_oss", root / "tiny", dtype=torch.bfloat16)
    return quantize_experts(tiny, root / "mxfp4", dense=root / "dense"), root / "dense"


def build(folder: Path, load_format: str = "auto", quantization: str = "auto") -> DecoderModel:
    model = build_model(
        folder, Backend(CPU, torch.float32, SINGLE), model_options(quantization=quantization)
    )
    assert isinstance(model, DecoderModel)
    model.load(folder, load_format, 0, lambda done, total: None)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_at_every_scale_is_that_of_transformers(dtype: torch.dtype) -> None:
    """Bit for bit, also the smallest numbers and infinities. The last code is NaN, where
    transformers reads it as 2 ** 128."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)  # every pair of codes
    blocks = codes.expand(255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16).contiguous()
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].t()
    found = dequantize(blocks, scales).to(dtype)
    assert found.shape == (255, 512)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(found.view(bits), expected.contiguous().view(bits))
    assert len(found[120].unique()) == 15
    assert dequantize(blocks, torch.full_like(scales, 255)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_gives_the_logits_of_its_dequantized_weights(
    folders: tuple[Path, Path], dtype: torch.dtype
) -> None:
    found, expected = (
        PagedModel(load_model(folder, SINGLE, dtype), 16, dtype).step(TEXTS) for folder in folders
    )
    for name in TEXTS:
        assert torch.equal(found[name], expected[name])


def test_the_logits_are_those_of_transformers(folders: tuple[Path, Path]) -> None:
    found = PagedModel(load_model(folders[0], SINGLE), 4).run_at_random(
        list(TEXTS.values()), longest=9, seed=2
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        folders[1], dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for text, logits in zip(TEXTS.values(), found, strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([text])).logits[0]
        assert (logits - expected).abs().max() < 2e-4 * expected.std()


def test_experts_that_are_left_out(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Those of layer 0 in MXFP4, those of layer 1 in bfloat16."""
    mixed = quantize_experts(
        folders[1], tmp_path / "mixed", dense=tmp_path / "dense", left_out=(1,)
    )
    found, expected = (
        PagedModel(load_model(folder, SINGLE), 16).step(TEXTS)[0]
        for folder in (mixed, tmp_path / "dense")
    )
    assert torch.equal(found, expected)


def test_modules_that_are_quantized(folders: tuple[Path, Path]) -> None:
    quantization = read_quantization(read_json(folders[0] / "config.json"))
    assert quantization is not None
    layer = "model.layers.11"
    assert quantization.scheme_of(f"{layer}.mlp.experts.gate_up_proj") is not None
    for module in (f"{layer}.self_attn.q_proj", f"{layer}.mlp.router", "lm_head"):
        assert quantization.scheme_of(module) is None
    # also where a pattern alone leaves them out
    found = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.*.mlp.experts"]}
    quantization = read_quantization({"quantization_config": found})
    assert quantization is not None
    assert quantization.scheme_of(f"{layer}.mlp.experts.gate_up_proj") is None


def test_the_start_up_table_says_what_becomes_of_them(folders: tuple[Path, Path]) -> None:
    quantized, dense = map(build, folders)
    assert quantized.describe(16) == (
        "plain torch; quantized weights (mxfp4), dequantized to float32 when they are loaded"
    )
    assert dense.describe(16) == "plain torch"


def test_random_weights(folders: tuple[Path, Path]) -> None:
    """As spread as dense ones."""
    model = build_model(folders[0], Backend(CPU, torch.float32, SINGLE))
    assert isinstance(model, DecoderModel)
    model.load(folders[0], "dummy", 0, lambda done, total: None)
    expert = model.layers[0].parts[1].experts[0]  # type: ignore[union-attr]
    product = expert.down.multiply(torch.eye(96))
    assert 0.015 < product.std() < 0.045


def test_what_is_not_supported(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"quantized already \(mxfp4\)"):
        build(folders[0], quantization="fp8")
    message = r"experts\.gate_up_proj holds the weights of all experts .* fp8 is not"
    with pytest.raises(ConfigError, match=message):
        build(folders[1], quantization="fp8")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("down_proj_scales", None, r"1 missing \(model.layers.0.mlp.experts.down_proj_scales\)"),
        ("gate_up_proj_blocks", torch.zeros(8, 192, 2, 8, dtype=torch.uint8),
         r"has the shape \[8, 192, 2, 8\]; by config.json it should be \[8, 192, 2, 16\]"),
        ("down_proj_scales", torch.zeros(8, 64, 3), r"of the type F32; it should be one of U8"),
        ("down_proj_bias", torch.zeros(7, 64), r"the shape \[7, 64\]; by .* be \[8, 64\]"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(
    folders: tuple[Path, Path], tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    (tmp_path / "config.json").write_bytes((folders[0] / "config.json").read_bytes())
    tensors = load_file(folders[0] / "model.safetensors")
    name = f"model.layers.0.mlp.experts.{name}"
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        build(tmp_path)
