"""Devices that are not here: tensors that compute on the CPU, say that they are elsewhere, and refuse to meet one from
another place.

Under `Places` every tensor has a place, a device in name only. What a factory is asked to make on a device is there,
`to` moves, results are where their arguments are, and arguments from two places raise, as on real devices; so do
`numpy` anywhere but on the CPU, a generator of another place, and float64 on MPS. Numbers are real, so a run over
several places can be held against one on the CPU.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
_GETTERS = {
    torch.Tensor.device.__get__: lambda place: place,
    torch.Tensor.is_cpu.__get__: lambda place: place.type == "cpu",
    torch.Tensor.is_cuda.__get__: lambda place: place.type == "cuda",
}
_FROM_ANYWHERE = {
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__bool__,
    torch.Tensor.copy_,
    torch.Tensor.data.__set__,
    torch._has_compatible_shallow_copy_type,
}
_READS = {
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__bool__,
    torch.Tensor.__index__,
    torch.Tensor.cpu,
}
_OF_THE_HOST = {torch.Tensor.numpy, torch.Tensor.__array__}


def place_of(tensor):
    return getattr(tensor, "_place", CPU)


def put(module, device):
    """Say that the parameters and buffers of a module are on `device`."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor._place = torch.device(device)


class Places(TorchFunctionMode):
    """Keeps the account of places while it is active."""

    num_host_reads = 0
    """Times that the host waited for a number from elsewhere: item, tolist, truth values, cpu() and to(cpu)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _GETTERS:
            return _GETTERS[func](place_of(args[0]))
        if func in _READS and place_of(args[0]) != CPU:
            self.num_host_reads += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is torch.Tensor.to:
            return self._moved(args, kwargs)
        if func == torch.Tensor.data.__set__:  # how a module moves its parameters
            _at(args[0], place_of(args[1]))
        if func is torch.Tensor.cpu:
            return _at(args[0].view_as(args[0]), CPU)
        asked = kwargs.pop("device", None)
        place = torch.device(asked) if asked is not None else self._meeting_place(func, tensors)
        if func in _OF_THE_HOST and place != CPU:
            raise TypeError(f"the host cannot look into the memory of {place}")
        generator = kwargs.get("generator")
        if generator is not None and generator.device != place:
            raise RuntimeError(f"Expected a '{place}' generator, but found one of '{generator.device}'")
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                if place.type == "mps" and leaf.dtype == torch.float64:
                    raise TypeError("MPS has no float64")
                _at(leaf, place)
        return result

    def _moved(self, args, kwargs):
        said = [*args[1:], *kwargs.values()]
        places = [torch.device(each) for each in said if isinstance(each, str | torch.device)]
        places += [place_of(each) for each in said if isinstance(each, torch.Tensor)]
        dtypes = [each for each in said if isinstance(each, torch.dtype)]
        result = torch.Tensor.to(args[0], dtypes[0]) if dtypes else args[0]
        place = places[0] if places else place_of(args[0])
        self.num_host_reads += place == CPU != place_of(args[0])
        return result if place_of(result) == place else _at(result.view_as(result), place)

    def _meeting_place(self, func, tensors):
        if func in _FROM_ANYWHERE and tensors:
            return place_of(tensors[0])
        indices = tensors[1:] if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) else []
        met = {
            place_of(each)
            for each in tensors
            if each.dim() > 0 and not any(each is one and place_of(one) == CPU for one in indices)
        }
        if len(met) > 1:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {func.__name__} was given {sorted(map(str, met))}"
            )
        return met.pop() if met else (place_of(tensors[0]) if tensors else CPU)


def _at(tensor, place):
    tensor._place = place
    return tensor
