"""The loop counts what replay counts, whatever the policy and the form of the draft (law 4.10): on a trace that it is
played, whose text it writes, at temperature 0 by itself, and on average on the embedded pair."""

import numpy as np
import pytest
import torch

from configs.schema import DataConfig, ModelSource, PairConfig
from data_gen.prompts.sets import load_prompts
from data_gen.prompts.templates import encode
from decode.drafters.factory import PairModels
from decode.policies import Entropy, FixedLength, HeadPolicy
from decode.policies.auto import Auto
from evaluation.traces.coupling import Recorder
from evaluation.traces.replay import replay_settings
from evaluation.traces.sampler import PlayedSampler
from evaluation.traces.trace import Trace
from heads import AcceptanceHead
from lm import Pair, Sampling, load_pair
from tests.evaluation.traces import forms
from tests.evaluation.traces.forms import COUNTED, GREEDY, model_head, rows_that_differ, rules_of
from tests.toys.loop import POLICIES, SAMPLINGS, WITHOUT_HEAD, BothHeads, decoder_of, toy_head
from tests.toys.random_drafts import BLOCKS, KINDS
from tests.toys.small_pair import traced_by
from tests.toys.traces import traced

RULES = POLICIES | {
    "auto_online": Auto(toy_head("drawn", seed=2), 0.2, 1.0, probe_every=2),
    "auto_token_prob": WITHOUT_HEAD,
    "auto_learning": Auto(toy_head("drawn", seed=2), 0.2, 1.0, probe_every=2, is_learning=True),
    "auto_before_the_draw": Auto(
        toy_head("prefix", seed=2), 0.05, 1.0, t_verify_s=0.3, probe_every=2, is_learning=True
    ),
    "kept_prefix_head": HeadPolicy(toy_head("prefix", seed=2), 0.5, keeps_newest=True),
    "auto_stops_drafting": Auto(toy_head("fed", seed=2), 2.0, 1.0, prior_rounds=1.0, probe_every=2),
}
SOME = ("fixed_length", "heuristic", "token_prob", "cumulative_token_prob", "max_prob", "self_verify", "ada_edl")
MODEL_RULES = {name: POLICIES[name] for name in SOME} | {
    "fed_head": HeadPolicy(model_head("fed"), 0.5),
    "drawn_head": HeadPolicy(model_head("drawn"), 0.5),
    "both_heads": BothHeads((model_head("fed"), model_head("drawn"))),
}
PLAYED = [
    *((kind, name) for kind in ("eagle", "rnn") for name in rules_of(kind)),
    *((kind, name) for kind in (*KINDS[1:], "deepseek_v3", "qwen3_next") for name in ("drawn", "fed", "self_verify")),
    *((kind, "token_prob") for kind in BLOCKS),
]
COLD = [("model", name, policy) for name, policy in (MODEL_RULES | {"entropy": Entropy(0.3)}).items()]
COLD += [("eagle", name, rules_of("eagle")[name]) for name in ("fixed_length", "entropy", "drawn")]


TOYS = [(policy, "plain", 4, 3, (2,)) for policy in RULES]
OTHERS = [("top_k", 5, 2, ()), ("top_p", 3, 2, (0, 2)), ("greedy", 5, 2, (2,)), ("cold", 1, 2, (2,))]
TOYS += [
    (policy, *other)
    for policy in ("fixed_length", "ada_edl", "both_heads", "auto_online", "auto_token_prob")
    for other in OTHERS
]


