"""Warm-up on a GPU: a rank's kernels are compiled, those of products chosen, graphs captured.

The worker makes a `GpuWarmUp` of the runner with which it measures its largest step, which only
compiles, and one of the runner that will serve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aioinfer.ipc.plan import StepPlan
from aioinfer.layers.backend import Backend
from aioinfer.worker.compilation import compile_only
from aioinfer.worker.compilers import Compilers
from aioinfer.worker.dummy_steps import DummySteps
from aioinfer.worker.graph_bodies import GraphBodies
from aioinfer.worker.peers import Peers

if TYPE_CHECKING:
    from aioinfer.worker.kernel_timing import KernelTiming
    from aioinfer.worker.rank_model import RankModel


class GpuWarmUp:
    """The warm-up of one runner. The methods are called in the order in which they stand here.

    Attributes:
        device: the runner's.
    """

    def __init__(self, steps: DummySteps, layers: RankModel, backend: Backend, peers: Peers):
        """
        Args:
            steps: dummy steps on the runner.
            layers: of the rank.
            backend: of these layers.
            peers: the ranks that it computes with.
        """
        from aioinfer.worker.gpu_device import GpuDevice

        device = steps.runner.device
        assert isinstance(device, GpuDevice)
        self.device = device
        self._steps, self._layers, self._backend, self._peers = steps, layers, backend, peers
        self._bodies = GraphBodies(steps.runner, device)
        self._timing = self._make_timing()

    def _make_timing(self) -> KernelTiming | None:
        """Returns the choice of kernels for products; None where they stay at their defaults."""
        if not self._backend.pdl:
            return None
        from aioinfer.worker.kernel_timing import KernelTiming

        can_run_layers = self._backend.computes_alone and self._steps.runner.model.supports_graphs
        layers = self._bodies.timed_layers() if can_run_layers else None
        return KernelTiming.of(self._backend, layers)

    def compile(self, compilers: Compilers | None, largest: StepPlan | None = None) -> None:
        """Compiles the kernels of all dummy steps, of the plan `largest` first, and the kernels
        among which products choose."""
        steps, bodies, backend = self._steps, self._bodies, self._backend
        with compile_only(compilers):
            if largest is not None:  # its attention takes longest to compile
                with backend.omitting_equal_layers():
                    run_kinds(backend, lambda: steps.run(largest))
            run_kinds(backend, bodies.begin_warm_up)  # all layers' weights are known from then on
            with backend.omitting_equal_layers():
                run_kinds(backend, steps.run_all)
                run_kinds(backend, self._layers.warm_up)
                run_kinds(backend, bodies.warm_up)
            if self._timing is not None:
                # after the steps, which compile extended products without choices
                self._timing.prepare()
            self._peers.drain_stages()

    def run(self) -> int:
        """Executes all dummy steps, and times the products. Returns how many kernels were chosen by
        timing, and not read from a file."""
        run_kinds(self._backend, self._steps.run_all)
        if self._timing is None:
            return 0
        count = self._timing.run()
        self.device.kv.zero(1)  # the timed layers have written there
        return count

    def capture(self, *, leaves_rest: bool) -> None:
        """See `GraphBodies.capture`."""
        self._bodies.capture(leaves_rest=leaves_rest)

    def time_decodes(self) -> list[tuple[int, float, bool]]:
        """See `GraphBodies.time_decodes`; leaves no trace of them."""
        found = self._bodies.time_decodes()
        self.device.kv.zero(1)  # the timed steps have written there
        return found


def run_kinds(backend: Backend, run: Callable[[], None]) -> None:
    """Launches steps without the extension of the layers, and with it if there is one."""
    run()
    if backend.extension is not None:
        with backend.extension:
            run()
