"""Weights of 4-bit and 8-bit integers in groups: checkpoints as the published quantizers pack them,
loaded to the numbers that their own formulas give; sharding; models."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer import LLM, SamplingParams
from aioinfer.config import load_config
from aioinfer.engine.served_model import with_speculation
from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats import make_weight
from aioinfer.layers.formats.grouped import GroupedWeight
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard, Source
from aioinfer.models.loader import load_weights
from aioinfer.models.quantization import read_quantization
from benchlib.quantized_folder import (
    Format,
    Groups,
    awq,
    gptq,
    pack,
    packed,
    quantize_folder,
    round_to_groups,
)
from tests.mtp_models import mtp_model
from tests.tiny_models import STATE_FAMILIES, tiny_model

CPU = torch.device("cpu")
OUT, IN = 48, 192
SIZES = [32, 64, 128, None]  # 128 does not divide the inputs


def dequantized_gptq(tensors: dict[str, torch.Tensor], bits: int, added: int) -> torch.Tensor:
    """AutoGPTQ's formula [out, in]: scales[g] * (q - (zeros[g] + 1)), g = g_idx[input], for zero
    points that count as 0 again behind the largest; `added` is 0 for v2."""
    per_word, largest = 32 // bits, 2**bits - 1
    inputs, outputs = len(tensors["g_idx"]), tensors["scales"].shape[1]
    weight = torch.empty(outputs, inputs)
    words, zero_words = tensors["qweight"].long(), tensors["qzeros"].long()
    for k in range(inputs):
        group = int(tensors["g_idx"][k])
        q = words[k // per_word] >> k % per_word * bits & largest
        n = torch.arange(outputs)
        zero = zero_words[group][n // per_word] >> n % per_word * bits & largest
        zero = zero + added & largest
        weight[:, k] = tensors["scales"][group].float() * (q - zero)
    return weight


def dequantized_awq(tensors: dict[str, torch.Tensor], size: int) -> torch.Tensor:
    """AutoAWQ's formula [out, in]: the words' four-bit parts are the columns 0 2 4 6 1 3 5 7."""
    inputs, outputs = len(tensors["qweight"]), tensors["scales"].shape[1]
    weight = torch.empty(outputs, inputs)
    for n in range(outputs):
        shift = (0, 2, 4, 6, 1, 3, 5, 7).index(n % 8) * 4
        q = tensors["qweight"][:, n // 8].long() >> shift & 15
        zero = tensors["qzeros"][:, n // 8].long() >> shift & 15
        group = torch.arange(inputs) // size
        weight[n] = tensors["scales"][:, n].float()[group] * (q - zero[group])
    return weight


def dequantized_packed(
    tensors: dict[str, torch.Tensor], bits: int, size: int | None
) -> torch.Tensor:
    """compressed-tensors' formula [out, in]: integers and zero points are signed, and stored larger
    by 2 ** (bits - 1)."""
    outputs, inputs = tensors["weight_shape"].tolist()
    per_word, half = 32 // bits, 2 ** (bits - 1)
    weight = torch.empty(outputs, inputs)
    index = tensors.get("weight_g_idx")
    for k in range(inputs):
        group = k // (size or inputs) if index is None else int(index[k])
        word = tensors["weight_packed"][:, k // per_word].long()
        q = (word >> k % per_word * bits & 2**bits - 1) - half
        zero: Any = 0
        if "weight_zero_point" in tensors:
            n = torch.arange(outputs)
            words = tensors["weight_zero_point"][n // per_word, group].long()
            zero = (words >> n % per_word * bits & 2**bits - 1) - half
        weight[:, k] = tensors["weight_scale"][:, group].float() * (q - zero)
    return weight


def own_dequantization(format: Format, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    config = format.config
    if config["quant_method"] == "awq":
        inputs, size = len(tensors["qweight"]), config["group_size"]
        return dequantized_awq(tensors, inputs if size == -1 else size)
    if config["quant_method"] == "gptq":
        return dequantized_gptq(tensors, config["bits"], config["checkpoint_format"] == "gptq")
    weights = config["config_groups"]["group_0"]["weights"]
    return dequantized_packed(tensors, weights["num_bits"], weights["group_size"])


def load(
    format: Format,
    folder: Path,
    columns: Shard | None = None,
    rows: Sequence[Shard] | None = None,
    load_format: str = "auto",
) -> GroupedWeight:
    """Returns the weight of modules "x0", "x1", ..., one for each of `rows`, from a folder."""
    rows = rows or [Shard.whole(OUT)]
    sources = [Source(f"x{index}", shard) for index, shard in enumerate(rows)]
    quantization = read_quantization({"quantization_config": dict(format.config)})
    assert quantization is not None
    backend = Backend(CPU, torch.float32, ParallelGroup.single())
    weight = make_weight(sources, columns or Shard.whole(IN), backend, quantization)
    assert isinstance(weight, GroupedWeight)
    shards = list(weight.weight_shards())
    load_weights(shards, folder, load_format, 0, lambda done, total: None, lambda name: True)
    return weight


def save(format: Format, folder: Path, count: int = 1, out: int = OUT, inputs: int = IN) -> Any:
    """Saves random modules "x0" and so on; returns the tensors of each."""
    generator = torch.Generator().manual_seed(0)
    # each with a mean and a scale of its own, so that zero points differ
    made = []
    for index in range(count):
        weight = torch.randn(out, inputs, generator=generator) * (index + 1) + 0.5
        made.append({name: part.contiguous() for name, part in format.tensors(weight).items()})
    named = {
        f"x{i}.{name}": part for i, tensors in enumerate(made) for name, part in tensors.items()
    }
    save_file(named, folder / "model.safetensors")
    return made


ALL: dict[str, Format] = {}
for _size in SIZES:
    for _bits in (4, 8):
        for _symmetric in (True, False):
            _groups = Groups(_bits, _size, _symmetric)
            _name = f"{_bits} bits of {_size}{'' if _symmetric else ' with zeros'}"
            ALL[f"gptq {_name}"] = gptq(_groups)
            ALL[f"packed {_name}"] = packed(_groups)
    ALL[f"gptq_v2 of {_size}"] = gptq(Groups(4, _size, False), is_v2=True)
    ALL[f"awq of {_size}"] = awq(_size)
for _bits in (4, 8):
    ALL[f"gptq {_bits} bits ordered"] = gptq(Groups(_bits, 32, False, seed=1))
    ALL[f"packed {_bits} bits ordered"] = packed(Groups(_bits, 32, False, seed=1))


@pytest.mark.parametrize("name", ALL)
def test_a_weight_is_what_its_own_formula_gives(name: str, tmp_path: Path):
    format = ALL[name]
    (tensors,) = save(format, tmp_path)
    assert torch.equal(load(format, tmp_path).dequantized(), own_dequantization(format, tensors))


def test_the_largest_zero_point_is_stored_as_zero_by_auto_gptq(tmp_path: Path):
    """16 does not exist: AutoGPTQ's 15, one less, stands for a zero point of 0."""
    format = gptq(Groups(4, 32, False))
    (tensors,) = save(format, tmp_path)
    zeros = torch.arange(IN // 32 * OUT).view(-1, OUT) % 16
    tensors["qzeros"] = pack((zeros - 1) % 16, 4, 1)
    save_file(
        {f"x0.{name}": part for name, part in tensors.items()}, tmp_path / "model.safetensors"
    )
    weight = load(format, tmp_path)
    assert torch.equal(weight.unpacked(weight._sources[0], weight._parts[0])[2], zeros.t())
    assert torch.equal(weight.dequantized(), own_dequantization(format, tensors))


def test_rounding_is_within_half_a_step():
    weight = torch.randn(16, 256)
    for groups in (Groups(4, 64), Groups(4, 64, False), Groups(8, None, False), Groups(8, 32)):
        rounded = round_to_groups(weight, groups)
        scales = rounded.scales.float()[:, rounded.group_of]
        values = (rounded.integers - rounded.zeros[:, rounded.group_of]) * scales
        # float16 scales and zero points that are rounded, too, move the ends by another half
        assert ((values - weight).abs() <= 1.02 * scales).all()
        assert ((values - weight).abs() <= 0.51 * scales).float().mean() > 0.97


# ------------------------------------------------------------------------------ shards

SHARDED = {
    "gptq": gptq(Groups(4, 32, False)),
    "gptq ordered": gptq(Groups(4, 32, False, seed=2)),
    "awq": awq(32),
    "packed": packed(Groups(4, 32, False)),
    "packed of 128": packed(Groups(4, 128)),
    "packed rows": packed(Groups(8, None, False)),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SHARDED)
def test_shards_are_parts_of_the_whole(name: str, ranks: int, tmp_path: Path):
    """Rows of merged modules, and columns: 192 over 2 ranks are three groups of 32 each, and begin
    within a group of 128."""
    format = SHARDED[name]
    made = save(format, tmp_path, 2)
    whole = [own_dequantization(format, tensors) for tensors in made]
    for rank in range(ranks):
        rows = Shard.of_rank(OUT, rank, ranks)
        weight = load(format, tmp_path, rows=[rows, rows]).dequantized()
        taken = slice(rows.start, rows.start + rows.size)
        assert torch.equal(weight, torch.cat([part[taken] for part in whole]))
        columns = Shard.of_rank(IN, rank, ranks)
        weight = load(format, tmp_path, columns).dequantized()
        assert torch.equal(weight, whole[0][:, columns.start : columns.start + columns.size])


@pytest.mark.parametrize(
    ("format", "rows", "columns"),
    [
        (awq(32), Shard(12, 12, OUT), Shard.whole(IN)),
        (gptq(Groups(4, 32, False)), Shard(12, 12, OUT), Shard.whole(IN)),
        (gptq(), Shard.whole(OUT), Shard(12, 12, IN)),
        (packed(), Shard.whole(OUT), Shard(12, 12, IN)),
    ],
)
def test_shards_that_cut_words_are_refused(format: Format, rows: Shard, columns: Shard):
    expected = "x0: 12 features from 12 on cannot be taken out of 4-bit integers.*fewer tensor-par"
    with pytest.raises(ConfigError, match=expected):
        load(format, Path("nowhere"), columns, [rows], "dummy")


def test_shards_that_cut_groups_are_right(tmp_path: Path):
    """A rank's inputs may begin within a group: it loads the scales of all groups it touches."""
    format = packed(Groups(4, 128, False))
    (tensors,) = save(format, tmp_path, inputs=384)
    whole = own_dequantization(format, tensors)
    for rank in range(2):
        columns = Shard.of_rank(384, rank, 2)
        part = load(format, tmp_path, columns).dequantized()
        assert torch.equal(part, whole[:, columns.start : columns.start + columns.size])


# ------------------------------------------------------------------------------ folders

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
FOLDERS = {
    "gptq": gptq(Groups(4, 32, False, seed=4)),
    "awq": awq(64),
    "packed": packed(Groups(4, 32, False)),
}


def settings(ranks: int) -> dict[str, Any]:
    return {
        "parallel.device": "cpu",
        "parallel.tensor_parallel_size": ranks,
        "parallel.executor": "inline" if ranks == 1 else "multiprocess",
        "model.dtype": "float32",
        "model.tokenizer": "none",
    }


def generate(folder: Path, ranks: int = 1, method: str = "auto") -> list[list[int]]:
    prompts = [[5, 6, 7], [9, 3, 100, 42, 8]]
    given = settings(ranks) | {"speculation.method": method}
    with LLM(str(folder), settings=given, progress=False) as llm:
        return [output.token_ids for output in llm.generate(prompts, GREEDY)]


def dequantize_folder(folder: Path, out: Path) -> Path:
    """Writes the folder of a quantized model with its weights as their own formula gives them."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    format = Format(lambda weight: {}, config.pop("quantization_config"))
    tensors = load_file(folder / "model.safetensors")
    integers = ".qweight", ".weight_packed"
    modules = sorted(name.rpartition(".")[0] for name in tensors if name.endswith(integers))
    for module in modules:
        own = {
            name.rpartition(".")[2]: tensors.pop(name)
            for name in list(tensors)
            if name.startswith(f"{module}.") and not name.endswith(".bias")
        }
        tensors[f"{module}.weight"] = own_dequantization(format, own)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "dense"
    return tiny_model("qwen2", folder, hidden_size=64, intermediate_size=96)


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_are_those_of_the_dequantized_model(name: str, dense: Path, tmp_path: Path):
    quantized = quantize_folder(dense, tmp_path / "quantized", FOLDERS[name])
    expected = generate(dequantize_folder(quantized, tmp_path / "dequantized"))
    assert generate(quantized) == expected
    assert expected != generate(dense), "rounding to 4 bits changes nothing here"


#: Of models with states: what quantizers leave as it is.
UNQUANTIZED = (
    "in_proj_ba", "in_proj_a", "in_proj_b", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj",
    "g_b_proj", "gate", "shared_expert_gate", "router.layer", "conv1d", "conv", "q_conv1d",
    "k_conv1d", "v_conv1d",
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "name"), [*zip(STATE_FAMILIES, cycle(("gptq", "packed")), strict=False)]
)
def test_layers_with_states(family: str, name: str, tmp_path: Path):
    dense = tiny_model(family, tmp_path / "dense", hidden_size=64)
    kept = "|".join(map(re.escape, UNQUANTIZED))
    linear = re.compile(
        rf"(model|backbone)\.layers\.\d+\.(?!.*\b({kept})\.weight)(?!.*norm).*\.weight"
    )
    quantized = quantize_folder(dense, tmp_path / "quantized", FOLDERS[name], linear)
    config = json.loads((quantized / "config.json").read_text("utf-8"))
    given = config["quantization_config"]
    given["dynamic"] = {rf"-:.*\.{module}$": {} for module in UNQUANTIZED}
    given["ignore"] = ["lm_head", *(rf"re:.*\.{module}$" for module in UNQUANTIZED)]
    (quantized / "config.json").write_text(json.dumps(config), "utf-8")
    expected = generate(dequantize_folder(quantized, tmp_path / "dequantized"))
    assert generate(quantized) == expected
    assert expected != generate(dense)


def test_a_head_that_rules_leave_as_it_is(tmp_path: Path):
    """With the rules of published checkpoints of Qwen3.5: experts are quantized, and not attention,
    the shared expert and the head for further tokens, which drafts."""
    dense, _ = mtp_model("qwen3_5_moe", tmp_path / "dense", hidden_size=64)
    linear = re.compile(r"model\.layers\.\d+\.mlp\.experts\..*\.weight")
    quantized = quantize_folder(dense, tmp_path / "quantized", FOLDERS["gptq"], linear)
    config = json.loads((quantized / "config.json").read_text("utf-8"))
    left = "attn", "shared_expert", "mtp", "visual"
    rules = {"lm_head": {}, **{f"-:.*{module}.*": {} for module in left}}
    config["quantization_config"]["dynamic"] = rules
    (quantized / "config.json").write_text(json.dumps(config), "utf-8")
    expected = generate(quantized, method="none")
    assert (
        generate(dequantize_folder(quantized, tmp_path / "dequantized"), method="none") == expected
    )
    assert generate(quantized, method="auto") == expected
    settings_of_auto = load_config(None, [f"model.path={quantized}"])
    assert with_speculation(settings_of_auto, quantized).speculation.method == "mtp"


@pytest.mark.extended
def test_two_ranks(dense: Path, tmp_path: Path):
    quantized = quantize_folder(dense, tmp_path / "quantized", FOLDERS["packed"])
    assert generate(quantized, 2) == generate(quantized)


@pytest.mark.parametrize("name", ["gptq", "awq", "packed"])
def test_random_weights(name: str, dense: Path, tmp_path: Path):
    """No files but the configuration are there; the weights are as spread as dense ones."""
    format = {**FOLDERS, "gptq": gptq(Groups(4, 32, seed=4))}[name]
    weight = load(format, tmp_path, load_format="dummy")
    assert 0.015 < float(weight.dequantized().std()) < 0.045
    config = json.loads((dense / "config.json").read_text("utf-8"))
    config["quantization_config"] = dict(format.config)
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with LLM(
        str(tmp_path), settings={**settings(1), "model.load_format": "dummy"}, progress=False
    ) as llm:
        assert len(llm.generate([[5, 6, 7]], GREEDY)[0].token_ids) == 12


def rewritten(folder: Path, out: Path, **changes: torch.Tensor | None) -> Path:
    """Writes a folder with tensors replaced, added, or (None) left out."""
    out.mkdir()
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, out / "model.safetensors")
    return out


def test_biases_of_zeros_are_accepted(dense: Path, tmp_path: Path):
    """AutoGPTQ writes them for layers that have none."""
    quantized = quantize_folder(dense, tmp_path / "quantized", gptq(Groups(4, 32)))
    name = "model.layers.1.mlp.down_proj.bias"
    zeros = rewritten(quantized, tmp_path / "zeros", **{name: torch.zeros(64).half()})
    assert generate(zeros) == generate(quantized)
    other = rewritten(quantized, tmp_path / "other", **{name: torch.ones(64).half()})
    with pytest.raises(ConfigError, match=rf"1 unknown \({name}\)"):
        generate(other)


def test_missing_and_misshapen_tensors_are_named(dense: Path, tmp_path: Path):
    quantized = quantize_folder(dense, tmp_path / "quantized", packed(Groups(4, 32, False)))
    module = "model.layers.0.mlp.down_proj"
    less = rewritten(quantized, tmp_path / "less", **{f"{module}.weight_scale": None})
    with pytest.raises(ConfigError, match=rf"1 missing \({module}.weight_scale\)"):
        generate(less)
    narrow = torch.zeros(64, 2).half()
    narrow_folder = rewritten(quantized, tmp_path / "narrow", **{f"{module}.weight_scale": narrow})
    with pytest.raises(ConfigError, match=rf"{module}.weight_scale has the shape \[64, 2\]"):
        generate(narrow_folder)
    floats = rewritten(
        quantized, tmp_path / "floats", **{f"{module}.weight_packed": torch.zeros(64, 12)}
    )
    with pytest.raises(ConfigError, match=rf"{module}.weight_packed .* type F32.*I32"):
        generate(floats)
