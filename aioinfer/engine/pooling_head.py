"""What is applied to pooled states in the server's process: a checkpoint's classification head, or
the dense modules of sentence-transformers. They are a few products of one vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aioinfer.errors import ConfigError
from aioinfer.ipc.sections import F32
from aioinfer.models.json_file import read_json


def _gelu(x: F32) -> F32:
    import torch  # numpy has no error function

    return torch.nn.functional.gelu(torch.from_numpy(np.ascontiguousarray(x))).numpy()


#: Activations by the names that configurations have for them.
_ACTIVATIONS: Mapping[str, Callable[[F32], F32]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A product with an activation and a norm behind it.

    Attributes:
        weight: float32 [out, in].
        bias: float32 [out], or None.
        activation: a name of `_ACTIVATIONS`.
        norm: weight, bias and epsilon of a LayerNorm behind it, or None.
    """

    weight: F32
    bias: F32 | None = None
    activation: str = "identity"
    norm: tuple[F32, F32 | None, float] | None = None

    def __call__(self, x: F32) -> F32:
        """Returns float32 [..., out] for x, float32 [..., in]."""
        product = x @ self.weight.T
        if self.bias is not None:
            product = product + self.bias
        product = _ACTIVATIONS[self.activation](product)
        if self.norm is None:
            return product
        weight, bias, eps = self.norm
        centred = product - product.mean(-1, keepdims=True)
        normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight
        return normed if bias is None else normed + bias


@dataclass(frozen=True, slots=True)
class ClassificationHead:
    """The classification head of a checkpoint: maps the pooled state to classes.

    Attributes:
        layers: applied one after the other; the last one gives the logits of the classes.
        labels: the names of the classes.
        pooling: how the state is pooled, one of `sampling_params.POOLINGS`.
        activation: "softmax", "sigmoid" or "identity", of the logits.
    """

    layers: tuple[DenseLayer, ...]
    labels: tuple[str, ...]
    pooling: str = "last"
    activation: str = "softmax"

    def logits(self, states: F32) -> F32:
        """Returns float32 [..., classes] for pooled states [..., hidden_size]."""
        for layer in self.layers:
            states = layer(states)
        return states

    def probabilities(self, states: F32) -> F32:
        """Returns float32 [..., classes], the activation of the logits, for pooled states [...,
        hidden_size]."""
        logits = self.logits(states).astype(np.float64)
        if self.activation == "sigmoid":
            return (1 / (1 + np.exp(-logits))).astype(np.float32)
        if self.activation == "identity":
            return logits.astype(np.float32)
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        return (powers / powers.sum(-1, keepdims=True)).astype(np.float32)


def read_head(folder: Path) -> ClassificationHead | None:
    """Returns the classification head of a checkpoint, or None if its architecture has none.

    Raises `ConfigError` if its weights are not there.
    """
    config = read_json(folder / "config.json", missing_ok=True)
    names = config.get("architectures") or [""]
    architecture, is_head, _ = str(names[0]).partition("ForSequenceClassification")
    if not is_head:
        return None
    read = _HEADS.get(architecture, _read_decoder_head)
    layers, pooling = read(_Tensors(folder), config)
    count = len(layers[-1].weight)
    given = config.get("id2label") or {}
    labels = (given.get(str(number), f"LABEL_{number}") for number in range(count))
    return ClassificationHead(layers, tuple(labels), pooling, _read_activation(config, count))


def _read_activation(config: Mapping[str, Any], num_labels: int) -> str:
    """Returns the activation of a head's logits; a cross-encoder of sentence-transformers names
    it."""
    own = config.get("sentence_transformers") or {}
    named = own.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    kind = str(named or "").rpartition(".")[2].lower()
    if kind in ("sigmoid", "identity", "softmax"):
        return kind
    is_single = num_labels == 1 or config.get("problem_type") == "multi_label_classification"
    return "sigmoid" if is_single else "softmax"


