"""A compiled function of fixed tensors: calling it takes no arguments, runs no guards, and only launches the kernels.

Before every call `torch.compile` checks its guards and collects its inputs, which takes as long as a small model. Here
the first call keeps the compiled graph and its input tensors, and later calls run the graph on them. Contents of the
tensors may change, the tensors may not: the caller makes another `GuardFreeGraph` for other tensors.
"""

from collections.abc import Callable, Sequence
from threading import Thread, current_thread
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

Tensors = tuple[Tensor, ...]
Tail = Callable[[Float[Tensor, "1 vocab"], Float[Tensor, "1 hidden"] | None, Int[Tensor, " 1"]], Tensors]
"""A function of a forward of one token: of its logits, its final hidden state, and the token."""


def holder(device: torch.device) -> tuple[int, Thread | None]:
    """Key of a `GuardFreeGraph`: (number of threads that it was compiled for, thread that captured its CUDA graphs).

    Each thread manages its own CUDA graphs and their memory, so that another thread cannot replay them.
    """
    return torch.get_num_threads(), current_thread() if device.type == "cuda" else None


class GuardFreeGraph:
    """A function, compiled at its first call; every `holder` needs one of its own."""

    def __init__(self, function: Callable[[], Tensors], device: torch.device) -> None:
        """Args:
        function: every tensor that it reads is found through its closure; returns new tensors, and has no effects but
            on tensors.
        device: device of these tensors; on a GPU the kernels become a CUDA graph.

        Raises:
            torch._dynamo.exc.TorchDynamoException: at the first call, if it cannot be compiled.
        """
        self._on_gpu = device.type == "cuda"
        self._options: dict[str, Any] = {"triton.cudagraphs": self._on_gpu, "cpp_wrapper": not self._on_gpu}
        self._kernels: Callable[..., Sequence[Tensor]] | None = None
        self._inputs: tuple[Any, ...] = ()
        self._given: Sequence[Any] = ()
        self._places: list[int] = []
        """Places of the function's results among those of the graph, which has more where a forward sets an attribute
        of a module.
        """
        assert isinstance(function, FunctionType)
        # with a code object of its own: torch.compile keeps what it compiled, and counts how often, by these
        copy = FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
        )
        self._first = torch.compile(copy, fullgraph=True, dynamic=False, backend=self._backend)

    def __call__(self) -> Tensors:
        """Call the function, or replay its graph."""
        if not self._on_gpu:
            return self._run()
        torch.compiler.cudagraph_mark_step_begin()
        return tuple(output.clone() for output in self._run())  # a CUDA graph writes its next output over this one

    def _run(self) -> Tensors:
        if self._kernels is None:
            outputs = self._first()
            if self._kernels is not None:
                places = {id(output): place for place, output in enumerate(self._given)}
                self._places, self._given = [places[id(output)] for output in outputs], ()
            return outputs
        again = self._kernels(*self._inputs)
        return tuple(again[place] for place in self._places)

    def _backend(self, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx  # two seconds to import, and most commands compile nothing

        kernels: Any = compile_fx(graph, examples, config_patches=self._options)

        def kept(*inputs: Any) -> Any:
            self._kernels, self._inputs = kernels, inputs
            self._given = kernels(*inputs)
            return self._given

        return kept
