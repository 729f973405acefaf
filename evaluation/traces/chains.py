"""Law 4.10 for a feature draft: one response becomes a trace row with a draft for every place where a round may start.

A round that starts at position s knows the target's states of what was committed then, and drafts on its own outputs
from there on. So its token at position s + j has a law q(s, j) of its own. The coupling is that of
`evaluation.traces.coupling`, at each (s, j):

    accepted ~ Bernoulli(min(1, q(s, j)(X) / p(X)))      X the response's token at s + j
    otherwise  b ~ norm(max(0, q(s, j) - p))             rejected; from there on the draft goes on alone

One uniform for the coin, and one for the rejected draw, belong to each position of the response, whichever round comes
there: the rounds of one generation never share a position, so each of their coins is independent, and counts keep their
law. Policies share them all.

The first round of a generation drafts nothing, since the target has not spoken: the draft of position 0 is empty.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from evaluation.traces.branches import DrawnTokens, read_signals
from evaluation.traces.coupling import BRANCHES_AT_ONCE, Path, Recorder, RowRecording
from lm import FeatureDraft, acceptance_prob, residual_probs
from lm.branches.chains import BlockChains, Chains, TargetOutputs, chains_of, run_target
from lm.branches.probe import check_branches, check_length
from lm.uniforms import draw


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
    probs: list[Float[Tensor, " step"]]
    """acceptance_prob of each token; NaN where p is not known yet."""


class ChainRecorder(Recorder):
    """Makes trace rows of a feature draft; its attributes are those of `Recorder`."""

    @torch.inference_mode()
    def record(
        self, prompt_ids: list[int], response_ids: list[int], limit: int, chance: Float[Tensor, "position uniform"]
    ) -> RowRecording:
        assert isinstance(self.draft, FeatureDraft), "a draft that is a model of its own has a Recorder"
        ids = (prompt_ids + response_ids)[: max(len(prompt_ids) + len(response_ids) - 1, 1 + self.draft.lag)]
        check_branches(self.target)
        check_length(self.target, len(ids) + self.max_draft_length, num_prompt=len(prompt_ids))
        along = run_target(self.target, self.draft, ids)
        chains = chains_of(self.draft, along, ids)
        starts = torch.arange(len(response_ids), device=self.draft.device)
        first = chains.begin((starts + len(prompt_ids)).clamp(min=1 + self.draft.lag))
        target_hidden = along.hidden[len(prompt_ids) - 1 :][: len(response_ids)].to(first.device)
        path = self.path(first, target_hidden, response_ids, chance[:, :2])
        limits = (limit - 1 - starts).clamp(0, int(min(self.max_draft_length, chains.most)))
        limits[0] = 0
        lengths, passing = torch.zeros_like(starts), torch.zeros_like(starts)
        parts, probs = [path.drawn], [path.acceptance_prob]
        for group in (limits > 0).nonzero().squeeze(-1).split(BRANCHES_AT_ONCE):
            chains.begin(group + len(prompt_ids))
            drafts = self._begun(path, group, limits[group], response_ids)
            self._draft_on(chains, drafts, target_hidden, torch.tensor(response_ids, device=first.device), chance)
            drawn, prob, lengths[group] = self._in_order(drafts)
            parts.append(drawn)
            probs.append(self._with_target(along, drafts, drawn, prob, lengths[group], len(prompt_ids)))
            passing[group] = drafts.passing
        of_places = {"is_rejected": torch.ones_like(path.is_rejected), "acceptance_rate": path.acceptance_rate}
        return RowRecording.of(
            DrawnTokens.joined(parts), torch.cat(probs), **of_places, branch_lengths=lengths, num_passing=passing
        )

    def _begun(self, path: Path, group: Tensor, limits: Tensor, response_ids: list[int]) -> _Drafts:
        is_rejected = path.is_rejected[group]
        rejected = (path.is_rejected.cumsum(0) - 1)[group].clamp(min=0)
        on_path, off_path = (
            path.drawn.at(group),
            path.rejected.at(rejected) if len(path.rejected.token) else path.drawn.at(group),
        )

        def chosen(of_other: Tensor, of_own: Tensor) -> Tensor:
            return torch.where(is_rejected.view(-1, *[1] * (of_own.dim() - 1)), of_other, of_own)

        first = DrawnTokens(*(chosen(*pair) for pair in zip(off_path, on_path, strict=True)))
        rejected_probs = path.rejected_acceptance_prob
        prob = chosen(
            rejected_probs[rejected] if len(rejected_probs) else path.acceptance_prob[group],
            path.acceptance_prob[group],
        )
        owners = torch.arange(len(group), device=group.device)
        return _Drafts(
            group, limits, (~is_rejected).long(), ~is_rejected, first.token.clone(), [owners], [first], [prob]
        )

    def _draft_on(
        self, chains: Chains | BlockChains, drafts: _Drafts, target_hidden: Tensor, response: Tensor, chance: Tensor
    ) -> None:
        eos = torch.tensor(sorted(self.eos_ids), device=response.device, dtype=response.dtype)
        alive = torch.arange(len(drafts.starts), device=response.device)
        for place in range(1, self.max_draft_length):
            alive = alive[(drafts.limits[alive] > place) & ~torch.isin(drafts.token[alive], eos)]
            if not len(alive):
                return
            hidden = chains.feed(drafts.token[alive], alive)
            logits = self.draft_logits(hidden, "along a draft of a trace")
            q = self.drafting.probs(logits)
            token, prob = torch.empty_like(alive), torch.full_like(hidden[:, 0], float("nan"), dtype=torch.float32)
            on_path = drafts.is_on_path[alive]
            off_path, off = alive[~on_path], (~on_path).nonzero().squeeze(-1)
            # the first of a branch's uniforms is for the token after the rejected one
            rejected, since = (drafts.starts + drafts.passing)[off_path], place - drafts.passing[off_path]
            token[off] = draw(q[off], chance[rejected.cpu(), 1 + since.cpu()])
            on = on_path.nonzero().squeeze(-1)
            token[on], prob[on] = self._coupled(drafts, alive[on], q[on], (target_hidden, response, chance))
            drafts.token[alive] = token
            drafts.owners.append(alive)
            drafts.steps.append(read_signals(logits, token, q, hidden))
            drafts.probs.append(prob)

    def _coupled(
        self, drafts: _Drafts, owners: Tensor, q: Tensor, along: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Int[Tensor, " owner"], Float[Tensor, " owner"]]:
        """Token and acceptance_prob of drafts of which nothing was rejected yet; `along` has states of p, tokens and
        chance by position.
        """
        target_hidden, response, chance = along
        places = drafts.starts[owners] + drafts.passing[owners]
        p = self.target_probs(target_hidden[places]).to(q.device)
        token, uniform = response[places], chance[places.cpu()].to(q.device)
        is_accepted = uniform[:, 0] < acceptance_prob(token, q=p, p=q)
        token = token.clone()
        is_rejected = ~is_accepted
        token[is_rejected] = draw(residual_probs(q=p[is_rejected], p=q[is_rejected]), uniform[is_rejected, 1])
        drafts.passing[owners] += is_accepted
        drafts.is_on_path[owners] = is_accepted
        return token, acceptance_prob(token, q, p).float()

    def _in_order(self, drafts: _Drafts) -> tuple[DrawnTokens, Tensor, Tensor]:
        """(tokens, acceptance_probs, draft by draft; the length of each)"""
        owner = torch.cat(drafts.owners)
        order = owner.argsort(stable=True)  # steps came one after the other: each draft keeps its order
        lengths = torch.bincount(owner, minlength=len(drafts.starts))
        return DrawnTokens.joined(drafts.steps).at(order), torch.cat(drafts.probs)[order], lengths

    def _with_target(
        self, told: TargetOutputs, drafts: _Drafts, drawn: DrawnTokens, prob: Tensor, lengths: Tensor, num_prompt: int
    ) -> Tensor:
        owners = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        places = torch.arange(len(owners), device=lengths.device) - (lengths.cumsum(0) - lengths)[owners]
        in_branch = places >= drafts.passing[owners]  # the rejected token, and what follows it
        has_branch = lengths > drafts.passing
        if not has_branch.any():
            return prob
        rows = in_branch.nonzero().squeeze(-1)
        roots = (drafts.starts + drafts.passing + num_prompt)[has_branch]
        of_first = prob[in_branch & (places == drafts.passing[owners])]
        branch_lengths = (lengths - drafts.passing)[has_branch]
        prob[rows] = self.branch_acceptance(told.cache, roots, drawn.at(rows), branch_lengths, of_first).to(prob.dtype)
        return prob
