"""The toy loops that the laws of decoding are proven on: two models over three tokens that disagree, every policy, every sampling."""

from collections.abc import Sequence

import torch

from decode import ModelDrafter, SpeculativeDecoder
from decode.policies import (
    AdaEDL,
    CumulativeTokenProb,
    Entropy,
    FixedLength,
    HeadPolicy,
    Heuristic,
    LearnedProb,
    MaxProb,
    Policy,
    SelfVerify,
    TokenProb,
)
from decode.policies.registry import POLICIES as REGISTERED
from heads import AcceptanceHead
from lm import Draws, Sampling
from tests.decode.enumeration import ToyModel, law_of
from tests.decode.observed import observed

PROMPT = [0, 1]
SAMPLINGS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.5),
    "top_k": Sampling(temperature=0.7, top_k=2),
    "top_p": Sampling(top_p=0.7),
    "greedy": Sampling(temperature=0),
}


def toy_head(timing: str, *, seed: int) -> AcceptanceHead:
    """A head of depth 1 with scalars and weights that spread its scores."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = AcceptanceHead(4, 1, timing, True)
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter)
    return head.double()


POLICIES: dict[str, Policy] = {
    "never_draft": FixedLength(0),
    "fixed_length": FixedLength(2),
    "heuristic": Heuristic(1),
    "token_prob": TokenProb(0.4),
    "cumulative_token_prob": CumulativeTokenProb(0.3),
    "max_prob": MaxProb(0.6),
    "entropy": Entropy(0.3),
    "self_verify": SelfVerify(),
    "ada_edl": AdaEDL(initial_lambda=0.65),
    "fed_head": HeadPolicy(toy_head("fed", seed=2), 0.5),
    "drawn_head": HeadPolicy(toy_head("drawn", seed=2), 0.5),
    "learning_head": HeadPolicy(toy_head("drawn", seed=2), 0.5, is_learning=True),
    "prefix_head": HeadPolicy(toy_head("prefix", seed=2), 0.5),
    "learning_prefix_head": HeadPolicy(toy_head("prefix", seed=2), 0.5, is_learning=True),
    "learned_prob": LearnedProb(0.7),
    "both_heads": HeadPolicy(toy_head("fed", seed=2), 0.5, also=toy_head("drawn", seed=2), is_calibrated=True),
}
POLICIES |= {name: each.kind() for name, each in REGISTERED.items() if name not in POLICIES and name != "head"}
"""Every registered policy, so that the laws are proven for a new one at once."""


def decoder_of(policy: Policy, *, sampling: Sampling | None = None, eos_ids: Sequence[int] = (2,), length: int = 20) -> SpeculativeDecoder:
    """The real loop on two toys that disagree."""
    drafter = ModelDrafter(ToyModel(2), policy)
    return SpeculativeDecoder(ToyModel(1), drafter, sampling=sampling, eos_ids=frozenset(eos_ids), max_draft_length=length)


def law(decoder: SpeculativeDecoder, max_new_tokens: int, prompt: Sequence[int] = PROMPT) -> dict[tuple[int, ...], float]:
    """The loop's law, exactly; law 4.4 holds on every branch."""

    def play(draws: Draws) -> tuple[int, ...]:
        with observed(decoder) as seen:
            generation = decoder.generate(prompt, max_new_tokens, generator=draws)
        seen.check(generation, len(prompt))
        return generation.token_ids

    return law_of(play)
