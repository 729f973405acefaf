"""Recorded traces of every form of draft (a model, its likeliest tokens, chains, blocks), and loops to play them."""

from dataclasses import fields, replace
from functools import cache

import numpy as np
import torch

from data_gen.responses.exchange import Exchange
from decode import ModelDrafter, SpeculativeDecoder
from decode.loop.counts import Counts
from decode.policies import DSparkConfidence, FixedLength, HeadPolicy, Policy
from decode.policies.auto import Auto
from evaluation.traces.coupling import Recorder
from evaluation.traces.recording import record_trace
from evaluation.traces.replay import replay_settings
from evaluation.traces.sampler import PlayedSampler
from evaluation.traces.trace import Trace
from heads import AcceptanceHead
from lm import Sampling
from tests.evaluation.flags.point_mass import PointMassDrafter
from tests.toys import small_pair
from tests.toys.loop import OF_BLOCKS, POLICIES, BothHeads
from tests.toys.random_drafts import VOCAB, beside, draft, feature_head, target_of

PROMPT, LENGTH, LIMIT, EOS = [1, 2, 3], 4, 9, 4
WARM, GREEDY = Sampling(temperature=1.3), Sampling(temperature=0)
COUNTED = tuple(f.name for f in fields(Counts) if "micro" not in f.name)
ALONE = {name: policy for name, policy in POLICIES.items() if not policy.heads}
"""Policies without heads."""


def _head_rules(width: int) -> dict[str, Policy]:
    rules: dict[str, Policy] = {
        timing: HeadPolicy(feature_head(timing, width), 0.6) for timing in ("fed", "drawn", "prefix")
    }
    rules["both"] = BothHeads((feature_head("fed", width), feature_head("drawn", width)), 0.6)
    rules["position"] = HeadPolicy(feature_head("fed", width, ("text_position",)), 0.6)
    rules["learning"] = HeadPolicy(feature_head("drawn", width), 0.6, is_learning=True)
    return ALONE | rules


@cache
def rules_of(kind: str) -> dict[str, Policy]:
    """Policies for a feature draft: of chains ("eagle") or of blocks ("rnn")."""
    width = draft(kind).hidden_size
    if kind != "rnn":
        return _head_rules(width)
    block_s = {"t_draft_s": 0.0, "t_target_s": 1.0, "t_verify_s": 0.2, "t_start_s": 0.2}
    rules = {f"auto_{timing}": Auto(feature_head(timing, width), **block_s) for timing in ("drawn", "prefix")}
    rules["dspark_product"] = DSparkConfidence(0.2, is_product=True)
    return _head_rules(width) | OF_BLOCKS | rules


def recorder(kind: str, sampling: Sampling = WARM, length: int = LENGTH, eos_ids: tuple[int, ...] = (EOS,)) -> Recorder:
    return Recorder(draft(kind), target_of(kind), sampling, VOCAB, frozenset(eos_ids), length)


def decoder_of(
    kind: str, policy: Policy, sampling: Sampling = WARM, *, length: int = LENGTH, eos_ids: tuple[int, ...] = (EOS,)
) -> SpeculativeDecoder:
    """The loop of a feature draft, of "model" (the small pair), or of "likeliest" (its draft's likeliest tokens)."""
    if kind in ("model", "likeliest"):
        make = PointMassDrafter if kind == "likeliest" else ModelDrafter
        drafter = make(small_pair.model(2), policy, vocab_size=small_pair.VOCAB)
        limits = {"max_draft_length": small_pair.LENGTH, "vocab_size": small_pair.VOCAB}
        eos_ids = frozenset({small_pair.EOS})
        return SpeculativeDecoder(small_pair.model(1, 2), drafter, sampling=sampling, eos_ids=eos_ids, **limits)
    tapped, model = beside(target_of(kind), draft(kind))
    drafter = ModelDrafter(model, policy)
    return SpeculativeDecoder(tapped, drafter, sampling=sampling, max_draft_length=length, eos_ids=frozenset(eos_ids))


def responses(num: int, sampling: Sampling = WARM, seed: int = 0) -> list[Exchange]:
    decoder, generator = decoder_of("eagle", FixedLength(0), sampling), torch.Generator().manual_seed(seed)
    texts = [list(decoder.generate(PROMPT, LIMIT, generator=generator).token_ids) for _ in range(num)]
    ends = ["stop" if text[-1] == EOS else "length" for text in texts]
    return [Exchange(str(i), "", PROMPT, text, end) for i, (text, end) in enumerate(zip(texts, ends, strict=True))]


@cache
def traced(kind: str, sampling: Sampling = WARM, num: int = 12) -> Trace:
    """A recorded trace; of the small pair all its prompts, else `num` responses."""
    if kind in ("model", "likeliest"):
        return small_pair.trace(sampling, draft_sampling=GREEDY if kind == "likeliest" else None)
    return record_trace(recorder(kind, sampling), responses(num, sampling), max_new_tokens=LIMIT)


def unscored(trace: Trace) -> Trace:
    return replace(trace, drafts={name: column for name, column in trace.drafts.items() if "score." not in name})


def model_head(timing: str) -> AcceptanceHead:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        head = AcceptanceHead(16, 1, timing, True, timing != "prefix")
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return head.eval()


def rows_that_differ(decoder: SpeculativeDecoder, policy: Policy, trace: Trace) -> list[int]:
    """Rows whose text, counts or draft lengths are not the replay's when the loop is played the trace."""
    replayed, different = replay_settings(trace, policy), []
    for number, row in enumerate(trace.rows):
        generation = decoder.generate(row.prompt_ids, row.limit, generator=PlayedSampler(trace, number))
        lengths = np.bincount([len(one.drafted) for one in generation.rounds], minlength=trace.max_draft_length + 1)
        counts = Counts(**{name: int(np.take(getattr(replayed.counts, name), number)) for name in COUNTED})
        assert generation.token_ids == row.response_ids
        if generation.counts != counts or not np.array_equal(lengths, replayed.lengths[0, number]):
            different.append(number)
    return different
