"""A function of tensors recorded once per shape as a CUDA graph and replayed after that.

For functions whose many small kernels take the host longer to launch than the GPU to run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

TensorFunction = Callable[..., tuple[torch.Tensor, ...]]

# Runs before recording: they compile, choose kernels and settle the allocator.
WARM_UP_RUNS = 3


class Replayed:
    """Calls `function`, which must be pure in its arguments but for weights that change in place.

    Results are overwritten by the next call of the same shapes.
    """

    def __init__(self, function: TensorFunction) -> None:
        self._function = function
        self._recordings: dict[tuple[torch.Size, ...], _Recording] = {}

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All inputs on one CUDA device; a new combination of shapes is recorded first (seconds)."""
        shapes = tuple(tensor.shape for tensor in inputs)
        if shapes not in self._recordings:
            self._recordings[shapes] = _Recording(self._function, inputs)
        return self._recordings[shapes].replay(inputs)


class _Recording:
    def __init__(self, function: TensorFunction, inputs: tuple[torch.Tensor, ...]) -> None:
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):
                function(*self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = function(*self._inputs)

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        for static, given in zip(self._inputs, inputs, strict=True):
            static.copy_(given)
        self._graph.replay()
        return self._outputs
