"""Rounds and generations (laws 4.2, 4.4, 4.5). Each round asserts that N_discarded, which follows from its other counts
(`decode.loop.counts`), is what the target's cache drops.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from time import perf_counter

from decode.loop.counts import Counts
from decode.loop.drafter import Drafter, Proposal
from lm import CachedModel
from lm.batch import BatchRow
from lm.masks import ROOT, Tree


@dataclass(frozen=True)
class Round:
    """One draft, a chain or a tree, and its verification."""

    drafted: tuple[int, ...]
    num_accepted: int
    emitted: tuple[int, ...]
    """The accepted tokens and, unless the generation ended inside the draft, the residual or bonus token."""
    stop_reason: str
    """Why drafting stopped: limit, policy, eos."""
    counts: Counts
    draft_s: float
    target_s: float
    parents: tuple[int, ...] | None = None
    """Of a tree: parent of each drafted token, -1 for those right after the text."""
    path: tuple[int, ...] = ()
    """Of a tree: the accepted nodes."""

    @property
    def next_kind(self) -> str | None:
        """residual, bonus, or None if the draft's EOS ended the generation."""
        if len(self.emitted) == self.num_accepted:
            return None
        return "residual" if self.rejected else "bonus"

    @property
    def rejected(self) -> tuple[int, ...]:
        """The drafted tokens after the accepted ones; of a tree the likeliest path (siblings come in that order)."""
        if self.parents is None:
            return self.drafted[self.num_accepted :]
        tree = Tree(self.drafted, self.parents)
        path = [self.path[-1] if self.path else ROOT]
        while below := tree.children(path[-1]):
            path.append(below[0])
        return tuple(tree.tokens_of(path[1:]))

    def truncated(self, num_emitted: int) -> "Round":
        """The same round with only its first `num_emitted` tokens emitted; the rest counts as discarded."""
        num_accepted = min(self.num_accepted, num_emitted)
        counts = replace(self.counts, num_emitted=num_emitted, num_accepted=num_accepted)
        return replace(self, emitted=self.emitted[:num_emitted], num_accepted=num_accepted, counts=counts)

    def as_dict(self) -> dict[str, object]:
        """The record for JSON; times in seconds."""
        names = ["drafted", "num_accepted", "emitted", "next_kind", "stop_reason", "draft_s", "target_s"]
        if self.parents is not None:
            names += ["parents", "path"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Generation:
    """The generated tokens without the prompt, their rounds, and their cost."""

    token_ids: tuple[int, ...]
    rounds: tuple[Round, ...]
    counts: Counts

    @classmethod
    def of(cls, rounds: Iterable[Round]) -> "Generation":
        """The generation of these rounds."""
        rounds = tuple(rounds)
        token_ids = tuple(token for round_ in rounds for token in round_.emitted)
        # summed field by field: a `Counts` for every partial sum would cost a twentieth of a small model's round
        totals = {f.name: sum(getattr(round_.counts, f.name) for round_ in rounds) for f in fields(Counts)}
        return cls(token_ids, rounds, Counts(**totals))

    def as_dict(self) -> dict[str, object]:
        """Tokens, one record per round, and totals, for JSON."""
        rounds = [round_.as_dict() for round_ in self.rounds]
        return {"token_ids": self.token_ids, "rounds": rounds, "counts": asdict(self.counts)}


def settle_round(
    text: list[int],
    proposal: Proposal,
    next_token: int,
    target: CachedModel | BatchRow,
    drafter: Drafter,
    *,
    eos_ids: frozenset[int],
    clock_s: tuple[float, float] | None = None,
) -> Round:
    """End a verified round: extend the text by the accepted tokens and `next_token`, and roll the caches back.
    `clock_s` is when the round began and when it was drafted (None: the round is not timed).
    """
    accepted = tuple(proposal.accepted)
    tree = proposal.tree
    emitted = [proposal.tokens[index] for index in accepted]
    if not (emitted and emitted[-1] in eos_ids):
        emitted.append(next_token)
    text += emitted
    # the cache holds all fed tokens and should hold text[:-1]: the rest is N_discarded, measured instead of derived
    num_beyond = len(target) - (len(text) - 1)
    if tree is not None and isinstance(target, CachedModel):
        target.keep(accepted)
    target.roll_back(len(text) - 1)
    drafter.conclude(text, len(accepted))
    counts = counts_of(proposal, len(accepted), len(emitted))
    assert counts.num_discarded == num_beyond, f"law 4.4: {counts.num_discarded} discarded, {num_beyond} dropped"
    began_s, drafted_s = (0.0, 0.0) if clock_s is None else clock_s
    return Round(
        drafted=tuple(proposal.tokens),
        num_accepted=len(accepted),
        emitted=tuple(emitted),
        stop_reason=proposal.run.stop_reason,
        counts=counts,
        draft_s=drafted_s - began_s,
        target_s=0.0 if clock_s is None else perf_counter() - drafted_s,
        parents=None if tree is None else tuple(tree.parents),
        path=() if tree is None else accepted,
    )


def counts_of(proposal: Proposal, num_accepted: int, num_emitted: int) -> Counts:
    """Counts of a round that verifies this draft."""
    return Counts(
        num_emitted=num_emitted,
        num_drafted=len(proposal.tokens),
        num_target=1,
        num_accepted=num_accepted,
        num_draft_forwards=proposal.num_draft_forwards,
        num_micro=proposal.num_micro,
        num_micro_forwards=proposal.num_micro_forwards,
    )
