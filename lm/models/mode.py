"""Whether a model is in train mode, in which its forwards draw dropout: it would decode other tokens than its own."""

from torch import nn


def refuse_training(model: nn.Module) -> None:
    """Raise ValueError if any part of the model is in train mode."""
    if any(module.training for module in model.modules()):
        name = " ".join(filter(None, (type(model).__name__, getattr(model, "name_or_path", ""))))
        raise ValueError(f"{name} is in train mode, in which dropout changes what it says; call .eval() on it before it decodes")
