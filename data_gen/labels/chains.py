"""Labels of a feature draft: heads on it learn from drafts, as decoding makes them.

From every position s of a response, or every n-th, the draft proposes a few tokens y, fed with the target's
states up to s and then with its own outputs (`data_gen.labels.rollout`). The first step of each draft is
teacher-forced; later steps read the draft's own tokens, as in decoding. One forward of the target over all
drafts of a response gives p along them.

    acceptance_prob(s, j) = min(1, p(y) / q(y))      both after prompt + X_<s + y_0 … y_{j-1}
    drawn-time state      that which produced q(s, j)       (`data_gen.labels.states`)
    fed-time state        that after y_j was fed

There is no token mixing, as the tokens before y_j are the draft's own. The rows hold the first step at each
position, also where no draft is stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.labels.labeller import Labelled
from data_gen.labels.laws import NUMBERS, label_draft, label_target
from data_gen.labels.rollout import Rollouts, rollouts_along
from data_gen.labels.states import DRAFTS_AT_ONCE, begins_of, first_position
from data_gen.responses.exchange import Exchange, Progress
from data_gen.store.rows import Layout, layout_of
from lm import FeatureDraft, Sampling
from lm.forwards import chunk_rows, logits_of, output_device_of
from lm.sampling import NonFiniteError, refuse_non_finite

_WHERE = "along the drafts of the response"


@dataclass(frozen=True, kw_only=True)
class ChainLabeller:
    """Labels responses with drafts of a feature draft."""

    draft: FeatureDraft
    target: PreTrainedModel
    sampling: Sampling
    vocab_size: int
    eos_ids: frozenset[int]
    draft_length: int
    """Tokens of each draft, unless EOS or the end of the response or of a block comes before."""
    draft_every: int
    """Drafts start at every n-th position of a response, from its first on; those of blocks from its second on."""
    chunk_mb: int
    """Limit of one float32 [positions, vocabulary] chunk."""

    def label(
        self, exchanges: Sequence[Exchange], uniform: Float[Tensor, "token step"], *, progress: Progress
    ) -> Labelled:
        """Labels of every draft of some responses, [drafted token], and `draft_lengths` [draft]. Nothing has
        broken rows. Tokens are drawn with `uniform`, in float64.
        """
        rows = [_no_labels()]
        columns = [_no_labels()]
        lengths = [torch.empty(0, dtype=torch.int64)]
        broken = dict[int, str]()
        offsets = layout_of(exchanges).offsets
        for row, exchange in enumerate(exchanges):
            try:
                steps, is_kept = self._labelled(exchange, uniform[offsets[row] : offsets[row + 1]])
            except NonFiniteError as error:
                broken[row] = str(error)
            else:
                owner = steps.pop("owner")
                is_first = owner.diff(prepend=owner[:1] - 1) > 0
                rows.append({name: steps[name][is_first] for name in rows[0]})
                columns.append(_selected(steps, is_kept[owner]))
                lengths.append(owner.bincount()[is_kept])
            progress(1)
        layout = Layout(tuple(int(of_row.sum()) for of_row in lengths[1:]))
        found = _concatenated(columns) | {"draft_lengths": torch.cat(lengths)}
        return Labelled(found, broken, _concatenated(rows), layout)

    @torch.inference_mode()
    def _labelled(self, exchange: Exchange, uniform: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Every step of a draft from each position of one response, and [position] whether that draft is stored.
        Drafts that are not have one step, as the rows need it.
        """
        response = exchange.response_ids
        chains = rollouts_along(self.target, self.draft, exchange.prompt_ids, response, length=self.draft_length)
        at_once = min(DRAFTS_AT_ONCE, max(1, chunk_rows(self.vocab_size, self.chunk_mb) // self.draft_length))
        positions = torch.arange(len(response))
        begins = begins_of(self.draft, positions, len(exchange.prompt_ids))
        limits = torch.arange(len(response), 0, -1).clamp(max=int(min(self.draft_length, chains.max_length)))
        is_kept = torch.zeros(len(response), dtype=torch.bool)
        is_kept[first_position(self.draft) :: self.draft_every] = True
        limits[~is_kept] = 1
        parts = []
        for group in positions.split(at_once):  # drafts that one forward of the target reads
            steps = self._steps(chains, begins[group], limits[group], uniform[group])
            owner = group[steps["owner"].cpu()]
            parts.append(self._with_target(steps, chains, begins[group]) | {"owner": owner})
        return _concatenated(parts), is_kept

    def _with_target(self, steps: dict[str, Tensor], chains: Rollouts, begins: Tensor) -> dict[str, Tensor]:
        """The labels of some steps by both models, on the CPU."""
        columns = {name: steps[name] for name in ("draft_ids", *NUMBERS) if name in steps}
        q = steps["q"]
        p_logits = self._p_logits(chains, begins, steps["draft_ids"], steps["owner"]).to(q.device)
        p = self.sampling.probs(p_logits.float())
        columns |= label_target(p, columns, q, q_logits=steps["q_logits"], p_logits=p_logits)
        return {name: values.cpu() for name, values in columns.items()}

    def _steps(self, chains: Rollouts, begins: Tensor, limits: Tensor, uniform: Tensor) -> dict[str, Tensor]:
        """The labels, q, q_logits and `owner` (its draft) of each step of the drafts, draft by draft."""
        state = chains.begin(begins)
        limits = limits.to(state.device)
        alive = torch.arange(len(begins), device=state.device)
        steps = []
        eos = torch.tensor(sorted(self.eos_ids), device=state.device)
        for index in range(self.draft_length):
            logits = self.draft.logits(state)[..., : self.vocab_size]
            refuse_non_finite(logits, "the draft", _WHERE)
            labels, q = label_draft(logits, uniform[alive.cpu(), index].to(state.device), self.sampling)
            continues = (limits[alive] > index + 1) & ~torch.isin(labels["draft_ids"], eos)
            steps.append(labels | {"owner": alive, "q": q, "q_logits": logits})
            alive = alive[continues]
            if not len(alive):
                break
            state = chains.feed(labels["draft_ids"][continues], alive)
        table = _concatenated(steps)
        return _selected(table, table["owner"].argsort(stable=True))  # stable: each draft keeps the order of its steps

    def _p_logits(
        self, chains: Rollouts, begins: Tensor, tokens: Tensor, owners: Tensor
    ) -> Float[Tensor, "drafted vocab"]:
        """The target's logits for each drafted token, in one forward over all but the last of each draft."""
        device = output_device_of(self.target)
        tokens = tokens.to(device)
        owners = owners.to(device)
        is_first = owners.diff(prepend=owners[:1] - 1) > 0
        is_fed = ~is_first.roll(-1)
        first = chains.target_text.begin(begins).to(device)
        hidden = first.new_empty(len(tokens), first.shape[-1])
        hidden[is_first] = first
        if is_fed.any():
            hidden[~is_first] = chains.target_text.feed(tokens[is_fed], owners[is_fed]).to(device)
        logits = logits_of(self.target, hidden, self.vocab_size)
        refuse_non_finite(logits, "the target", _WHERE)
        return logits


def _no_labels() -> dict[str, Tensor]:
    return dict.fromkeys(NUMBERS, torch.empty(0)) | {"draft_ids": torch.empty(0, dtype=torch.int64)}


def _selected(table: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: values[rows] for name, values in table.items()}


def _concatenated(tables: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([table[name] for table in tables]) for name in tables[0]}
