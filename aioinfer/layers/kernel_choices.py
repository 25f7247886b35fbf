"""Choice of the kernel for each product that several kernels can compute, by product and number of
rows, and the file that keeps the choices.

A weight that has several kernels (`formats.base.Weight`) registers each product that it computes,
names the candidates, and asks here for each launch. At the start of a worker nothing is chosen, and
the weight takes its default; `worker.kernel_timing` then measures the candidates on the card and
enters the fastest. One table serves all layers of a rank (`Backend.choices`).

The file lies beside Triton's compiled kernels, so that a second start times nothing. There is one
for each machine, that is for each card with its versions of torch, Triton and our kernels; in it
are the products of all models that were served there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import weakref
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

#: The operation with a weight W besides x W^T. `plain`: nothing. `partial`: the same, written to
#: given memory. `biased`: a bias is added. `residual`: the product is added to the residual stream,
#: or left in parts to the norm that follows. `gated`: silu(gate) * up of the product. `normed` and
#: `normed gated`: of one row, which is normed before, in the same launch or in one of its own.
Operation = Literal["plain", "partial", "biased", "residual", "gated", "normed", "normed gated"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to compute a product.

    Attributes:
        kernel: its name.
        config: how it is compiled, a dataclass; None for a kernel that needs no compilation.
        fuses: the fields of an `Epilogue` that the kernel computes in the same launch, as far as
            they can be combined; all others are launches of their own.
        gain_s: seconds that it saves the products around it in a step, where it is timed alone.
    """

    kernel: str
    config: Any = None
    fuses: frozenset[str] = field(default=frozenset(), compare=False)
    gain_s: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        if self.config is None:
            return self.kernel
        values = (f"{each.name}={getattr(self.config, each.name)}" for each in fields(self.config))
        return " ".join((self.kernel, *values))


@dataclass(frozen=True, slots=True)
class Product:
    """A product that kernels are chosen for: equal products launch the same kernels, whatever the
    layer.

    Attributes:
        operation: see `Operation`.
        format: of the weight, such as "dense".
        outputs, inputs: features of the weight on this rank.
        dtype: of the activations.
    """

    operation: Operation
    format: str
    outputs: int
    inputs: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.format} {self.operation} {self.outputs}x{self.inputs} {self.dtype}"


class TimedWeight(Protocol):
    """A weight whose product several kernels compute: `formats.base.Weight`, and the sums that
    adapters add.

    Attributes:
        held_bytes: of it on the device.
    """

    @property
    def held_bytes(self) -> int: ...

    def candidates(self, operation: Operation, rows: int) -> list[Candidate]:
        """See `Weight.candidates`."""
        ...

    def multiply(self, x: Any, epilogue: Any) -> torch.Tensor:
        """See `Weight.multiply`."""
        ...

    def warm_up(
        self, operation: Operation, norm: Any = None, *, has_single_row: bool = True
    ) -> None:
        """See `Weight.warm_up`."""
        ...


class ProductChoices:
    """The kernels that compute one product, by number of rows.

    Attributes:
        product: which.
        norm: the RMSNorm before a normed product, of one of the layers; else None.
        forced: the candidate that computes all rows, while it is set.
        has_single_row: whether it was asked for one row, for which many products have another
            operation.
        lookups: how many times it was asked.
    """

    def __init__(self, product: Product, norm: Any = None):
        self.product = product
        self.norm = norm
        self.forced: Candidate | None = None
        self.has_single_row = False
        self.lookups = 0
        self._sizes: list[int] = []
        self._candidates: list[Candidate] = []
        # weights may be converted and dropped, which this must not prevent
        self._weights: list[weakref.ref[TimedWeight]] = []

    @property
    def weights(self) -> list[TimedWeight]:
        """The weights that have computed the product."""
        return [weight for weight in (there() for there in self._weights) if weight is not None]

    def add_weight(self, weight: TimedWeight) -> None:
        """Adds one more weight."""
        self._weights.append(weakref.ref(weight))

    def choose(self, by_rows: Mapping[int, Candidate]) -> None:
        """Enters the candidates by number of rows, in place of those before."""
        self._sizes = sorted(by_rows)
        self._candidates = [by_rows[size] for size in self._sizes]

    def replace(self, rows: int, candidate: Candidate) -> None:
        """Enters the candidate for one number of rows that was entered before."""
        self._candidates[self._sizes.index(rows)] = candidate

    def find(self, rows: int) -> Candidate | None:
        """Returns the candidate chosen for the next larger number of rows that was measured; None,
        for the weight's default, above and below all of them."""
        self.lookups += 1
        if rows == 1:
            self.has_single_row = True
        if self.forced is not None:
            return self.forced
        index = bisect_left(self._sizes, rows)
        if index == len(self._sizes) or rows < self._sizes[0]:
            return None
        return self._candidates[index]


