"""Whether a model is in train mode, in which its forwards draw dropout: it would decode other tokens than its own."""

from torch import nn

_OF_ONE_MODE = nn.Linear, nn.Embedding


def refuse_training(model: nn.Module) -> None:
    """Raise ValueError if any part of the model is in train mode, but for those that have one mode (a head that was put
    in).
    """
    if any(module.training and not isinstance(module, _OF_ONE_MODE) for module in model.modules()):
        name = " ".join(filter(None, (type(model).__name__, getattr(model, "name_or_path", ""))))
        raise ValueError(
            f"{name} is in train mode, in which dropout changes what it says; call .eval() on it before it decodes"
        )
