"""The one probe of a model against itself: fed in some unusual way, it must say what it says when it is fed plainly.

A cache, ragged rows, branches and trees each feed a model in a way that transformers does not promise for every family,
and a model that takes it wrongly would decode other tokens without a word. Whoever feeds like that names its feeds and
its remedy; each way is tried once per model.

An error is the largest difference in a row, as a share of the row's standard deviation when it is fed plainly. Half
precision may choose another expert of a mixture; a wrong mask changes a row by its whole spread.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

FULL_PRECISION = (torch.float32, torch.float64)
_MOST, _MOST_IN_HALF_PRECISION = 1e-2, 0.5
_PASSED: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()
"""Names of the ways to feed that each model has passed."""

Refusal = Callable[[str], ValueError]
"""From the reason of a refusal to the error that also names the model and the remedy."""


def refusal_of(model: PreTrainedModel, purpose: str, remedy: str) -> Refusal:
    """The refusal of `model` for a purpose ("be compiled"), which ends in a remedy ("set decode.compile: false")."""
    return lambda why: ValueError(f"{type(model).__name__} cannot {purpose}: {why}; {remedy}")


def probe(
    model: PreTrainedModel,
    feeds: Iterable[tuple[Float[Tensor, "row width"], Float[Tensor, "row width"]]],
    refusal: Refusal,
    *,
    how: str,
    difference: str,
    unknown: float = 0.0,
) -> None:
    """Raise ValueError unless every feed gives what plain forwards give; a model that passed is not fed again.

    Args:
        model: the model that is fed.
        feeds: (rows of a feed, rows of plain forwards) for every feed, made one after the other.
        refusal: makes the error.
        how: name of the way to feed; a model passes once for each name.
        difference: the sentence that a refusal says of an error, up to "by".
        unknown: the error of a row that is not finite. By default it is not compared: such rows are refused where they
            are decoded.
    """
    passed = _PASSED.setdefault(model, set())
    if how in passed:
        return
    most = _MOST if model.dtype in FULL_PRECISION else _MOST_IN_HALF_PRECISION
    error = 0.0
    with refusing(refusal, f"its forward fails with {how}"):
        for rows, expected in feeds:
            error = float(row_errors(rows.detach(), expected.detach()).nan_to_num(unknown).max())
            if not error <= most:
                break
    if not error <= most:
        raise refusal(f"{difference} by {error:.2g} of their spread")
    passed.add(how)


@contextmanager
def refusing(refusal: Refusal, failure: str) -> Iterator[None]:
    """Turn the failure of a forward into a refusal of its model; lack of memory says nothing about the model."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise refusal(f"{failure} ({type(error).__name__}: {error})") from error


def row_errors(rows: Float[Tensor, "row width"], expected: Float[Tensor, "row width"]) -> Float[Tensor, " row"]:
    """The error of each row; NaN where a row is not finite."""
    expected = expected.to(rows.device)
    spread = expected.float().std(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return ((rows - expected).abs().amax(-1)).float() / spread
