"""Reads how a checkpoint is quantized: `quantization_config` of `config.json`, as the field's
quantizers write it (compressed-tensors, transformers' and vLLM's fp8, GPTQ, AWQ, gpt-oss's
MXFP4)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from aioinfer.errors import ConfigError
from aioinfer.layers.formats.schemes import (
    AffineScheme,
    GroupScheme,
    MXFP4Scheme,
    Quantization,
    ScaledScheme,
    Scheme,
)
from aioinfer.models.text_model import possible_names

_Inputs = Literal["dynamic", "static", "none"]
#: The schemes that `model.quantization` gives to weights that are not quantized.
_ONLINE = {
    "fp8": ScaledScheme("fp8", is_online=True),
    "int8": ScaledScheme("int8", is_online=True),
}
#: Tensors of quantized checkpoints that repeat facts from `config.json`.
_GPTQ_UNUSED = (".g_idx", ".qzeros")


def read_quantization(config: Mapping[str, Any], wanted: str = "auto") -> Quantization | None:
    """Returns how the weights of a model are quantized, or None if they are not.

    Args:
        config: the decoded `config.json`.
        wanted: `model.quantization`: "auto" for the checkpoint's scheme, or "fp8" or "int8", in
            which weights that are not quantized are loaded, or "none".

    Raises:
        ConfigError: the checkpoint's scheme is not supported, or `wanted` is another than its own.
    """
    found = config.get("quantization_config")
    if not found:
        if wanted in ("auto", "none"):
            return None
        return Quantization(wanted, [(["Linear"], _ONLINE[wanted])])
    if not isinstance(found, Mapping):
        raise ConfigError("quantization_config must be an object")
    method = found.get("quant_method")
    if method not in _READERS:
        known = ", ".join(_READERS)
        raise ConfigError(
            f"quantization_config.quant_method = {method!r} is not supported; these are: {known}"
        )
    quantization = replace(_READERS[method](found), names_of=possible_names)
    if not quantization.groups and wanted != "auto":
        return Quantization(wanted, [(["Linear"], _ONLINE[wanted])])
    kinds = {getattr(scheme, "kind", None) for _, scheme in quantization.groups}
    if wanted != "auto" and kinds != {wanted}:
        raise ConfigError(
            f"model.quantization = {wanted!r}, but the checkpoint is quantized already ({method})"
        )
    return quantization


def _read_fp8(found: Mapping[str, Any]) -> Quantization:
    """transformers' `FineGrainedFP8Config` and vLLM's fp8."""
    block = _read_block(found.get("weight_block_size"))
    activations = found.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise _unsupported("activation_scheme", activations, ("dynamic", "static"))
    _check_static(block, activations)
    scales = "weight_scale" if block is None else "weight_scale_inv"
    scheme = ScaledScheme("fp8", block, scales, activations)
    ignored = found.get("modules_to_not_convert") or found.get("ignored_layers") or ()
    return Quantization("fp8", [(["Linear"], scheme)], _read_names(ignored))


def _read_gptq(found: Mapping[str, Any]) -> Quantization:
    """GPTQ (Frantar et al. 2023), as AutoGPTQ and GPTQModel write it."""
    layout = found.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _unsupported("checkpoint_format", layout, ("gptq", "gptq_v2"))
    if found.get("lm_head"):
        raise ConfigError("quantization_config.lm_head is not supported for GPTQ")
    blocks = found.get("modules_in_block_to_quantize") or found.get("inside_layer_modules")
    names = [name for block in blocks for name in block] if blocks else ["Linear"]
    groups = [*_read_dynamic(found), (_read_names(names), _read_gptq_scheme(found))]
    # AutoGPTQ writes a bias of zeros for layers that have none
    return Quantization("gptq", groups, ["lm_head"], _GPTQ_UNUSED, zero=(".bias",))


def _read_gptq_scheme(found: Mapping[str, Any]) -> GroupScheme:
    """Returns the scheme of the fields of a configuration, or of a rule of `dynamic`."""
    layout = cast(Literal["gptq", "gptq_v2"], found.get("checkpoint_format", "gptq"))
    has_order, is_symmetric = bool(found.get("desc_act")), bool(found.get("sym", True))
    group_size = _read_group_size(found.get("group_size"))
    return GroupScheme(layout, _read_bits(found), group_size, not is_symmetric, has_order)


def _read_dynamic(found: Mapping[str, Any]) -> list[tuple[Sequence[str], Scheme | None]]:
    """Returns the groups of GPTQModel's `dynamic`, whose keys are regular expressions of modules:
    behind "-:" of those that are not quantized, otherwise, or behind "+:", of those with other
    fields. The first that matches holds."""
    dynamic = found.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise ConfigError(f"quantization_config.dynamic must be an object, not {dynamic!r}")
    groups: list[tuple[Sequence[str], Scheme | None]] = []
    for rule, fields in dynamic.items():
        if not isinstance(fields, Mapping):
            raise ConfigError(f"quantization_config.dynamic: {rule!r} must have an object")
        names = _read_names([f"re:{rule.removeprefix('-:').removeprefix('+:')}"])
        is_kept = rule.startswith("-:")
        groups.append((names, None if is_kept else _read_gptq_scheme({**found, **fields})))
    return groups


def _read_awq(found: Mapping[str, Any]) -> Quantization:
    """AWQ (Lin et al. 2023), as AutoAWQ writes it."""
    version = str(found.get("version", "gemm")).lower()
    if version != "gemm":
        raise _unsupported("version", version, ("gemm",))
    bits = _read_bits(found)
    if bits != 4:
        raise _unsupported("bits", bits, ("4",))
    group_size = _read_group_size(found.get("group_size", found.get("q_group_size")))
    scheme = GroupScheme("awq", bits, group_size, has_zeros=bool(found.get("zero_point", True)))
    ignored = [*_read_names(found.get("modules_to_not_convert") or ()), "lm_head"]
    return Quantization("awq", [(["Linear"], scheme)], ignored)


def _read_compressed(found: Mapping[str, Any]) -> Quantization:
    """compressed-tensors, as llm-compressor writes it."""
    for name in ("sparsity_config", "transform_config"):
        content = found.get(name)
        if content and content.get("format", "") != "dense":
            raise ConfigError(f"quantization_config.{name} is not supported")
    groups = found.get("config_groups")
    if not groups and found.get("kv_cache_scheme"):  # the KV cache alone
        groups = {}
    elif not isinstance(groups, Mapping) or not groups:
        raise ConfigError("quantization_config.config_groups must be an object that is not empty")
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise ConfigError(f"quantization_config.config_groups.{name} must be an object")
    schemes = [
        (_read_names(group.get("targets") or ["Linear"]), _read_group(name, group))
        for name, group in groups.items()
    ]
    ignored = _read_names(found.get("ignore") or ())
    unused = (".weight_shape", ".weight_g_idx", ".input_zero_point")
    return Quantization("compressed-tensors", schemes, ignored, unused)


def _read_group(name: str, group: Mapping[str, Any]) -> Scheme:
    """Returns the scheme of one of `config_groups`."""
    weights, activations = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping) or group.get("output_activations"):
        raise ConfigError(f"quantization_config.config_groups.{name} is not supported: {group}")
    kind, bits, strategy = (weights.get(key) for key in ("type", "num_bits", "strategy"))
    inputs = _read_inputs(name, activations, kind)
    is_plain = strategy in ("tensor", "channel") and weights.get("symmetric", True)
    if (kind, bits) == ("float", 8) and (is_plain or strategy == "block"):
        block = _read_block(weights.get("block_structure", ())) if strategy == "block" else None
        _check_static(block, inputs)
        return ScaledScheme("fp8", block, inputs=inputs)
    if (kind, bits) == ("int", 8) and is_plain and activations:
        return ScaledScheme("int8", inputs=inputs)
    if kind == "int" and bits in (4, 8) and strategy in ("group", "channel") and not activations:
        size = _read_group_size(weights.get("group_size")) if strategy == "group" else None
        has_order = weights.get("actorder") in ("group", "dynamic")
        return GroupScheme("packed", bits, size, not weights.get("symmetric", True), has_order)
    raise ConfigError(
        f"quantization_config.config_groups.{name}: weights of type {kind!r} in {bits!r} bits with "
        f"strategy {strategy!r} and activations {activations!r} are not supported; these are: "
        "8-bit floats by tensor, channel or block; 8-bit integers by tensor or channel with 8-bit "
        "activations; 4-bit and 8-bit integers by channel or group with 16-bit activations"
    )


def _read_inputs(name: str, activations: Mapping[str, Any] | None, kind: Any) -> _Inputs:
    """Returns how the `input_activations` of weights of the type `kind` are quantized."""
    if not activations:
        return "none"
    where = f"quantization_config.config_groups.{name}.input_activations"
    if not isinstance(activations, Mapping):
        raise ConfigError(f"{where} must be an object")
    if not activations.get("symmetric", True) or activations.get("num_bits") != 8:
        raise ConfigError(f"{where} must be symmetric and of 8 bits")
    if activations.get("type", kind) != kind:
        raise ConfigError(f"{where} must be of type {kind!r}, as the weights")
    return "dynamic" if activations.get("dynamic") else "static"


def _read_affine(found: Mapping[str, Any]) -> Quantization:
    """Weights as `checkpoint.gguf` writes them: integers with a scale and an offset for each
    group."""
    groups = [
        (
            _read_names(group["modules"]),
            AffineScheme(group["bits"], group["group_size"], group["has_offsets"]),
        )
        for group in found["groups"]
    ]
    return Quantization("gguf", groups)


def _read_mxfp4(found: Mapping[str, Any]) -> Quantization:
    """transformers' `Mxfp4Config`: the experts of gpt-oss. A "*" in a name stands for any text."""
    given = _read_names(found.get("modules_to_not_convert") or ())
    ignored = [
        f"re:{'.*'.join(map(re.escape, name.split('*')))}(\\.|$)" if "*" in name else name
        for name in given
    ]
    return Quantization("mxfp4", [(["experts"], MXFP4Scheme())], ignored)


