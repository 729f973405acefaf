"""The trace of a feature draft: each draft in it is that of a round by itself, and played to the real loop it has its
replay's counts.
"""

from dataclasses import fields

import numpy as np
import pytest
import torch
from test_played import rows_that_differ

from data_gen.responses.exchange import Exchange
from decode import Generation, ModelDrafter, SpeculativeDecoder
from decode.policies import Entropy, FixedLength, HeadPolicy, Policy
from evaluation.report.plots import reliability_plot
from evaluation.traces.bounds import Oracle, ScoreHead
from evaluation.traces.branches import signal_names
from evaluation.traces.chains import ChainRecorder
from evaluation.traces.recording import record_trace
from evaluation.traces.replay import replay, replay_settings
from evaluation.traces.trace import Trace
from lm import Sampling, TappedModel, acceptance_prob, entropy, feature_model, residual_probs
from lm.uniforms import draw, uniforms
from tests.toys.enumeration import law_of
from tests.toys.loop import POLICIES
from tests.toys.random_drafts import BLOCKS, KINDS, VOCAB, draft, feature_head, target

PROMPT, LENGTH, LIMIT, EOS = [1, 2, 3], 4, 9, 4
WARM = Sampling(temperature=1.3)


def recorder(
    kind: str, sampling: Sampling = WARM, length: int = LENGTH, eos_ids: tuple[int, ...] = (EOS,)
) -> ChainRecorder:
    return ChainRecorder(draft(kind), target(), sampling, VOCAB, frozenset(eos_ids), length)


def responses(num: int, sampling: Sampling = WARM, seed: int = 0, eos_ids: tuple[int, ...] = (EOS,)) -> list[Exchange]:
    """Drawn from the target."""
    decoder = decoder_of("eagle", FixedLength(0), sampling, eos_ids=eos_ids)
    generator = torch.Generator().manual_seed(seed)
    texts = [list(decoder.generate(PROMPT, LIMIT, generator=generator).token_ids) for _ in range(num)]
    return [
        Exchange(str(place), "", PROMPT, text, "stop" if text[-1] in eos_ids else "length")
        for place, text in enumerate(texts)
    ]


def decoder_of(
    kind: str, policy: Policy, sampling: Sampling = WARM, *, length: int = LENGTH, eos_ids=(EOS,)
) -> SpeculativeDecoder:
    tapped = TappedModel(target(), draft(kind))
    drafter = ModelDrafter(feature_model(draft(kind), tapped), policy)
    return SpeculativeDecoder(tapped, drafter, sampling=sampling, max_draft_length=length, eos_ids=frozenset(eos_ids))


def traced(kind: str, sampling: Sampling = WARM, num: int = 12, seed: int = 0) -> Trace:
    return record_trace(recorder(kind, sampling), responses(num, sampling, seed), max_new_tokens=LIMIT, seed=seed)


def expected_draft(
    kind: str, response: list[int], start: int, chance: torch.Tensor
) -> tuple[list[int], int, list[dict[str, float]]]:
    """(tokens, how many pass, signals of each) of the round from `start`, drafted token by token beside the target."""
    tapped = TappedModel(target(), draft(kind))
    model = feature_model(draft(kind), tapped)
    tapped.forward([*PROMPT, *response[:start]][:-1])
    tokens, rejected, told = [], None, []
    for place in range(min(LENGTH, LIMIT - 1 - start)):
        committed = [*PROMPT, *response[:start]]
        logits = model.forward([*committed, *tokens])
        q = WARM.probs(logits)
        p = WARM.probs(target()(torch.tensor([[*committed, *tokens]]), use_cache=False).logits[:, -1])
        position = start + place
        if rejected is None:
            own = torch.tensor(response[position : position + 1])
            if chance[position, 0] < acceptance_prob(own, q=p, p=q):
                token = own
            else:
                token, rejected = draw(residual_probs(q=p, p=q), chance[position, 1:2]), place
        else:
            token = draw(q, chance[start + rejected, 1 + place - rejected].view(1))
        tokens.append(int(token))
        told.append(
            {
                "entropy": float(entropy(logits)),
                "log_token_prob": float(logits.log_softmax(-1)[0, token]),
                "acceptance_prob": float(acceptance_prob(token, q, p)),
                "hidden": model.hidden[0],
            }
        )
        if tokens[-1] == EOS:
            break
    return tokens, len(tokens) if rejected is None else rejected, told


def test_what_no_draft_can_draw_is_not_among_the_first_drawn_and_bends_no_plot():
    """A response's token beyond a reduced vocabulary has log q = -inf, and a head's score of it is no number."""
    trace = traced("reduced", num=40)
    assert np.isneginf(trace.signals["log_token_prob"][: trace.num_positions]).any()
    drawn = trace.first_drawn[trace.is_drafted]
    assert np.isfinite(trace.signals["log_token_prob"][drawn]).all()
    np.testing.assert_array_equal(trace.is_drafted, trace.branch_lengths > 0)
    heads = {timing: feature_head(timing) for timing in ("drawn", "fed")}
    assert reliability_plot(trace, heads).svg.startswith("<svg")


