"""The optimum of linear heads: L-BFGS in float64 on sums over the data, for every ridge at once.

The loss of law 4.7 is convex in the weights of a head of depth 0. A ridge keeps its optimum finite and unique, also
where columns are collinear or classes separable:

    L(w) + ridge / 2 |w - w_0|^2        w_0: the fitted logistic of the draft's own signal

so the strongest ridge gives the signal itself, and `heads.training.start` chooses one on dev. A pass over the data
evaluates one trial point per head and ridge. Only sums over tokens are kept, and they are added up over processes, so
one process and several take the same steps. Where the matrix is small enough, L-BFGS starts from the curvature at w_0,
measured on some of the tokens: nearly a Newton step, so ten to twenty passes suffice.

Reference: Nocedal and Wright, Numerical Optimization, 2nd ed., algorithms 3.1 and 7.4.
"""

from collections import deque
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from heads.training.loss import Targets

RIDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Ridges to choose from, relative to the mean loss of a token; columns are standardised."""
MAX_CURVATURE_COLUMNS = 2048
"""Columns up to which the curvature, [heads, columns, columns] in float64, is measured."""
MAX_PASSES = 100
_TOLERANCE = 1e-7
"""Nats per token that another step may still gain when a fit ends."""
_MEMORY = 20
"""Steps whose changes of the gradient L-BFGS remembers."""
_SUFFICIENT_DECREASE = 1e-4
_SHORTER = 0.25

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over processes."""


class Curvature:
    """The second derivative of the loss of each head at one point, summed over batches."""

    def __init__(self, point: Float[Tensor, "heads column"]) -> None:
        self._point = point
        self._sum = point.new_zeros(*point.shape, point.shape[-1])
        self._mass = point.new_zeros(len(point))

    def observe(self, columns: Float[Tensor, "tokens column"], targets: Targets) -> None:
        """Add some tokens."""
        total = targets.weighted().double()
        prob = (self._point @ columns.T).sigmoid()
        for index, weight in enumerate(total * prob * (1 - prob)):
            self._sum[index].addmm_(columns.T * weight, columns)
        self._mass += total.sum(-1)

    def compute(self, reduce: Reduce) -> Float[Tensor, "heads column column"]:
        """The mean over the tokens of all processes."""
        return reduce(self._sum) / reduce(self._mass)[:, None, None]


class LinearFit:
    """Linear heads on shared columns, one head per reject weight, with every ridge.

    Call `observe` with all tokens, then `advance`, until `is_done`.

    Attributes:
        weights: [heads, ridges, column], those of the best accepted point so far.
        is_done: whether no step gains more than the tolerance.
    """

    def __init__(
        self, start: Float[Tensor, "heads column"], curvature: Float[Tensor, "heads column column"] | None = None
    ) -> None:
        """`start` is w_0, float64; `curvature` at w_0 if it was measured."""
        self._ridges = start.new_tensor(RIDGES)
        self._start = start[:, None]
        self.weights = self._start.repeat(1, len(RIDGES), 1)
        self.is_done = False
        self._axes = None if curvature is None else torch.linalg.eigh(curvature)
        self._trial = self.weights.clone()
        self._direction = torch.zeros_like(self.weights)
        self._gradient = torch.zeros_like(self.weights)
        self._step = torch.ones_like(self.weights[..., 0])
        self._slope = torch.zeros_like(self._step)
        self._loss = torch.full_like(self._step, torch.inf)
        self._is_open = torch.ones_like(self._step, dtype=torch.bool)
        self._history: deque[tuple[Tensor, Tensor]] = deque(maxlen=_MEMORY)
        self._clear()

    def observe(self, columns: Float[Tensor, "tokens column"], targets: Targets) -> None:
        """Add some tokens to the sums at the trial points of the heads and ridges that another step may improve."""
        head, ridge = self._open
        accept = targets.accepted.double()
        total = targets.weighted().double()
        logit = self._trial[head, ridge] @ columns.T
        of_open = total[head]
        self._sums[head, ridge] += (of_open * F.softplus(logit) - accept * logit).sum(-1)
        self._gradient_sums[head, ridge] += (of_open * logit.sigmoid() - accept) @ columns
        self._mass += total.sum(-1)

    def advance(self, reduce: Reduce) -> None:
        """Accept or shorten the step of each head and ridge, and choose the next trial point."""
        mass = reduce(self._mass)[:, None]
        offset = self._trial - self._start
        loss = reduce(self._sums) / mass + self._ridges / 2 * offset.square().sum(-1)
        gradient = reduce(self._gradient_sums) / mass[..., None] + self._ridges[:, None] * offset
        is_decrease = loss <= self._loss + _SUFFICIENT_DECREASE * self._step * self._slope
        is_accepted = self._is_open & is_decrease
        self._move(loss, gradient, is_accepted)
        self._step = torch.where(is_accepted, 1.0, _SHORTER * self._step)
        self._direction = torch.where(is_accepted[..., None], self._newton_like(), self._direction)
        self._slope = (self._direction * self._gradient).sum(-1)
        self._trial = self.weights + self._step[..., None] * self._direction
        # the same in every process, whatever the rounding of each
        self._is_open = self._is_open & (reduce((-self._slope / 2 > _TOLERANCE).double()) > 0)
        self.is_done = not self._is_open.any()
        self._clear()

    def _move(self, loss: Tensor, gradient: Tensor, is_accepted: Tensor) -> None:
        """Make accepted trial points the current ones, and remember the changes; those of others are 0."""
        mask = is_accepted[..., None]
        if not self._loss.isinf().any():
            change = torch.where(mask, self._trial - self.weights, 0.0)
            self._history.append((change, torch.where(mask, gradient - self._gradient, 0.0)))
        self.weights = torch.where(mask, self._trial, self.weights)
        self._gradient = torch.where(mask, gradient, self._gradient)
        self._loss = torch.where(is_accepted, loss, self._loss)

    def _newton_like(self) -> Float[Tensor, "heads ridge column"]:
        """L-BFGS's direction of descent; changes that are 0 leave it as it is."""
        q = self._gradient
        factors: list[tuple[Tensor, Tensor]] = []
        for change, of_gradient in reversed(self._history):
            product = (change * of_gradient).sum(-1, keepdim=True)
            rho = torch.where(product > 0, 1 / product, 0.0)
            alpha = rho * (change * q).sum(-1, keepdim=True)
            q = q - alpha * of_gradient
            factors.append((rho, alpha))
        q = self._preconditioned(q)
        for (change, of_gradient), (rho, alpha) in zip(self._history, reversed(factors), strict=True):
            q = q + change * (alpha - rho * (of_gradient * q).sum(-1, keepdim=True))
        return -q

    def _preconditioned(self, q: Float[Tensor, "heads ridge column"]) -> Float[Tensor, "heads ridge column"]:
        """q over the curvature, or over a multiple of the identity that fits the last change."""
        if self._axes is not None:
            values, axes = self._axes
            return (q @ axes) / (values.clamp_min(0.0)[:, None] + self._ridges[:, None]) @ axes.mT
        scale = torch.full_like(self._loss, 4.0 / q.shape[-1])
        if self._history:
            change, of_gradient = self._history[-1]
            squared = of_gradient.square().sum(-1)
            scale = torch.where(squared > 0, (change * of_gradient).sum(-1) / squared, scale)
        return scale[..., None] * q

    def _clear(self) -> None:
        self._open = self._is_open.nonzero(as_tuple=True)
        self._sums = torch.zeros_like(self._loss)
        self._gradient_sums = torch.zeros_like(self.weights)
        self._mass = torch.zeros_like(self.weights[:, 0, 0])
