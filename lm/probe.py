"""The one probe of a model against itself: fed in some unusual way, it must say what it says when it is fed plainly.

A cache, ragged rows, branches and trees each feed a model in a way that transformers does not promise for every family,
and a model that takes it wrongly would decode other tokens without a word. Each of them says its feeds and its remedy,
and is tried once per model.

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
"""How a model may be fed: it passed."""

Refusal = Callable[[str], ValueError]
"""From the reason of a refusal to the error that also names the model and the remedy."""


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
        feeds: of each feed (its rows, the rows of plain forwards), made one after the other.
        refusal: makes the error.
        how: what the model is fed with; a model passes once for each.
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
        for ours, expected in feeds:
            error = float(row_errors(ours.detach(), expected.detach()).nan_to_num(unknown).max())
            if not error <= most:
                break
    if not error <= most:
        raise refusal(f"{difference} by {error:.2g} of their spread")
    passed.add(how)


@contextmanager
def refusing(refusal: Refusal, failure: str) -> Iterator[None]:
    """A forward that fails in it refuses the model; one that finds no memory says nothing about the model."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise refusal(f"{failure} ({type(error).__name__}: {error})") from error


def row_errors(ours: Float[Tensor, "row width"], expected: Float[Tensor, "row width"]) -> Float[Tensor, " row"]:
    """The error of each row; NaN where a row is not finite."""
    expected = expected.to(ours.device)
    spread = expected.float().std(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return ((ours - expected).abs().amax(-1)).float() / spread
