"""What a policy sees of one draft step (law 4.3): signals of the distribution and the token (`lm.signals`), and scores
of heads, `fed_logit`, `prefix_logit` and `drawn_logit`. All of them read the hidden state that produced q_i, which is
also the one after y_{i-1} was fed, and their scalars: a fed-time head those of y_{i-1}, a drawn-time head those of y_i,
a prefix head H(q_i) alone.

Only the signals that the policy names are computed. The token is drawn in the same step, so that token and signals
reach the host together; a policy that stops before the draw sees only the distribution, and its token is discarded.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from decode.policies.base import AfterDraw, Policy, timing_of
from heads.model.head import AcceptanceHead
from heads.model.step import HostHead, StepwiseHead, Vocabulary
from lm import DraftModel, FeatureModel, Sampler
from lm.draws import array_of, refuse_no_token
from lm.features.model import BlockModel
from lm.signals import POSITION, TokenStats, signals_of, token_stats

FED = "fed_logit"
_READ = {"entropy", "max_prob", "top_prob", "logit_token_prob"}
"""Signals of `lm.signals` that policies read by the same name."""
_NO_STATS = TokenStats(0.0, 0.0, -math.inf, 0.0, 0.0)


class SignalReader:
    """Reads the signals of one policy, step after step of a draft. Subclasses say where they are computed."""

    num_before = 0
    """Tokens of the response before the round."""
    on_host = True
    """Whether it reads tokens as numbers; otherwise as tensors on the device."""

    def __init__(self, policy: Policy, model: DraftModel) -> None:
        """Raises ValueError for a signal that does not exist, or a head or confidence that the draft does not fit."""
        if unknown := policy.signals - frozenset(AfterDraw._fields):
            raise ValueError(
                f"{type(policy).__name__} reads signals {sorted(unknown)}; use some of {', '.join(AfterDraw._fields)}"
            )
        self.model, self.requested, self.devices = model, policy.signals, _devices_of(policy, model)
        self.confidence_of: Any = model if "confidence_logit" in policy.signals else None
        has_confidence = isinstance(model, BlockModel) and model.draft.confidence_head is not None
        if self.confidence_of is not None and not has_confidence:
            raise ValueError(
                f"{type(policy).__name__} reads the draft's own confidence, but this draft has no confidence head; use "
                "a DSpark draft that has one, or another policy"
            )
        self.heads = {f"{timing_of(head)}_logit": _stepwise(head, model) for head in policy.heads}
        self.names = _computed(self.heads.values(), self.requested)

    def draw(
        self,
        position: int,
        logits: Float[Tensor, " vocab"],
        q: Float[Tensor, " vocab"],
        draws: Sampler,
        *,
        row: int = -1,
        probs: Float[Tensor, " vocab"] | None = None,
    ) -> tuple[int, AfterDraw]:
        """Draw a token of q and read the signals of the step; those that the policy does not name are meaningless.

        `position` is the number of tokens drafted before this one in the round, `row` the index of these logits among
        those of the draft's last forward, and `probs` softmax(logits), if it is known. ValueError if q is not finite.
        """
        token = draws.token(q) if self.on_host else draws.draw(q)
        return self._read(position, logits, token, row, probs)

    def read(self, position: int, logits: Float[Tensor, " vocab"], token_id: int, *, row: int = -1) -> AfterDraw:
        """The signals of a token that is already known."""
        token = token_id if self.on_host else torch.tensor([token_id], device=logits.device)
        return self._read(position, logits, token, row, None)[1]

    def _read(self, position: int, logits: Tensor, token: Any, row: int, probs: Tensor | None) -> tuple[int, AfterDraw]:
        raise NotImplementedError

    @property
    def states(self) -> Float[Tensor, "rows hidden"]:
        """The states that produced the draft's last logits."""
        assert self.model.hidden is not None, "a head scores hidden states: the draft must keep them"
        return self.model.hidden

    def columns(
        self,
        logits: Float[Tensor, " vocab"],
        token: Int[Tensor, " 1"],
        hidden: Float[Tensor, " hidden"] | None,
        previous: tuple[dict[str, Tensor], Tensor] | None,
        count: Int[Tensor, " 1"] | None,
    ) -> dict[str, Float[Tensor, " 1"]]:
        """Signals and head scores of a drawn token, on the device.

        `hidden` is the state that produced the logits, `previous` columns and id of the token before, which a fed-time
        head scores (None at the first), and `count` the number of response tokens before, if a head reads `POSITION`.
        """
        columns = signals_of(logits[None], token, self.names, count) if self.names else {}
        scored = columns, token
        for name, head in self.heads.items():
            if (source := previous if name == FED else scored) is not None:
                assert hidden is not None
                scalars = [source[0][scalar] for scalar in head.inputs.scalars]
                columns[name] = head(hidden, torch.cat(scalars) if scalars else None, source[1])
        return columns