def _check_static(block: tuple[int, int] | None, inputs: str) -> None:
    if block is not None and inputs == "static":
        raise ConfigError("quantization_config: static activation scales go with no blocks")


def _read_bits(found: Mapping[str, Any]) -> int:
    bits = found.get("bits", found.get("w_bit"))
    if bits not in (4, 8):
        raise _unsupported("bits", bits, ("4", "8"))
    return cast(int, bits)


def _read_group_size(size: Any) -> int | None:
    """Returns the inputs of a group; -1 stands for all of a row."""
    if size is None or size == -1:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"quantization_config: group_size must be -1 or above 0, not {size!r}")
    return size


def _read_block(block: Any) -> tuple[int, int] | None:
    if block is None:
        return None
    numbers = list(block) if isinstance(block, Sequence) else []
    if len(numbers) != 2 or not all(type(n) is int and n > 0 for n in numbers):
        raise ConfigError(f"quantization_config: a block must be two numbers, not {block!r}")
    return numbers[0], numbers[1]


def _read_names(names: Any) -> list[str]:
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"quantization_config: module names must be a list, not {names!r}")
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name.removeprefix("re:"))
            except re.error as error:
                raise ConfigError(
                    f"quantization_config: {name!r} is no pattern: {error}"
                ) from error
    return list(names)


def _unsupported(key: str, value: Any, known: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"quantization_config.{key} = {value!r} is not supported; these are: {', '.join(known)}"
    )


_READERS: dict[Any, Callable[[Mapping[str, Any]], Quantization]] = {
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "gguf_groups": _read_affine,
    "mxfp4": _read_mxfp4,
}
