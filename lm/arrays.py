"""numpy's view of a tensor on the CPU, where calls on single rows cost a fraction of torch's."""

import numpy as np
import torch
from torch import Tensor


def array_of(tensor: Tensor) -> np.ndarray:
    """The memory of a tensor as an array; a copy in float32 where numpy has no such dtype."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return (tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()).numpy()