class HostSignals(SignalReader):
    """Signals of a draft on the CPU, in numpy: torch's calls on single rows cost a fifth of a small model's step."""

    def __init__(self, policy: Policy, model: DraftModel) -> None:
        super().__init__(policy, model)
        self._has_entropy = "entropy" in self.names
        self._has_top = "top_prob" in self.names
        self._has_logits = not {"logit_token_prob", "logit_max_prob"}.isdisjoint(self.names)
        self._others = [name for name in self.names if name not in (*TokenStats._fields, POSITION, "top_prob")]
        numbers = (*TokenStats._fields, POSITION, *self._others)
        scores = {name: HostHead(head, names=numbers).score for name, head in self.heads.items()}
        self._score_fed, self._score_prefix, self._score_drawn = map(scores.get, (FED, "prefix_logit", "drawn_logit"))
        self._previous: tuple[tuple[float, ...], int] = _NO_STATS, 0

    def _read(self, position: int, logits: Tensor, token: int, row: int, probs: Tensor | None) -> tuple[int, AfterDraw]:
        if not self.requested:
            return token, AfterDraw(position)
        stats, top_prob, fed_logit, prefix_logit, drawn_logit = _NO_STATS, 0.0, math.inf, 0.0, 0.0
        if self.names:
            stats = token_stats(logits, token, probs=probs, has_entropy=self._has_entropy, has_logits=self._has_logits)
        if self._has_top:
            top_prob = self._by_formula(logits, token, ["top_prob"])[0]
        if self.heads:
            hidden = array_of(self.states)[row]  # numpy's index costs a tenth of torch's
            others = self._by_formula(logits, token, self._others) if self._others else ()
            numbers = (*stats, math.log1p(self.num_before + position), *others)
            if self._score_fed is not None:
                if position > 0:
                    fed_logit = self._score_fed(hidden, *self._previous)
                self._previous = numbers, token
            if self._score_prefix is not None:
                prefix_logit = self._score_prefix(hidden, numbers)
            if self._score_drawn is not None:
                drawn_logit = self._score_drawn(hidden, numbers, token)
        confidence = 0.0 if self.confidence_of is None else self.confidence_of.confidence().item()
        before = position, stats.entropy, stats.max_prob, fed_logit, prefix_logit, top_prob, confidence
        return token, AfterDraw(*before, math.exp(stats.log_token_prob), drawn_logit, stats.logit_token_prob)

    def _by_formula(self, logits: Tensor, token_id: int, names: list[str]) -> list[float]:
        return [column.item() for column in signals_of(logits[None], torch.tensor([token_id]), names).values()]


class DeviceSignals(SignalReader):
    """Signals of a draft on an accelerator; the host waits for one transfer, at the end of the step."""

    on_host = False
    _previous: tuple[dict[str, Tensor], Tensor] | None = None

    @torch.inference_mode()
    def _read(
        self, position: int, logits: Tensor, token: Tensor, row: int, probs: Tensor | None
    ) -> tuple[int, AfterDraw]:
        if not self.requested:
            return refuse_no_token(int(token), logits), AfterDraw(position)
        known = token.clamp(max=len(logits) - 1)  # a distribution that is not finite draws an id beyond the last
        hidden = self.states[row] if self.heads else None
        count = torch.full((1,), self.num_before + position, device=logits.device) if POSITION in self.names else None
        columns = self.columns(logits, known, hidden, self._previous if position > 0 else None, count)
        self._previous = columns, known
        if self.confidence_of is not None:
            columns["confidence_logit"] = self.confidence_of.confidence()
        # as floats, which hold every id below 2^24 exactly
        values = torch.cat([column.to(torch.float32) for column in (token, *columns.values())]).tolist()
        return refuse_no_token(int(values[0]), logits), after_draw(
            position, dict(zip(columns, values[1:], strict=True))
        )


