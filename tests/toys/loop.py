"""The toy loops that the laws of decoding are proven on: two models that disagree, every policy, every sampling."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import decode.loop.batch
from decode import ModelDrafter, SpeculativeDecoder, policies
from decode.drafters.trees import Shape, TreeDrafter
from decode.policies import FixedLength, HeadPolicy, Policy
from decode.policies.auto import Auto
from decode.policies.base import Number
from decode.policies.batch import BatchAuto, BatchCosts, Curve, batched
from decode.policies.learning import sigmoid
from decode.policies.registry import POLICIES as REGISTERED
from decode.policies.registry import RULES, SOLVED
from heads import AcceptanceHead
from lm import Sampler, Sampling
from lm.batch import BatchModel, batch_of
from lm.masks import Tree
from tests.toys.enumeration import Law, ToyModel, assert_same_law, law_of
from tests.toys.observed import observed

PROMPT = [0, 1]
OTHER = [1, 0, 2, 1]
SAMPLINGS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.5),
    "top_k": Sampling(temperature=0.7, top_k=2),
    "top_p": Sampling(top_p=0.7),
    "greedy": Sampling(temperature=0),
}
BY_POSITION = ("entropy", "text_position")


def random_head(
    width: int, timing: str, *inputs: Any, depth: int = 2, seed: int = 1, std: float = 1.0
) -> AcceptanceHead:
    """A head whose weights spread its scores."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = AcceptanceHead(width, depth, timing, *inputs)
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=std)
    return head.eval().requires_grad_(False)


def toy_head(timing: str, *, seed: int, scalars: bool | tuple[str, ...] = True) -> AcceptanceHead:
    """A head of the toys."""
    return random_head(4, timing, scalars, depth=1, seed=seed).double()


@dataclass(frozen=True)
class Recalling(Policy):
    """Learns of a token by what it had drawn before it in the round, and drafts as many tokens next as that says."""

    signals = frozenset({"token_prob"})
    zero_feedback = (0.0,)

    def start(self):
        return 0.0, 0.1

    def begin(self, state):
        return 0.0, state[1]

    def limit(self, state):
        return 1.0 + np.floor(17.3 * state[1]) % 2.0

    def after(self, state, drawn):
        return (state[0] + drawn.token_prob, state[1]), False

    def feedback(self, state, drawn, acceptance_prob):
        return (acceptance_prob / (1.0 + state[0]),)

    def end(self, state, outcome):
        return 0.0, 0.5 * state[1] + outcome.feedback[0]


@dataclass(frozen=True)
class BothHeads(Policy):
    """Of two heads: the fed-time one scores every token once it has been fed, and the drawn-time one the newest."""

    heads: tuple[AcceptanceHead, ...] = ()
    max_rejection_prob: Number = 0.5
    signals = frozenset({"fed_logit", "drawn_logit"})

    def start(self):
        return (1.0,)

    def begin(self, state):
        return (1.0,)

    def after(self, state, drawn):
        survival = state[0] * sigmoid(drawn.fed_logit)
        return (survival,), 1.0 - survival * sigmoid(drawn.drawn_logit) > self.max_rejection_prob


POLICIES: dict[str, Policy] = {
    "never_draft": FixedLength(0),
    "fixed_length": FixedLength(2),
    "heuristic": policies.Heuristic(1),
    "token_prob": policies.TokenProb(0.4),
    "cumulative_token_prob": policies.CumulativeTokenProb(0.3),
    "max_prob": policies.MaxProb(0.6),
    "entropy": policies.Entropy(0.3),
    "self_verify": policies.SelfVerify(),
    "ada_edl": policies.AdaEDL(initial_lambda=0.65),
    "fed_head": HeadPolicy(toy_head("fed", seed=2), 0.5),
    "drawn_head": HeadPolicy(toy_head("drawn", seed=2), 0.5),
    "learning_head": HeadPolicy(toy_head("drawn", seed=2), 0.5, is_learning=True),
    "prefix_head": HeadPolicy(toy_head("prefix", seed=2), 0.5),
    "learning_prefix_head": HeadPolicy(toy_head("prefix", seed=2), 0.5, is_learning=True),
    "position_heads": BothHeads(
        (toy_head("fed", seed=2, scalars=BY_POSITION), toy_head("drawn", seed=3, scalars=BY_POSITION))
    ),
    "prefix_position": HeadPolicy(toy_head("prefix", seed=7, scalars=BY_POSITION), 0.5),
    "recalling": Recalling(),
    "llama_cpp": policies.LlamaCpp(p_min=0.6),
    "both_heads": BothHeads((toy_head("fed", seed=2), toy_head("drawn", seed=2))),
}
OF_BLOCKS = {name: each.kind() for name, each in RULES.items() if "confidence_logit" in each.kind.signals}
"""Rules that ask a DSpark draft for what no other has."""
POLICIES |= {
    name: each.kind()
    for name, each in (REGISTERED | RULES).items()
    if name not in (*POLICIES, *OF_BLOCKS) and name not in SOLVED
}
"""Every registered policy and engine's rule for any draft, so that the laws are proven for a new one at once."""