@pytest.mark.parametrize(("policy", "sampling", "limit", "length", "eos_ids"), TOYS)
def test_the_loop_counts_what_replay_counts_for_every_policy(policy, sampling, limit, length, eos_ids):
    _, every = traced(sampling, limit, length, eos_ids)
    some = every.select(range(0, len(every.rows), max(1, len(every.rows) // 30)))
    decoder = decoder_of(RULES[policy], sampling=SAMPLINGS[sampling], eos_ids=eos_ids, length=length)
    assert not rows_that_differ(decoder, RULES[policy], some)


@pytest.mark.parametrize(("kind", "name"), PLAYED)
def test_the_loop_counts_what_replay_counts_for_every_feature_draft(kind, name):
    rules = rules_of("rnn" if kind in BLOCKS else "eagle")
    trace = forms.traced(kind, num=12 if kind in ("eagle", "rnn") else 5)
    assert not rows_that_differ(forms.decoder_of(kind, rules[name]), rules[name], trace)


@pytest.mark.parametrize(("kind", "name", "policy"), COLD)
def test_at_temperature_0_replay_agrees_with_decoding_prompt_by_prompt(kind, name, policy):
    trace = forms.traced("eagle" if kind == "eagle" else "model", GREEDY, num=1)
    counts, decoder = replay_settings(trace, policy).counts, forms.decoder_of(kind, policy, GREEDY)
    for number, row in enumerate(trace.rows[:20]):
        real = decoder.generate(list(row.prompt_ids), row.limit).counts
        assert [int(getattr(counts, name)[0, number]) for name in COUNTED] == [getattr(real, name) for name in COUNTED]


@pytest.mark.parametrize("kind", ["toys", "eagle", "rnn"])
def test_a_part_of_a_trace_replays_as_it_does_in_the_whole(kind):
    trace = traced("plain", 3, 2, (2,))[1] if kind == "toys" else forms.traced(kind)
    rows = [0, 7, len(trace.rows) - 1, 2]
    names = ("both_heads", "self_verify") if kind == "toys" else ("fixed_length", "drawn", "self_verify")
    for policy in (POLICIES[name] if kind == "toys" else rules_of(kind)[name] for name in names):
        whole, part = replay_settings(trace, policy).counts, replay_settings(trace.select(rows), policy).counts
        for name in COUNTED:
            assert np.array_equal(getattr(whole, name)[:, rows], getattr(part, name)), name
    if kind != "toys":
        short = trace.select([7], num_tokens=4)
        assert len(short.rows[0].response_ids) == min(4, len(trace.rows[7].response_ids))
        assert not rows_that_differ(forms.decoder_of(kind, FixedLength(3)), FixedLength(3), short)


def test_a_played_draw_costs_what_a_real_one_does_and_gives_the_recorded_token():
    _, every = traced("plain", 4, 3, (2,))
    number = int(np.flatnonzero([len(row.response_ids) == 4 for row in every.rows])[0])
    read: list[float] = []
    played = PlayedSampler(every, number)
    passing = int(every.rejected[every.offsets[number]]) - int(every.offsets[number])
    assert played.num_accepted(read.append(prob) or prob for prob in (0.1, 0.2, 0.3)) == min(passing, 3)
    assert len(read) == min(passing + 1, 3)
    probs = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    assert played.token(probs) == every.rows[number].response_ids[min(passing, 3)]
    with pytest.raises(ValueError, match="not finite"):
        played.token(probs * float("nan"))
    for number in range(0, len(every.rows), 50):  # on a device the token is a tensor
        one, other = PlayedSampler(every, number), PlayedSampler(every, number)
        assert [int(one.draw(probs)) for _ in range(2)] == [other.token(probs) for _ in range(2)]


REAL_LENGTH, NUM_TOKENS, COPIES, NUM_PROMPTS = 8, 40, 8, 8
LIMIT = 4.0
"""Of 22 z-scores one exceeds it with a probability of 1.4e-3; seeds are fixed."""


def head(timing: str) -> AcceptanceHead:
    """A head with random weights, which stops now and then."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = AcceptanceHead(96, 1, timing, True)
        torch.nn.init.normal_(made.out.weight, std=0.05)
    return made.eval()


FED, DRAWN = head("fed"), head("drawn")
REAL_RULES = MODEL_RULES | {
    "fed_head": HeadPolicy(FED, 0.5),
    "drawn_head": HeadPolicy(DRAWN, 0.5),
    "both_heads": BothHeads((FED, DRAWN)),
}


@pytest.fixture(scope="module")
def pair() -> Pair:
    target, draft = (ModelSource(path=f"checkpoints/tiny/{role}", dtype="float32") for role in ("target", "draft"))
    return load_pair(PairConfig(target=target, draft=draft))


@pytest.fixture(scope="module")
def prompts(pair: Pair) -> list[list[int]]:
    return [encode(prompt, pair.tokenizer, "chat") for prompt in load_prompts(DataConfig(num_test=NUM_PROMPTS), "test")]


@pytest.fixture(scope="module", params=[Sampling(), Sampling(temperature=0)], ids=["plain", "greedy"])
def recorded(request, pair: Pair, prompts: list[list[int]]) -> tuple[Sampling, Trace]:
    sampling = request.param
    recorder = Recorder(pair.draft, pair.target, sampling, pair.vocab_size, pair.eos_ids, REAL_LENGTH)
    return sampling, traced_by(recorder, prompts * (1 if sampling.is_greedy else COPIES), NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("policy", REAL_RULES)
def test_replay_counts_what_decoding_counts_on_a_real_pair(pair, prompts, recorded, policy):
    """Paired by prompt: equal counts at temperature 0, else z-scores of drafted tokens and rounds."""
    sampling, trace = recorded
    models, generator = PairModels(pair), torch.Generator().manual_seed(0)
    drafter = models.drafter(REAL_RULES[policy])
    decoder = models.decoder(drafter, sampling=sampling, max_draft_length=REAL_LENGTH)
    decoded = [decoder.generate(ids, NUM_TOKENS, generator=generator).counts for ids in prompts]
    replayed = replay_settings(trace, REAL_RULES[policy]).counts
    for name in ("num_drafted", "num_target"):
        found = getattr(replayed, name)[0].reshape(-1, len(prompts)).astype(float)
        real = np.array([getattr(counts, name) for counts in decoded], dtype=float)
        if sampling.is_greedy:
            assert found[0].tolist() == real.tolist()
            continue
        variance = (found.var(axis=0, ddof=1) * (1 + 1 / COPIES)).sum()
        z = float((real - found.mean(axis=0)).sum() / np.sqrt(max(variance, 1e-9)))
        assert abs(z) < LIMIT, f"{name}: z = {z:.2f}"