class _Tensors:
    """The tensors of a checkpoint, by their names; missing ones are None."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __call__(self, name: str) -> F32:
        """Returns a tensor. Raises `ConfigError` if it is not there."""
        found = self.find(name)
        if found is None:
            raise ConfigError(f"{self._folder} does not hold the tensor {name}")
        return found

    def find(self, name: str) -> F32 | None:
        """Returns a tensor, or None."""
        from aioinfer.models.loader import locate_tensors, read_tensors

        if name not in locate_tensors(self._folder):
            return None
        tensor = read_tensors(self._folder, [name])[name]
        return np.ascontiguousarray(tensor.float().numpy())

    def dense(self, name: str, activation: str = "identity") -> DenseLayer:
        """Returns the layer of a checkpoint module."""
        return DenseLayer(self(f"{name}.weight"), self.find(f"{name}.bias"), activation)


_Layers = tuple[tuple[DenseLayer, ...], str]


def _read_decoder_head(tensors: _Tensors, config: Mapping[str, Any]) -> _Layers:
    return (DenseLayer(tensors("score.weight")),), "last"


def _read_bert_head(tensors: _Tensors, config: Mapping[str, Any]) -> _Layers:
    return (tensors.dense("pooler.dense", "tanh"), tensors.dense("classifier")), "cls"


def _read_roberta_head(tensors: _Tensors, config: Mapping[str, Any]) -> _Layers:
    dense = tensors.dense("classifier.dense", "tanh")
    return (dense, tensors.dense("classifier.out_proj")), "cls"


def _read_distilbert_head(tensors: _Tensors, config: Mapping[str, Any]) -> _Layers:
    return (tensors.dense("pre_classifier", "relu"), tensors.dense("classifier")), "cls"


def _read_modernbert_head(tensors: _Tensors, config: Mapping[str, Any]) -> _Layers:
    activation = config.get("classifier_activation") or "gelu"
    pooling = config.get("classifier_pooling") or "cls"
    if activation not in _ACTIVATIONS or pooling not in ("cls", "mean"):
        raise ConfigError(
            f"a head with classifier_activation {activation!r} and classifier_pooling {pooling!r} "
            "is not supported"
        )
    dense = tensors.dense("head.dense", activation)
    norm = tensors("head.norm.weight"), tensors.find("head.norm.bias"), config.get("norm_eps", 1e-5)
    normed = DenseLayer(dense.weight, dense.bias, activation, norm)
    return (normed, tensors.dense("classifier")), pooling


#: By the beginning of the architecture's name; of others the head is a decoder's.
_HEADS: Mapping[str, Callable[[_Tensors, Mapping[str, Any]], _Layers]] = {
    "Bert": _read_bert_head,
    "Roberta": _read_roberta_head,
    "XLMRoberta": _read_roberta_head,
    "Camembert": _read_roberta_head,
    "MPNet": _read_roberta_head,
    "DistilBert": _read_distilbert_head,
    "ModernBert": _read_modernbert_head,
}


def read_dense_modules(
    folder: Path, modules: Sequence[Mapping[str, Any]]
) -> tuple[DenseLayer, ...]:
    """Returns the dense modules of sentence-transformers among `modules`, those of `modules.json`,
    in order.

    Raises `ConfigError` for one whose weights are not there as safetensors, and for an activation
    that is not known.
    """
    found = []
    for module in modules:
        if str(module.get("type", "")).rpartition(".")[2] != "Dense":
            continue
        place = folder / str(module.get("path"))
        config = read_json(place / "config.json", missing_ok=True)
        named = str(config.get("activation_function") or "Tanh").rpartition(".")[2].lower()
        if named not in _ACTIVATIONS:
            raise ConfigError(f"{place}: the activation {named!r} of a dense module is not known")
        if not (place / "model.safetensors").is_file():
            raise ConfigError(f"{place} has no model.safetensors: other formats are not read")
        found.append(_Tensors(place).dense("linear", named))
    return tuple(found)
