"""Law 4.10 for a feature draft: one response becomes a trace row with a draft for every position where a round may
start.

A round that starts at position s knows the target's states of what was committed then, and drafts on its own outputs
from there on. So its token at position s + j has a distribution q(s, j) that no other start has. The coupling is that
of `evaluation.traces.coupling`, at each (s, j):

    accepted ~ Bernoulli(min(1, q(s, j)(X) / p(X)))      X the response's token at s + j
    otherwise  b ~ norm(max(0, q(s, j) - p))             rejected; from there on the draft continues alone

One uniform for the coin, and one for the rejected draw, belong to each position of the response, whichever round comes
there: the rounds of one generation never share a position, so each of their coins is independent, and counts keep their
distribution. Policies share them all.

The first round of a generation drafts nothing, since the target has not run yet: the draft of position 0 is empty.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from evaluation.traces.coupling import BRANCHES_AT_ONCE, DrawnTokens, Path, Recorder, draft_by_draft, read_signals
from evaluation.traces.trace import Trace, TraceRow
from lm import FeatureDraft, acceptance_prob, residual_probs
from lm.batch import check_branch_length, check_branches
from lm.draws import draw
from lm.features.rollout import BlockRollouts, Rollouts, TargetOutputs, rollouts_of, run_target


@dataclass
class _Drafts:
    """The drafts of some starts, step after step."""

    starts: Int[Tensor, " draft"]
    limits: Int[Tensor, " draft"]
    passing: Int[Tensor, " draft"]
    """Tokens accepted so far."""
    is_on_path: Bool[Tensor, " draft"]
    token: Int[Tensor, " draft"]
    """The newest of each."""
    owners: list[Int[Tensor, " step"]]
    steps: list[DrawnTokens]


class ChainRecorder(Recorder):
    """Makes trace rows of a feature draft; its attributes are those of `Recorder`."""

    @torch.inference_mode()
    def record(self, row: TraceRow, uniforms: Float[Tensor, "position uniform"]) -> Trace:
        assert isinstance(self.draft, FeatureDraft), "a draft that is a whole model has a Recorder"
        prompt, response = list(row.prompt_ids), list(row.response_ids)
        ids = (prompt + response)[: max(len(prompt) + len(response) - 1, 1 + self.draft.lag)]
        check_branches(self.target)
        check_branch_length(self.target, len(ids) + self.max_draft_length, num_prompt=len(prompt))
        outputs = run_target(self.target, self.draft, ids)
        chains = rollouts_of(self.draft, outputs, ids)
        starts = torch.arange(len(response), device=self.draft.device)
        first = chains.begin((starts + len(prompt)).clamp(min=1 + self.draft.lag))
        target_hidden = outputs.hidden[len(prompt) - 1 :][: len(response)].to(first.device)
        path = self.path(first, target_hidden, response, uniforms[:, :2])
        limits = (row.limit - 1 - starts).clamp(0, int(min(self.max_draft_length, chains.max_length)))
        limits[0] = 0
        lengths, passing, parts = torch.zeros_like(starts), torch.zeros_like(starts), [path.drawn]
        along = target_hidden, torch.tensor(response, device=first.device), uniforms
        for group in (limits > 0).nonzero().squeeze(-1).split(BRANCHES_AT_ONCE):
            chains.begin(group + len(prompt))
            drafts = self._begun(path, group, limits[group])
            self._draft_on(chains, drafts, along)
            drawn, lengths[group] = draft_by_draft(drafts.steps, drafts.owners, len(group))
            parts.append(self._with_target(outputs, drafts, drawn, lengths[group], len(prompt)))
            passing[group] = drafts.passing
        outcomes = {
            "is_rejected": torch.ones_like(path.is_rejected),
            "acceptance_rate": path.acceptance_rate,
            "num_passing": passing,
        }
        return self.trace_of(row, DrawnTokens.joined(parts), outcomes, lengths)

    def _begun(self, path: Path, group: Tensor, limits: Tensor) -> _Drafts:
        """The first token of the draft of each start in `group`: the response's, or the rejected draw."""
        is_rejected, first = path.is_rejected[group], path.drawn.at(group)
        number = (path.is_rejected.cumsum(0) - 1)[group]  # of each rejected draw
        for column, rejected in zip(first, path.rejected, strict=True):
            column[is_rejected] = rejected[number[is_rejected]]
        owners = torch.arange(len(group), device=group.device)
        return _Drafts(group, limits, (~is_rejected).long(), ~is_rejected, first.token.clone(), [owners], [first])

    def _draft_on(
        self, chains: Rollouts | BlockRollouts, drafts: _Drafts, along: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Draft to the end; `along` has states of p, tokens and uniforms by position of the response."""
        eos = torch.tensor(sorted(self.eos_ids), device=drafts.token.device, dtype=drafts.token.dtype)
        alive = torch.arange(len(drafts.starts), device=drafts.token.device)
        for depth in range(1, self.max_draft_length):
            alive = alive[(drafts.limits[alive] > depth) & ~torch.isin(drafts.token[alive], eos)]
            if not len(alive):
                return
            hidden = chains.feed(drafts.token[alive], alive)
            logits = self.draft_logits(hidden, "along a draft of a trace")
            q = self.drafting.probs(logits)
            token, prob = torch.empty_like(alive), torch.full_like(q[:, 0], float("nan"))
            on_path = drafts.is_on_path[alive]
            off_path = alive[~on_path]
            # the first of a branch's uniforms is for the token after the rejected one
            rejected, since = (drafts.starts + drafts.passing)[off_path], depth - drafts.passing[off_path]
            token[~on_path] = draw(q[~on_path], along[2][rejected.cpu(), 1 + since.cpu()])
            token[on_path], prob[on_path] = self._coupled(drafts, alive[on_path], q[on_path], along)
            drafts.token[alive] = token
            drafts.owners.append(alive)
            drafts.steps.append(read_signals(logits, token, q, hidden, prob))

    def _coupled(
        self, drafts: _Drafts, owners: Tensor, q: Tensor, along: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Int[Tensor, " owner"], Float[Tensor, " owner"]]:
        """Token and acceptance_prob of drafts without a rejection so far."""
        target_hidden, response, uniforms = along
        positions = drafts.starts[owners] + drafts.passing[owners]
        p = self.target_probs(target_hidden[positions]).to(q.device)
        token, uniform = response[positions], uniforms[positions.cpu()].to(q.device)
        is_accepted = uniform[:, 0] < acceptance_prob(token, q=p, p=q)
        residual = residual_probs(q=p[~is_accepted], p=q[~is_accepted])
        token[~is_accepted] = draw(residual, uniform[~is_accepted, 1])
        drafts.passing[owners] += is_accepted
        drafts.is_on_path[owners] = is_accepted
        return token, acceptance_prob(token, q, p)

    def _with_target(
        self, outputs: TargetOutputs, drafts: _Drafts, drawn: DrawnTokens, lengths: Tensor, num_prompt: int
    ) -> DrawnTokens:
        """`drawn` with the acceptance_prob of what follows a rejected token."""
        owners = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        depths = torch.arange(len(owners), device=lengths.device) - (lengths.cumsum(0) - lengths)[owners]
        rows = (depths >= drafts.passing[owners]).nonzero().squeeze(-1)  # the rejected token, and what follows it
        if not len(rows):
            return drawn
        has_branch = lengths > drafts.passing
        roots = (drafts.starts + drafts.passing + num_prompt)[has_branch]
        branch_lengths = (lengths - drafts.passing)[has_branch]
        drawn.acceptance_prob[rows] = self.with_acceptance(
            outputs.cache, roots, drawn.at(rows), branch_lengths
        ).acceptance_prob
        return drawn