@torch.no_grad()
@pytest.mark.parametrize("kind", [*KINDS, *BLOCKS])
def test_every_draft_of_a_trace_is_that_of_a_round_by_itself(kind):
    [first, *_] = [one for one in responses(20) if len(one.response_ids) > 6]
    response, one = first.response_ids, recorder(kind)
    chance = uniforms(5, len(response), one.num_uniforms)
    recorded = one.record(PROMPT, response, LIMIT, chance)
    ends = len(response) + recorded.branch_lengths.cumsum(0)
    assert recorded.branch_lengths[0] == 0
    for start in range(1, len(response)):
        here = slice(int(ends[start - 1]), int(ends[start]))
        tokens, passing, told = expected_draft(kind, response, start, chance)
        assert recorded.token[here].tolist() == tokens
        assert recorded.num_passing[start] == passing
        signals = dict(zip(signal_names(), recorded.signals.unbind(-1), strict=True))
        signals["acceptance_prob"] = recorded.acceptance_prob
        for name in ("entropy", "log_token_prob", "acceptance_prob"):
            assert signals[name][here].tolist() == pytest.approx([step[name] for step in told], abs=1e-6)
        for hidden, step in zip(recorded.hidden[here], told, strict=True):
            assert torch.allclose(hidden, step["hidden"], atol=1e-10)


HEADS = {timing: HeadPolicy(feature_head(timing), 0.6) for timing in ("fed", "drawn", "prefix")}
HEADS |= {
    "both": HeadPolicy(feature_head("fed"), 0.6, also=feature_head("drawn")),
    "learning": HeadPolicy(feature_head("drawn"), 0.6, is_learning=True),
}
RULES = HEADS | {name: policy for name, policy in POLICIES.items() if not policy.heads}


@pytest.fixture(scope="module")
def recorded() -> Trace:
    return traced("eagle")


@pytest.mark.parametrize("name", RULES)
def test_the_loop_counts_what_replay_counts_for_every_policy(name, recorded):
    assert not rows_that_differ(decoder_of("eagle", RULES[name]), RULES[name], recorded)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("name", ["drawn", "fed", "self_verify"])
def test_the_loop_counts_what_replay_counts_for_every_kind_of_draft(kind, name):
    assert not rows_that_differ(decoder_of(kind, RULES[name]), RULES[name], traced(kind, num=5))


@pytest.mark.parametrize("name", ["fixed_length", "entropy", "drawn"])
def test_at_temperature_0_replay_agrees_with_decoding(name):
    greedy = Sampling(temperature=0)
    counts = replay(traced("eagle", greedy, num=1), RULES[name])
    real = decoder_of("eagle", RULES[name], greedy).generate(PROMPT, LIMIT).counts
    assert tuple(getattr(counts, f.name) for f in fields(counts)) == tuple(getattr(real, f.name) for f in fields(real))


def test_the_mean_counts_of_replay_are_those_of_the_loop_s_exact_law():
    """Four z-scores; all below 4 but with probability 2.5e-4 if the means are equal."""
    sampling, limit, copies = Sampling(temperature=1.5, top_k=2), 4, 12
    trace, weights = None, np.zeros(0)
    for policy in (FixedLength(2), Entropy(1.2)):
        decoder = decoder_of("glide", policy, sampling, length=2, eos_ids=())
        law = law_of(lambda draws, decoder=decoder: outcome_of(decoder.generate(PROMPT, limit, generator=draws)))
        texts: dict[tuple[int, ...], float] = {}
        for (text, *_), prob in law.items():
            texts[text] = texts.get(text, 0.0) + prob
        if trace is None:  # the first policy's texts, in their order, are those of both
            known, weights = list(texts), np.array(list(texts.values()))
            every = [
                Exchange(str(place), "", PROMPT, list(text), "length")
                for place, text in enumerate(known)
                for _ in range(copies)
            ]
            trace = record_trace(recorder("glide", sampling, 2, ()), every, max_new_tokens=limit, seed=7)
        assert [texts[text] for text in known] == pytest.approx(weights.tolist())
        counts = replay_settings(trace, policy).counts
        for place, amounts in ((1, counts.num_drafted[0]), (2, counts.num_target[0])):
            exact = sum(prob * outcome[place] for outcome, prob in law.items())
            groups = amounts.reshape(len(known), copies).astype(float)
            error = np.sqrt((weights**2 * groups.var(1, ddof=1) / copies).sum())
            assert error < 0.1
            assert (weights * groups.mean(1)).sum() == pytest.approx(exact, rel=0, abs=4 * error + 1e-9), (
                "an error of 0 leaves rounding"
            )


def outcome_of(generation: Generation) -> tuple[tuple[int, ...], int, int]:
    return generation.token_ids, generation.counts.num_drafted, generation.counts.num_target


def test_the_bounds_stand_where_they_should(recorded):
    fixed = min(replay(recorded, FixedLength(k)).num_target for k in range(LENGTH + 1))
    oracle = replay(recorded, Oracle())
    assert oracle.num_drafted == oracle.num_accepted
    assert oracle.num_target <= fixed
    perfect = replay(recorded, HeadPolicy(ScoreHead("perfect", "drawn"), 0.5))
    assert 0 < perfect.num_accepted <= perfect.num_drafted


def test_a_part_of_a_trace_has_the_drafts_of_its_rows(recorded):
    whole = replay_settings(recorded, FixedLength(3)).counts
    part = replay_settings(recorded.select([7, 2]), FixedLength(3)).counts
    assert part.num_target[0].tolist() == whole.num_target[0, [7, 2]].tolist()
    short = recorded.select([7], num_tokens=4)
    assert replay(short, FixedLength(3)).num_emitted == min(4, len(recorded.rows[7].response_ids))
    assert not rows_that_differ(decoder_of("eagle", FixedLength(3)), FixedLength(3), short)
