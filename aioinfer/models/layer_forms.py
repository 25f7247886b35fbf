"""Forms of layers: what the kernels that a layer launches depend on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields, is_dataclass

import torch

from aioinfer.layers.layer import Layer


def find_equal_layers(layers: Sequence[Layer], numbers: Sequence[int]) -> frozenset[int]:
    """Returns the numbers of layers that launch the kernels of layers before them: those that have
    the form of a layer before them which follows a layer of the same form, too."""
    forms = [_form_of_layer(layer) for layer in layers]
    seen, needed = set(), set()
    for index, pair in enumerate(zip([None, *forms], forms, strict=False)):
        if pair not in seen:
            seen.add(pair)
            needed |= {index - 1, index}  # a layer's first norm sums what is left of the former
    return frozenset(
        number for index, number in enumerate(numbers[: len(forms)]) if index not in needed
    )


def _form_of_layer(layer: Layer) -> Hashable:
    """Returns what a layer's kernels depend on; differences that no kernel depends on may make
    forms unequal."""
    leaves = [leaf for part in layer.parts for leaf in part.leaves]
    forms = [(type(leaf), *leaf.kinds, *_forms_of_attributes(leaf)) for leaf in leaves]
    return layer.kv_specs, *_forms_of_attributes(layer), *forms


def _forms_of_attributes(value: object) -> list[Hashable]:
    return [(name, _form_of(attribute)) for name, attribute in vars(value).items()]


def _form_of(value: object) -> Hashable:
    """Returns dtype and shape of a tensor, the forms of a dataclass's fields, the type of another
    object with attributes, and anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.dtype, *value.shape
    if isinstance(value, tuple | list):
        return tuple(map(_form_of, value))
    if is_dataclass(value) and isinstance(value, Hashable):
        return type(value), *(_form_of(getattr(value, each.name)) for each in fields(value))
    has_attributes = hasattr(value, "__dict__") and not isinstance(value, type)
    return value if isinstance(value, Hashable) and not has_attributes else type(value)
