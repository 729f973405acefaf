"""Whether a model is in train mode, in which its forwards draw dropout: it would decode other tokens than its own."""

from torch import nn

_ALIKE_IN_BOTH_MODES = nn.Linear, nn.Embedding


def refuse_training(model: nn.Module) -> None:
    """Raise ValueError if any part of the model is in train mode, but for parts that are alike in both modes (a head
    that was put in).
    """
    if any(module.training and not isinstance(module, _ALIKE_IN_BOTH_MODES) for module in model.modules()):
        name = " ".join(filter(None, (type(model).__name__, getattr(model, "name_or_path", ""))))
        raise ValueError(
            f"{name} is in train mode, in which dropout changes what it says; call .eval() on it before it decodes"
        )