RULE = BatchAuto(toy_head("drawn", seed=2), BatchCosts(Curve.line(0.1), Curve.line(1.0, 0.05)), 2, index_slope=0.3)
WITHOUT_HEAD = policies.AutoTokenProb(0.25, 1.0, slope=0.8, offset=0.3, index_slope=0.3, probe_every=2)
AUTOS = {
    "auto_token_prob": WITHOUT_HEAD,
    "batch_rule": RULE,
    "learning_rule": replace(RULE, is_learning=True),
    "batch_rule_without_head": batched(WITHOUT_HEAD, 2),
    "auto": Auto(toy_head("fed", seed=2), 0.1, 1.0, t_verify_s=0.05),
}
"""Rules that price tokens, whose lambda a batch learns together, and the rule of one sequence."""


class ToyBatch(BatchModel):
    """Toys that feed themselves, in the batches of every decoder."""

    def __init__(self, model, num):
        shape = {"width": model.width, "sharpness": model.sharpness}
        self.rows = [ToyModel(model.seed, model.vocab_size, **shape) for _ in range(num)]

    def feed(self, rows, new_tokens, num_logits):
        return torch.cat([row.feed(tokens, num) for row, tokens, num in zip(rows, new_tokens, num_logits, strict=True)])


def toy_batch_of(model, num_rows, num_tokens):
    return ToyBatch(model, num_rows) if isinstance(model, ToyModel) else batch_of(model, num_rows, num_tokens)


decode.loop.batch.batch_of = toy_batch_of


def decoder_of(
    policy: Policy, *, sampling: Sampling | None = None, eos_ids: Sequence[int] = (2,), length: int = 20
) -> SpeculativeDecoder:
    """The real loop on two toys that disagree."""
    how = {"sampling": sampling, "eos_ids": frozenset(eos_ids), "max_draft_length": length}
    return SpeculativeDecoder(ToyModel(1), ModelDrafter(ToyModel(2), policy), **how)


def law(decoder: SpeculativeDecoder, max_new_tokens: int, prompt: Sequence[int] = PROMPT) -> Law:
    """The loop's law, exactly; law 4.4 holds on every branch."""

    def play(draws: Sampler) -> tuple[int, ...]:
        with observed(decoder) as seen:
            generation = decoder.generate(prompt, max_new_tokens, generator=draws)
        seen.check(generation, len(prompt))
        return generation.token_ids

    return law_of(play)


def assert_lossless(
    decoder: SpeculativeDecoder, max_new_tokens: int, prompt: Sequence[int] = PROMPT, tolerance: float = 1e-12
) -> None:
    """The loop's law is its target's."""
    expected = decoder.target.law(prompt, max_new_tokens, sampling=decoder.sampling, eos_ids=decoder.eos_ids)
    assert_same_law(law(decoder, max_new_tokens, prompt), expected, tolerance)


class ToyTreeModel(ToyModel):
    """A toy whose cache holds a text and, behind it, a tree; logits depend on what was fed and kept."""

    holds_trees = True

    def reset(self, num_tokens: int = 0) -> None:
        super().reset(num_tokens)
        self.tree = Tree()

    def __len__(self) -> int:
        return len(self.fed) + len(self.tree)

    def roll_back(self, length: int) -> None:
        self.tree = Tree()
        super().roll_back(length)

    def feed_tree(self, new: list[int], tree: Tree) -> Tensor:
        assert not (new and len(self.tree))
        assert list(tree.tokens[: len(self.tree)]) == list(self.tree.tokens)
        self.fed += new
        nodes = [tree.path(node) for node in range(len(self.tree), len(tree))]
        prefixes = [tuple(self.fed + tree.tokens_of(path)) for path in ([[]] if new else []) + nodes]
        self.forwards.append(len(new) + len(nodes))
        self.tree = tree
        return self.rows_after(prefixes)

    def keep(self, path: list[int]) -> None:
        self.fed += self.tree.tokens_of(path)
        self.tree = Tree()


def tree_decoder_of(
    policy: Policy, shape: Shape, *, eos_ids: Sequence[int] = (2,), length: int = 20, read_every: int = 1, **how: Any
) -> SpeculativeDecoder:
    """The real loop on two toys that disagree."""
    drafter = TreeDrafter(ToyTreeModel(2), policy, shape, read_every=read_every)
    return SpeculativeDecoder(ToyTreeModel(1), drafter, eos_ids=frozenset(eos_ids), max_draft_length=length, **how)
