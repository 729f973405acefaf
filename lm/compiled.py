"""Compile what a loop computes from each draft forward, while the forward itself stays eager (`decode.compile: stop`).

A stop is about thirty calls on single rows, which take longer than their arithmetic. Compiled they are one call. It
works with every model that a `CachedModel` takes, on every cache, and compiles in seconds.
"""

from collections.abc import Callable, Hashable, Sequence
from threading import Thread, current_thread
from types import FunctionType
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Compile = Literal[False, "stop"]  # `decode.compile`: whether a draft step's stop is compiled
Epilogue = Callable[[Float[Tensor, "1 vocab"], Float[Tensor, "1 hidden"] | None, Int[Tensor, " 1"]], tuple[Tensor, ...]]
"""What is computed from the forward of one token: logits, final hidden state, the token."""


class CompiledEpilogues:
    """Compiled functions of the forwards of one model; each compiles at its first call."""

    def __init__(self) -> None:
        self.cache: dict[Hashable, Any] = {}
        """Objects whose epilogues callers want to find again, since compiling another one takes seconds."""
        self._kind: tuple[object, ...] = ()
        self._graphs: dict[Hashable, GuardFreeGraph] = {}

    def __call__(
        self, epilogue: Epilogue, logits: Float[Tensor, "1 vocab"], hidden: Float[Tensor, "1 hidden"] | None, token: int
    ) -> tuple[Tensor, ...]:
        """Result of the epilogue, compiled once for each function; other tensors that it reads keep their addresses."""
        kind = logits.shape, logits.dtype, logits.device
        if kind != self._kind:  # fixed memory for the inputs; everything is compiled again
            self._kind, self._graphs = kind, {}
            self._logits, self._hidden = torch.empty_like(logits), None if hidden is None else torch.empty_like(hidden)
            self._token = torch.zeros(1, dtype=torch.long, device=logits.device)
            for tensor in (self._logits, self._hidden, self._token):
                if tensor is not None:
                    torch._dynamo.mark_static_address(tensor)
        inputs = self._logits, self._hidden, self._token
        self._logits.copy_(logits)
        if self._hidden is not None and hidden is not None:
            self._hidden.copy_(hidden)
        self._token.fill_(token)
        key = epilogue, thread_key(logits.device)
        if key not in self._graphs:
            # a copy, since an epilogue may return the logits themselves, which the next forward overwrites
            self._graphs[key] = GuardFreeGraph(lambda: epilogue(inputs[0].clone(), inputs[1], inputs[2]), logits.device)
        return self._graphs[key]()


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
        self._options: dict[str, Any] = {"triton.cudagraphs": self._on_gpu, "cpp_wrapper": not self._on_gpu}
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
        if not self._on_gpu:
            return self._run()
        torch.compiler.cudagraph_mark_step_begin()
        return tuple(output.clone() for output in self._run())  # a CUDA graph writes its next output over this one

    def _run(self) -> tuple[Tensor, ...]:
        if self._kernels is None:
            results = self._first_call()
            if self._kernels is not None:
                indices = {id(output): index for index, output in enumerate(self._outputs)}
                self._result_indices, self._outputs = [indices[id(result)] for result in results], ()
            return results
        outputs = self._kernels(*self._inputs)
        return tuple(outputs[index] for index in self._result_indices)

    def _backend(self, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx  # takes two seconds, and most commands compile nothing

        kernels: Any = compile_fx(graph, examples, config_patches=self._options)

        def first(*inputs: Any) -> Any:
            self._kernels, self._inputs = kernels, inputs
            self._outputs = kernels(*inputs)
            return self._outputs

        return first
