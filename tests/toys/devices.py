"""Devices that this machine lacks: tensors on the CPU that report another device, and refuse tensors of a third.

Under `FakeDevices` a factory makes tensors on the requested device, `to` moves them, results are on the device of their
arguments, and arguments from two devices raise, as on real devices; so do `numpy` off the CPU, a generator of another
device, and float64 on MPS. The numbers are real, so a run over several devices can be compared with one on the CPU.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
Tensor = torch.Tensor
_GETTERS = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",
}
_READS = {Tensor.tolist, Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__bool__, Tensor.__index__, Tensor.cpu}
_FROM_ANY_DEVICE = _READS - {Tensor.__index__, Tensor.cpu} | {Tensor.copy_, Tensor.data.__set__}
_FROM_ANY_DEVICE |= {torch._has_compatible_shallow_copy_type}
_INDEXED = {Tensor.__getitem__, Tensor.__setitem__}
_FROM_HOST = {torch.tensor, torch.as_tensor}
_ON_HOST = {Tensor.numpy, Tensor.__array__}


def device_of(tensor):
    return getattr(tensor, "_fake_device", CPU)


def _is_on_host(value):
    """Whether a source or an index is a list, or a tensor of several numbers on the CPU."""
    return isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0 and device_of(value) == CPU)


def put(module, device):
    """Report `device` for the parameters and buffers of a module."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor._fake_device = torch.device(device)


class FakeDevices(TorchFunctionMode):
    """Tracks devices while it is active."""

    num_host_reads = 0
    """Times that the host waited for a number from another device: item, tolist, truth values, cpu() and to(cpu)."""
    num_uploads = 0
    """Times that numbers of the host went to another device, for which CUDA waits: tensors of lists, to, copy_, and
    indices that are lists or on the host. Numbers of a launch (full, fill_, an index that is one number) are none.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _GETTERS:
            return _GETTERS[func](device_of(args[0]))
        if func in _READS and device_of(args[0]) != CPU:
            self.num_host_reads += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is Tensor.copy_ or func in _INDEXED:
            sent = [args[1]] if func is Tensor.copy_ else args[1] if isinstance(args[1], tuple) else [args[1]]
            self.num_uploads += sum(map(_is_on_host, sent)) if device_of(args[0]) != CPU else 0
        if func is Tensor.to:
            return self._moved(args, kwargs)
        if func == Tensor.data.__set__:  # how a module moves its parameters
            _at(args[0], device_of(args[1]))
        if func is Tensor.cpu:
            return _at(args[0].view_as(args[0]), CPU)
        requested = kwargs.pop("device", None)
        device = torch.device(requested) if requested is not None else self._common_device(func, tensors)
        if func in _FROM_HOST and device != CPU and all(device_of(tensor) == CPU for tensor in tensors[:1]):
            self.num_uploads += 1
        if func in _ON_HOST and device != CPU:
            raise TypeError(f"the host cannot read the memory of {device}")
        generator = kwargs.get("generator")
        if generator is not None and generator.device != device:
            raise RuntimeError(f"Expected a '{device}' generator, but found one of '{generator.device}'")
        result = func(*args, **kwargs)
        for leaf in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            if device.type == "mps" and leaf.dtype == torch.float64:
                raise TypeError("MPS has no float64")
            _at(leaf, device)
        return result

    def _moved(self, args, kwargs):
        values = [*args[1:], *kwargs.values()]
        devices = [torch.device(value) for value in values if isinstance(value, str | torch.device)]
        devices += [device_of(value) for value in values if isinstance(value, Tensor)]
        dtypes = [value for value in values if isinstance(value, torch.dtype)]
        result = Tensor.to(args[0], dtypes[0]) if dtypes else args[0]
        device = devices[0] if devices else device_of(args[0])
        self.num_host_reads += device == CPU != device_of(args[0])
        self.num_uploads += device != CPU == device_of(args[0])
        return result if device_of(result) == device else _at(result.view_as(result), device)

    def _common_device(self, func, tensors):
        if func in _FROM_ANY_DEVICE and tensors:
            return device_of(tensors[0])
        indices = tensors[1:] if func in (Tensor.__getitem__, Tensor.__setitem__) else []
        devices = {
            device_of(tensor)
            for tensor in tensors
            if tensor.dim() > 0 and not any(tensor is index and device_of(index) == CPU for index in indices)
        }
        if len(devices) > 1:
            names = sorted(map(str, devices))
            raise RuntimeError(f"Expected all tensors to be on the same device, but {func.__name__} was given {names}")
        return devices.pop() if devices else (device_of(tensors[0]) if tensors else CPU)


def _at(tensor, device):
    tensor._fake_device = device
    return tensor