class BatchSignals:
    """Reads the signals of all rows of a batch, step after step of a round, with one transfer to the host a step.

    All rows are at the same draft position, so a fed-time head scores in each step the tokens of the step before.
    """

    _previous: tuple[dict[str, Tensor], Tensor]

    def __init__(self, embedding: Callable[[Int[Tensor, " rows"]], Float[Tensor, "rows hidden"]]) -> None:
        """`embedding`: token ids -> the draft's input embeddings."""
        self._embedding = embedding

    @torch.inference_mode()
    def read(
        self,
        position: int,
        logits: Float[Tensor, "rows vocab"],
        hidden: Float[Tensor, "rows hidden"] | None,
        token: Int[Tensor, " rows"],
        *,
        policies: Sequence[Policy],
        nums_before: Sequence[int],
        kept: Sequence[int] | None = None,
    ) -> tuple[list[int], list[AfterDraw]]:
        """The tokens of a step, and the signals for each row's policy.

        Args:
            position: draft position of the tokens, from 0.
            logits: the draft's, before any sampling transform.
            hidden: the states that gave the logits, if a policy has heads.
            token: drafted by each row; an id beyond the last is returned as it is.
            policies: of each row.
            nums_before: tokens of each row's response before the round.
            kept: index of each row among those of the step before; None: they are the same rows.
        """
        heads = dict.fromkeys(head for policy in policies for head in policy.heads)
        names = _computed(heads, frozenset[str]().union(*(policy.signals for policy in policies)))
        if not names and not heads:
            return token.tolist(), [AfterDraw(position)] * len(policies)
        known = token.long().clamp(max=logits.shape[-1] - 1)
        count = position + torch.tensor(nums_before, device=logits.device) if POSITION in names else None
        columns, scores = signals_of(logits, known, names, count), dict[AcceptanceHead, Tensor]()
        for head in heads:
            assert hidden is not None, "a head scores hidden states: the draft must keep them"
            is_fed = head.timing == "fed"
            if is_fed and position == 0:
                continue
            given, ids = self._previous if is_fed else (columns, known)
            if is_fed and kept is not None:
                given, ids = {name: given[name][kept] for name in head.inputs.scalars}, ids[kept]
            embedding = self._embedding(ids) if head.inputs.embedding else None
            scores[head] = head(hidden, head.inputs.stacked(given), embedding)
        self._previous = columns, known
        read: dict[Any, Tensor] = {**columns, **scores}  # float64 holds every id exactly
        tokens, *values = torch.stack([token.double(), *(column.double() for column in read.values())]).tolist()
        numbers, drawn = dict(zip(read, values, strict=True)), []
        for row, policy in enumerate(policies):
            logit_of = {f"{timing_of(head)}_logit": numbers[head][row] for head in policy.heads if head in scores}
            drawn.append(after_draw(position, {name: numbers[name][row] for name in columns} | logit_of))
        return [int(token_id) for token_id in tokens], drawn


def reader_of(policy: Policy, model: DraftModel, made: SignalReader | None = None) -> SignalReader:
    """The reader for the device of the draft, or `made`, an earlier one of both, unless the draft was moved since."""
    if made is not None and made.devices == _devices_of(policy, model):
        return made
    return (HostSignals if model.device.type == "cpu" else DeviceSignals)(policy, model)


def _computed(heads: Iterable[AcceptanceHead | StepwiseHead], signals: frozenset[str]) -> list[str]:
    """Names of the signals (`lm.signals`) that are computed for these heads, and for a policy of these signals."""
    names = {name for head in heads for name in head.inputs.scalars} | signals & _READ
    return sorted(names | ({"log_token_prob"} if "token_prob" in signals else set()))


def after_draw(position: int, numbers: dict[str, float]) -> AfterDraw:
    """The signals of a token as a policy gets them."""
    known = {name: number for name, number in numbers.items() if name in AfterDraw._fields}
    return AfterDraw(position=position, token_prob=math.exp(numbers.get("log_token_prob", -math.inf)), **known)


def _devices_of(policy: Policy, model: DraftModel) -> tuple[torch.device, torch.device | None]:
    """Devices where the draft takes tokens, and where heads read its hidden states."""
    return model.device, model.output_device if policy.heads else None


def _stepwise(head: AcceptanceHead, model: DraftModel) -> StepwiseHead:
    if head.hidden_size != model.hidden_size:
        raise ValueError(
            f"the head reads hidden states of width {head.hidden_size} and this draft's are {model.hidden_size} wide; "
            "use a head that was trained for this draft"
        )
    network: Any = getattr(model, "model", None)  # a toy has none
    owner = model.draft.embedding if isinstance(model, FeatureModel) else network and network.get_input_embeddings()
    vocabulary = Vocabulary(model.num_embeddings, model.embedding, owner) if head.inputs.embedding else None
    return StepwiseHead(head.eval().to(model.output_device), vocabulary)
