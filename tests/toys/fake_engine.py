"""A serving engine in miniature: a continuous batch that drafts in lockstep through `serve.lanes`, and may make
requests wait.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from decode.loop.signals import BatchSignals
from decode.policies import AfterDraw, Policy
from lm import Sampler, Sampling, verify
from serve.lanes import Lanes, RequestRow


@dataclass
class Asked:
    """One request, and what became of it: of each verified round, the tokens drafted and what the policy saw."""

    id: str
    policy: Policy
    committed: list[int]
    max_new_tokens: int
    draws: Sampler
    waits_after: frozenset[int] = frozenset()
    """Rounds whose draft is not verified: the request loses its row, and comes back later."""
    rounds: list[tuple[list[int], list[AfterDraw]]] = field(default_factory=list)
    verified: tuple[int, ...] = ()
    num_accepted: int = 0
    laws: list[Tensor] = field(default_factory=list)
    num_begun: int = 0

    def __post_init__(self) -> None:
        self.num_prompt = len(self.committed)
        self.end = self.num_prompt + self.max_new_tokens


class FakeEngine:
    """Models of the engine, and its batch."""

    def __init__(
        self,
        target: LlamaForCausalLM,
        draft: LlamaForCausalLM,
        *,
        sampling: Sampling,
        eos: int,
        num_rows: int,
        longest: int,
    ):
        self.target, self.draft, self.sampling, self.eos = target, draft, sampling, eos
        self.num_rows, self.longest = num_rows, longest
        self.lanes, self.signals = Lanes(), BatchSignals(draft.get_input_embeddings())
        self.most_remembered = 0

    @torch.inference_mode()
    def run(self, requests: Sequence[Asked]) -> None:
        """Serve all of them; a row that is free takes the next."""
        waiting, batch = list(requests), list[Asked]()
        while waiting or batch:
            while waiting and len(batch) < self.num_rows:
                batch.append(waiting.pop(0))
            self.propose(batch, alive={asked.id for asked in [*batch, *waiting] if asked.num_begun})
            self.most_remembered = max(self.most_remembered, len(self.lanes))
            for asked, tokens, drawn in list(zip(batch, self.lanes.drafts, self.seen, strict=True)):
                if asked.num_begun in asked.waits_after:
                    batch.remove(asked)
                    waiting.append(asked)
                    asked.verified = ()
                elif self.verified(asked, tokens, drawn):
                    batch.remove(asked)

    def propose(self, batch: list[Asked], alive: set[str]) -> None:
        for asked in batch:
            asked.num_begun, asked.laws = asked.num_begun + 1, []
        alive |= {asked.id for asked in batch}
        self.seen: list[list[AfterDraw]] = [[] for _ in batch]
        rooms = [min(self.longest, asked.end - len(asked.committed) - 1) for asked in batch]
        stops = frozenset({self.eos})
        rows = [
            RequestRow(a.id, a.policy, a.verified, a.num_accepted, room, stops)
            for a, room in zip(batch, rooms, strict=True)
        ]
        fed = [list(asked.committed) for asked in batch]
        goes_on, position = self.lanes.begin(rows, alive), 0
        while goes_on:
            steps = list(self.steps(batch, fed))
            logits, hidden = (torch.stack(each) for each in list(zip(*steps, strict=True))[:2])
            token = torch.tensor([step[2] for step in steps])
            given = {"policies": self.lanes.policies, "nums_before": [len(a.committed) - a.num_prompt for a in batch]}
            tokens, drawn = self.signals.read(position, logits, hidden, token, **given)
            for place, one in enumerate(drawn):
                self.seen[place].append(one)
                fed[place].append(tokens[place])
            goes_on, position = self.lanes.step(tokens, drawn), position + 1

    def steps(self, batch: list[Asked], fed: list[list[int]]) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Logits, hidden state and token of each row; one that has stopped gets any token, and draws none of its
        own.
        """
        for place, (asked, ids) in enumerate(zip(batch, fed, strict=True)):
            output = self.draft(torch.tensor([ids]), output_hidden_states=True)
            logits = output.logits[0, -1]
            law = self.sampling.dists(logits[None], ids)[0]
            is_going = self.lanes._rows[place].run.is_going
            asked.laws.append(law)
            yield (
                logits,
                output.hidden_states[-1][0, -1],
                asked.draws.token(law) if is_going else (7 * place) % len(law),
            )

    def verified(self, asked: Asked, tokens: list[int], drawn: list[AfterDraw]) -> bool:
        """Verify a draft; True if the request has ended."""
        fed = asked.committed + tokens
        logits = self.target(torch.tensor([fed])).logits[0, len(asked.committed) - 1 :]
        verdict = verify(tokens, asked.laws[: len(tokens)], self.sampling.dists(logits, fed), asked.draws)
        asked.verified, asked.num_accepted = tuple(tokens), verdict.num_accepted
        asked.rounds.append((tokens, drawn[: len(tokens)]))
        emitted = tokens[: verdict.num_accepted]
        if self.eos not in emitted:
            emitted.append(verdict.next_token)
        asked.committed += emitted
        return self.eos in emitted or len(asked.committed) >= asked.end
