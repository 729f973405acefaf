"""What a sweep takes from its training data before the first step of Adam.

1. The draft's own signal: the scalar that predicts a head's label without a head: logit q(y), or logit max q before y
   is drawn (`heads.model.inputs.SIGNALS`). Its prediction is sigmoid(slope z + offset), with two numbers fitted to
   training responses. The scalar is a logit, because log q(y) is bounded by 0: no slope and offset of it reach the
   acceptance of near-certain tokens. A head is worth decoding with only if its KL on dev is lower.
2. Means and deviations of every column, over the first shard.
3. Weights that give the logistic of the signal, so that no head begins below two numbers.
4. Heads of depth 0 get their optimum (`heads.training.linear`), each with the ridge whose calibrated KL on dev is the
   lowest. Adam leaves them alone.

SpecDec++'s own heads are left out of 2 to 4: they keep the paper's recipe. Only sums over tokens are kept, and they are
added up over processes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from heads.batches.features import STATE_TIMINGS, Batch, of_timing
from heads.batches.loader import BatchLoader
from heads.batches.module import FeatureData
from heads.measures.histogram import observe
from heads.measures.scores import fit_logistic, fit_temperature, measures
from heads.measures.sums import Sums
from heads.model.formula import Scaling
from heads.model.inputs import SIGNALS, Inputs
from heads.training.linear import MAX_CURVATURE_COLUMNS, MAX_PASSES, RIDGES, Curvature, LinearFit, Reduce
from heads.training.loss import Targets
from heads.training.stack import HeadStack
from store.progress import Bar

_SIGNAL_RESPONSES = 2048
"""Training responses that the two numbers of a signal are fitted to."""
CURVATURE_TOKENS = 2**16
"""Tokens that the curvature is measured on."""
MOST_TOKENS = 2**19
TOKENS_PER_COLUMN = 128
"""Linear heads are fitted to the first tokens of the training set, up to the larger of both limits."""
STORED_BYTES = 2**28
"""Columns of at most this size are stored for all passes of a fit; larger ones are read and standardised in each."""
_CHUNK = 4096
"""Tokens whose columns are in memory in float64."""
_CONSTANT = 1e-10
"""A column with a smaller variance, relative to its mean square, is centred only."""

Part = tuple[Float[Tensor, "tokens column"], Targets]
"""Columns and targets of some tokens."""


def fit_own_signals(data: FeatureData, timings: Iterable[str]) -> dict[str, list[float]]:
    """Timing -> [slope, offset] of the signal of its heads, fitted to labels without hidden states, batch after batch.

    ValueError without drafted tokens.
    """
    sums = {timing: Sums(1, torch.device("cpu")) for timing in timings}
    for batch in data.training_labels(_SIGNAL_RESPONSES):
        for timing, of_signal in sums.items():
            features = of_timing(batch, timing)
            of_signal.update(observe(features.scalars[SIGNALS[timing]][None], features.acceptance_prob[None]))
    fitted = {}
    for timing, of_signal in sums.items():
        histogram = of_signal.compute()
        if not float(histogram.total):
            raise _no_tokens(data)
        fitted[timing] = [float(number) for number in fit_logistic(histogram)]
    return fitted


def moments(columns: Float[Tensor, "tokens column"]) -> Float[Tensor, "3 column"]:
    """Count, sum and sum of squares of some columns, float64."""
    sums = columns.new_zeros(3, columns.shape[-1], dtype=torch.float64)
    for chunk in columns.split(_CHUNK):
        values = chunk.double()
        sums += torch.stack([torch.ones_like(values).sum(0), values.sum(0), values.square().sum(0)])
    return sums


def scaling_of(moments: Float[Tensor, "3 column"]) -> Scaling:
    """Mean and deviation of each column; a constant column has deviation 1."""
    count, total, squares = moments
    mean = total / count
    mean_square = squares / count
    variance = mean_square - mean.square()
    is_constant = variance <= _CONSTANT * mean_square
    return Scaling(mean, torch.where(is_constant, 1.0, variance.clamp_min(0.0).sqrt()))


class Start:
    """Sets the weights of new stacks; every process calls the same methods."""

    def __init__(
        self,
        stacks: Sequence[HeadStack],
        data: FeatureData,
        *,
        batches: Callable[[BatchLoader], Iterable[Batch]],
        inputs: Callable[[HeadStack, Batch], tuple[Tensor, Tensor | None]],
        reduce: Reduce,
    ) -> None:
        """Args:
        stacks: every stack of the sweep.
        data: the training data.
        batches: the batches of a loader, on the stacks' device.
        inputs: `Inputs.read` of the tokens that a stack scores.
        reduce: sums a tensor over processes.
        """
        self.stacks = [stack for stack in stacks if not stack.shape.is_specdec]
        self._data = data
        self._batches = batches
        self._inputs = inputs
        self._reduce = reduce

    @torch.no_grad()
    def standardise(self) -> None:
        """Set means and deviations; ValueError if the first shard has no drafted tokens."""
        stack_of = {_columns_of(stack): stack for stack in self.stacks}
        sums: dict[tuple[str, Inputs], Tensor] = {}
        for batch in self._batches(self._data.first_shard()):
            for key, stack in stack_of.items():
                columns = [values for values in self._inputs(stack, batch) if values is not None]
                sums[key] = sums.get(key, 0.0) + moments(torch.cat(columns, -1))
        scalings = {key: scaling_of(self._reduce(of_batches)) for key, of_batches in sums.items()}
        for stack in self.stacks:
            scaling = scalings[_columns_of(stack)]
            if scaling.mean.isnan().any():
                raise _no_tokens(self._data)
            stack.standardise(scaling.at(slice(stack.hidden_size)), scaling.at(slice(stack.hidden_size, None)))

    def start_at_signals(self, signals: Mapping[str, Sequence[float]]) -> None:
        """Give every head the slope and the offset of its timing's signal."""
        for stack in self.stacks:
            stack.start_at_signal(*signals[stack.shape.timing])

    @torch.no_grad()
    def solve(self, *, shows: bool) -> list[tuple[HeadStack, LinearFit]]:
        """The optimum of every linear head for every ridge; `shows`: with a progress bar."""
        stacks = [stack for stack in self.stacks if stack.is_solved]
        curvatures = self._curvatures(stacks)
        fits = [(stack, LinearFit(stack.linear_weights(), curvatures.get(stack))) for stack in stacks]
        widths = [fit.weights.shape[-1] for _, fit in fits]
        loader = self._data.first_tokens(max(MOST_TOKENS, TOKENS_PER_COLUMN * max(widths, default=0)))
        stored = []
        if 8 * loader.num_tokens * sum(widths) <= STORED_BYTES:
            stored = [list(map(list, parts)) for parts in self._parts(stacks, loader)]
        title = f"optimum of {sum(len(stack.specs) for stack in stacks)} linear heads"
        with Bar(total=MAX_PASSES, desc=title, unit="passes", disable=not shows, leave=False) as bar:
            for _ in range(MAX_PASSES):
                open_fits = [fit for _, fit in fits if not fit.is_done]
                if not open_fits:
                    break
                for parts in stored or self._parts(stacks, loader):
                    bar.update(0)
                    for (_, fit), chunks in zip(fits, parts, strict=True):
                        for columns, targets in () if fit.is_done else chunks:
                            fit.observe(columns, targets)
                for fit in open_fits:
                    fit.advance(self._reduce)
                bar.update()
            bar.total = bar.n  # most fits end long before the last pass
        return fits

    @torch.no_grad()
    def choose_ridges(self, fits: Sequence[tuple[HeadStack, LinearFit]]) -> None:
        """Give each linear head the weights of its best ridge."""
        sums = [Sums(fit.weights[..., 0].numel(), fit.weights.device) for _, fit in fits]
        for batch in self._batches(self._data.val_dataloader()) if fits else ():
            for (stack, fit), of_fit in zip(fits, sums, strict=True):
                logit = fit.weights.flatten(0, 1) @ stack.design(*self._inputs(stack, batch)).T
                of_fit.update(observe(logit, of_timing(batch, stack.shape.timing).acceptance_prob[None]))
        for (stack, fit), of_fit in zip(fits, sums, strict=True):
            histogram = of_fit.compute()
            shifts = stack.shift.repeat_interleave(len(RIDGES))
            temperature = fit_temperature(histogram, shifts)
            kl = measures(histogram, 1 / temperature, shifts / temperature).kl
            best = kl.view(-1, len(RIDGES)).argmin(-1)
            stack.set_linear_weights(fit.weights[torch.arange(len(best)), best])

    def _curvatures(self, stacks: Sequence[HeadStack]) -> dict[HeadStack, Float[Tensor, "heads column column"]]:
        """The curvature at the first weights of each stack of linear heads whose matrix is small enough."""
        starts = {stack: stack.linear_weights() for stack in stacks}
        sums = {stack: Curvature(at) for stack, at in starts.items() if at.shape[-1] <= MAX_CURVATURE_COLUMNS}
        for parts in self._parts([*sums], self._data.first_tokens(CURVATURE_TOKENS)) if sums else ():
            for curvature, chunks in zip(sums.values(), parts, strict=True):
                for columns, targets in chunks:
                    curvature.observe(columns, targets)
        return {stack: curvature.compute(self._reduce) for stack, curvature in sums.items()}

    def _parts(self, stacks: Sequence[HeadStack], loader: BatchLoader) -> Iterator[list[Iterator[Part]]]:
        """The chunks of each stack, batch after batch."""
        for batch in self._batches(loader):
            yield [self._chunks(stack, batch) for stack in stacks]

    def _chunks(self, stack: HeadStack, batch: Batch) -> Iterator[Part]:
        hidden, inputs = self._inputs(stack, batch)
        targets = stack.targets(batch)
        for first in range(0, len(hidden), _CHUNK):
            part = slice(first, first + _CHUNK)
            yield stack.design(hidden[part], None if inputs is None else inputs[part]), targets.at(part)


def _no_tokens(data: FeatureData) -> ValueError:
    return ValueError(f"train labels of {data.data.dir} have no drafted tokens; raise data.num_train")


def _columns_of(stack: HeadStack) -> tuple[str, Inputs]:
    """What decides means and deviations."""
    return STATE_TIMINGS[stack.shape.timing], stack.shape.inputs
