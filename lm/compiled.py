"""Compile what a loop computes from each draft forward, while the forward itself stays eager (`decode.compile: stop`).

A stop is many calls on single rows; compiled they are one call. Whether that is faster depends on device and sampling
(docs/results/stops.md). It works with every model that a `CachedModel` takes, on every cache, and compiles in seconds.
"""

from collections.abc import Callable, Sequence
from threading import Thread, current_thread
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor

Compile = Literal[False, "stop"]  # `decode.compile`: whether a draft step's stop is compiled


def thread_key(device: torch.device) -> tuple[int, Thread | None]:
    """Key of a compiled graph: the number of threads, and on a GPU the thread that captured its CUDA graphs."""
    return torch.get_num_threads(), current_thread() if device.type == "cuda" else None


class GuardFreeGraph:
    """A compiled function without arguments: a call only launches the kernels, without the guards of `torch.compile`,
    which take as long as a small model. The first call keeps the compiled graph and its input tensors, whose contents
    may change, but not their addresses.
    """

    def __init__(self, function: Callable[[], tuple[Tensor, ...]], device: torch.device) -> None:
        """`function` finds every tensor that it reads, on `device`, through its closure; it returns new tensors, and
        has no effects but on tensors. On a GPU the kernels become a CUDA graph. The first call raises
        torch._dynamo.exc.TorchDynamoException if it cannot be compiled.
        """
        self._on_gpu = device.type == "cuda"
        self._kernels: Callable[..., Sequence[Tensor]] | None = None
        self._inputs: tuple[Any, ...] = ()
        self._outputs: Sequence[Any] = ()
        # of the function's results among the outputs of the graph, which may have more
        self._result_indices: list[int] = []
        assert isinstance(function, FunctionType)
        # a copy of the code object, because torch.compile caches by code object and counts recompilations by it
        code = function.__code__.replace()
        copy = FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
        self._first_call = torch.compile(copy, fullgraph=True, dynamic=False, backend=self._backend)

    def __call__(self) -> tuple[Tensor, ...]:
        """Call the function, or replay its graph."""
        if self._on_gpu:
            torch.compiler.cudagraph_mark_step_begin()
        if self._kernels is None:
            results = self._first_call()
            if self._kernels is not None:
                indices = {id(output): index for index, output in enumerate(self._outputs)}
                self._result_indices, self._outputs = [indices[id(result)] for result in results], ()
        else:
            outputs = self._kernels(*self._inputs)
            results = tuple(outputs[index] for index in self._result_indices)
        # a CUDA graph writes its next output over this one
        return tuple(result.clone() for result in results) if self._on_gpu else results

    def _backend(self, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx  # takes two seconds, and most commands compile nothing

        options = {"triton.cudagraphs": self._on_gpu, "cpp_wrapper": not self._on_gpu}
        kernels: Any = compile_fx(graph, examples, config_patches=options)

        def first(*inputs: Any) -> Any:
            self._kernels, self._inputs = kernels, inputs
            self._outputs = kernels(*inputs)
            return self._outputs

        return first