class KernelChoices:
    """The choices of all products of a rank.

    Attributes:
        products: in the order in which they were first computed.
    """

    def __init__(self) -> None:
        self.products: dict[Product, ProductChoices] = {}

    def register(self, product: Product, weight: TimedWeight, norm: Any = None) -> ProductChoices:
        """Returns the choices of a product that `weight` computes for the first time; `norm` as in
        `ProductChoices`."""
        choices = self.products.get(product)
        if choices is None:
            choices = self.products[product] = ProductChoices(product, norm)
        choices.add_weight(weight)
        return choices

    def warm_up(self) -> None:
        """Launches the products that were computed so far in every configuration that the number of
        rows selects."""
        for choices in list(self.products.values()):
            for weight in choices.weights[:1]:
                weight.warm_up(
                    choices.product.operation, choices.norm, has_single_row=choices.has_single_row
                )


#: The text of a candidate by number of rows, by the text of a product.
Texts = dict[str, dict[int, str]]


def machine_of(device: Any) -> dict[str, str]:
    """Returns the properties that measured times depend on beside the products, for a GPU."""
    import torch
    import triton

    import aioinfer.kernels.few_rows_dense as kernels

    properties = torch.cuda.get_device_properties(device)
    blas = str(torch.backends.cuda.preferred_blas_library()).lower()
    return {
        "card": properties.name,
        "multiprocessors": str(properties.multi_processor_count),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "blas": "cublaslt" if "cublaslt" in blas else "cublas",
        "kernels": hash_sources(Path(kernels.__file__).parent),
    }


def hash_sources(folder: Path) -> str:
    """Returns a hash of the Python files in a folder, names and texts."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        digest.update(f"{file.name}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


class StoredChoices:
    """The file of one machine.

    Args:
        folder: of the file; made when something is stored.
        machine: see `machine_of`.

    Attributes:
        path: of the file.
    """

    def __init__(self, folder: Path, machine: Mapping[str, str]):
        self._machine = dict(machine)
        text = json.dumps(self._machine, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.path = folder / f"aioinfer-kernels-{name}.json"
        self._seen: Texts = {}

    def read(self) -> Texts:
        """Returns the stored choices; none if there is no file, or it is damaged or of another
        machine."""
        self._seen = self._load()
        return self._seen

    def _load(self) -> Texts:
        try:
            content = json.loads(self.path.read_bytes())
            if content["machine"] != self._machine:
                return {}
            return {
                str(product): {int(rows): str(text) for rows, text in by_rows.items()}
                for product, by_rows in content["choices"].items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("%s cannot be read, kernels are timed again: %s", self.path, error)
            return {}

    def add(self, measured: Texts) -> Texts:
        """Stores choices, and returns them, or the choices of another process where it has stored
        some since `read`, so that engines that start together compute alike. A folder that cannot
        be written to is reported in the log: the next start times them again.

        Of processes that write at the same moment, the last one's additions may be all that is
        kept.
        """
        stored = self._load()
        for product, by_rows in measured.items():
            now, seen = stored.get(product, {}), self._seen.get(product, {})
            others = {rows: text for rows, text in now.items() if text != seen.get(rows)}
            stored[product] = dict(sorted((now | by_rows | others).items()))
        content = {"machine": self._machine, "choices": stored}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self.path, json.dumps(content, indent=1).encode())
        except OSError as error:
            _log.warning("the fastest kernels cannot be stored: %s", error)
        return {
            product: {rows: stored[product][rows] for rows in by_rows}
            for product, by_rows in measured.items()
        }


def _replace(path: Path, content: bytes) -> None:
    """Writes a file so that it is never seen half done."""
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise
