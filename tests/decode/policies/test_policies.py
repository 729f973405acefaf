"""Policies stop where their published rules say, on floats and on arrays alike; defaults are the official ones.

Those that know nothing of the token stop before it is drawn: prefix heads (law 4.8c).
"""

import copy
import pickle
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from decode import policies
from decode.loop.signals import reader_of
from decode.policies import (
    AdaEDL,
    AfterDraw,
    DSparkConfidence,
    Entropy,
    FixedLength,
    HeadPolicy,
    Heuristic,
    Outcome,
    Policy,
    SelfVerify,
    head_policy,
)
from decode.policies.auto import Auto
from decode.policies.base import mapped
from decode.policies.registry import POLICIES as BY_NAME
from decode.policies.registry import RULES, Registered, parse_policy
from decode.policies.scores import sigmoid
from heads import AcceptanceHead, Provenance
from lm import entropy
from lm.signals import Normalised, signals_of
from tests.toys.enumeration import ToyModel, seeded
from tests.toys.loop import POLICIES


def test_official_defaults():
    defaults = {name: {f.name: f.default for f in fields(registered.kind)} for name, registered in BY_NAME.items()}
    official = {
        "token_prob": {"min_token_prob": 0.4},
        "max_prob": {"min_max_prob": 0.6},
        "entropy": {"max_sqrt_entropy": 0.3, "scale": 0.15},
        "heuristic": {"k": 5},
        "self_verify": {"initial": 0.0},
        "ada_edl": {"scale": 0.2, "step": 0.01, "target_rate": 0.9},
        "head": {"max_rejection_prob": 0.7},
    }
    for name, values in official.items():
        assert defaults[name] | values == defaults[name], name


def ended(num_accepted: int, num_drafted: int, num_allowed: int = 9, entropy: float = 0.0) -> Outcome:
    return Outcome(num_drafted, num_accepted, num_allowed, entropy)


def test_svip_and_transformers_heuristic_do_as_published():
    """Official code: draft until sqrt(0.15 H) > 0.3; two more tokens after full acceptance, else one less."""
    assert [bool(Entropy().after((), AfterDraw(0, entropy=nats))[1]) for nats in (0.599, 0.601)] == [False, True]
    policy = Heuristic()
    state = policy.start()
    for outcome, length in ((ended(5, 5), 7), (ended(2, 7), 6), (ended(0, 0), 6), *((ended(0, 2), k) for k in (5, 4))):
        state = policy.end(state, outcome)
        assert policy.limit(state) == length
    assert policy.limit(policy.end((1,), ended(0, 1))) == 1


def test_self_verify_compares_with_the_running_mean_of_rejected_entropies():
    policy = SelfVerify()
    state = policy.start()
    assert policy.after(state, AfterDraw(0, entropy=0.01))[1]
    for outcome in (ended(1, 2, entropy=1.0), ended(1, 2, entropy=2.0), ended(2, 2)):
        state = policy.end(state, outcome)
    assert not policy.after(state, AfterDraw(0, entropy=1.5))[1]
    assert policy.after(state, AfterDraw(0, entropy=1.51))[1]


def test_ada_edl_moves_its_threshold_as_published():
    policy = AdaEDL(initial_lambda=0.2)
    assert policy.end((0.2, 1.0), ended(4, 4, 4)) == pytest.approx((0.2, 1.0))
    assert policy.end((0.2, 0.9), ended(1, 4)) == pytest.approx((0.9 * 0.2 + 0.1 * 0.21, 0.5 * 0.9 + 0.5 * 0.25))
    assert policy.end((0.2, 1.0), ended(4, 4)) == pytest.approx((0.9 * 0.2 + 0.1 * 0.19, 1.0))
    assert policy.stop_before((0.5, 0.9), AfterDraw(position=1, entropy=1.3).before)
    assert not policy.stop_before((0.5, 0.9), AfterDraw(position=1, entropy=1.2).before)


@pytest.mark.parametrize("is_calibrated", [False, True])
def test_the_head_policy_stops_where_the_survival_product_says(is_calibrated):
    head = AcceptanceHead(4, 0, provenance=Provenance(reject_weight=6.0))
    policy = HeadPolicy(head, 0.5, is_calibrated=is_calibrated)
    logits = [np.inf, 1.0, 0.2, -0.4]
    shift = np.log(6.0) if is_calibrated else 0.0
    survival, state = 1.0, policy.begin(policy.start())
    for i, logit in enumerate(logits):
        survival *= 1 / (1 + np.exp(-(logit + shift)))
        state, stop = policy.after(state, AfterDraw(position=i, fed_logit=logit))
        assert bool(stop) == (1 - survival > 0.5)


TUNED = {"t_draft_s": 0.1, "t_target_s": 1.0, "throughput": 2.0}
TUNED |= {"index_offset": 0.3, "index_slope": 0.4, "first_index": 0.2}


@pytest.mark.parametrize("timing", ["fed", "drawn"])
def test_a_head_policy_on_auto_is_the_rule(timing):
    head = AcceptanceHead(4, 0, timing, provenance=Provenance(recommended=TUNED))
    rule, policy = Auto.recommended(head), head_policy(head, "auto")
    fixed = HeadPolicy(head, 0.5)
    assert head_policy(head, 0.5) == fixed
    spec = parse_policy("auto:PATH", load_head=lambda path: head)
    for each in (policy, copy.copy(policy), spec):
        assert each == rule
    assert pickle.loads(pickle.dumps(policy)).throughput == rule.throughput == 2.0
    assert copy.copy(fixed) == fixed
    assert pickle.loads(pickle.dumps(fixed)).max_rejection_prob == 0.5


HEAD = AcceptanceHead(4, 0, provenance=Provenance(recommended=TUNED))
PREFIX, DRAWN = AcceptanceHead(4, 0, "prefix"), AcceptanceHead(4, 0, "drawn")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: head_policy(AcceptanceHead(4, 0), "auto"), "acceptance-heads tune"),
        (lambda: head_policy(HEAD, "automatic"), "or auto"),
        (lambda: HeadPolicy(HEAD, "auto"), r'use decode.policies.head_policy\(head, "auto"\)'),
        (lambda: HeadPolicy(HEAD, 0.4, is_learning=True), "not a fed-time one"),
        (lambda: Auto(HEAD, -1.0, 1.0), "t_draft_s is -1.0"),
        (lambda: Auto(HEAD, 0.1, 0.0), "t_target_s is 0.0"),
        (lambda: HeadPolicy(DRAWN, 0.5, keeps_newest=True), "keeps_newest is for a prefix head"),
    ],
)
def test_heads_and_thresholds_that_cannot_be_are_refused(make, problem):
    assert HeadPolicy(HEAD, 0.4, True) == HeadPolicy(HEAD, max_rejection_prob=0.4, is_calibrated=True)
    with pytest.raises(ValueError, match=problem):
        make()


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_on_an_array_what_it_gives_on_each_number(name):
    policy, generator = POLICIES[name], np.random.default_rng(0)
    columns = AfterDraw(*generator.uniform(0.01, 1.5, (len(AfterDraw._fields), 8)))
    three, num_accepted = np.full(8, 3.0), generator.integers(0, 4, 8).astype(float)
    outcome = Outcome(three, num_accepted, three, generator.uniform(0, 2, 8))

    def play(drawn, outcome):
        state = policy.begin(policy.start())
        before = policy.stops_before and policy.stop_before(state, drawn.before)
        state, stop = policy.after(state, drawn)
        state = policy.end(state, outcome._replace(feedback=policy.feedback(state, drawn, drawn.max_prob / 1.5)))
        return policy.limit(state), before, stop, *numbers_of(state)

    def numbers_of(state):
        return [number for each in state for number in (numbers_of(each) if isinstance(each, tuple) else [each])]

    together = [np.broadcast_to(value, 8) for value in play(columns, outcome)]
    for lane in range(8):
        alone = play(*(mapped(lambda column, lane=lane: float(column[lane]), given) for given in (columns, outcome)))
        assert [float(column[lane]) for column in together] == pytest.approx([float(value) for value in alone])


@dataclass(frozen=True)
class Named(Policy):
    name: float = 0.5


def test_specs_parse_to_policies(monkeypatch):
    """A parameter may be called name, and the name of a head is never a number."""
    assert parse_policy("entropy:max_sqrt_entropy=0.4") == Entropy(0.4)
    assert parse_policy("fixed_length:k=7") == FixedLength(7)
    assert parse_policy("dspark:min_confidence=0.3,is_product=true") == DSparkConfidence(0.3, is_product=True)
    assert not RULES.keys() & BY_NAME.keys(), "rules compete only where they are named"
    monkeypatch.setitem(BY_NAME, "named", Registered(Named, "named", lambda _: {}))
    assert parse_policy("named:name=0.25") == Named(0.25)
    for name in ("some/dir", "5", "true", "0.4", "1e999"):
        given, spec = [], f"head:{name},max_rejection_prob=0.4,is_calibrated=true"
        policy = parse_policy(spec, load_head=lambda path, given=given: given.append(path) or HEAD)
        assert (policy, given) == (HeadPolicy(HEAD, 0.4, is_calibrated=True), [name])
    kinds = {registered.kind for registered in BY_NAME.values() if registered.kind.__module__.startswith("decode.")}
    assert kinds <= {getattr(policies, kind.__name__) for kind in kinds}


@pytest.mark.parametrize(
    ("spec", "said"),
    [("svip", "no policy"), ("entropy:h=1", "no parameter"), ("entropy:0.4", "parameter=value"),
     ("head", "exported head"), ("token_prob:min_token_prob=1.5", "probability"), ("fixed_length:k=-1", "at least 0"),
     ("heuristic:k=0", "at least 1"), ("ada_edl:scale=-3", "at least 0"), ("self_verify:initial=abc", "initial"),
     ("ada_edl:target_rate=abc", "target_rate is 'abc'; it must be a prob"), ("llama_cpp:n_max=abc", "n_max"),
     ("llama_cpp:n_max=0", "n_max is 0"),
     ("llama_cpp:p_min=1.2", "p_min is 1.2"), ("assisted:num_assistant_tokens=0", "num_assistant_tokens is 0"),
     ("dspark:min_confidence=2", "min_confidence is 2"),
     ("ada_edl:initial_lambda=true", "initial_lambda"), ("self_verify:initial=-1", "at least 0"),
     ("fixed_length:k=true", "k is True"), ("fixed_length:k=2.5", "whole number"), ("heuristic:k=1e999", "whole"),
     ("fixed_length:k=2,k=3", "gives k twice"), ("head:PATH,head=OTHER", "gives head twice"),
     ("head:PATH,is_calibrated=1", "true or false|cannot take"),
     ("head:PATH,is_learning=abc", "true or false|cannot take"), ("dspark:is_product=2", "true or false")],
)  # fmt: skip
def test_a_spec_that_makes_no_sense_is_refused(spec, said):
    with pytest.raises(ValueError, match=said):
        parse_policy(spec, load_head=lambda path: AcceptanceHead(4, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropy_of_a_near_certain_token_is_at_least_zero(dtype):
    """Rounding brings the sum below 0 in float32 for some of these, and a root of that is no real number."""
    logits = 40 * torch.randn(200, 64, generator=seeded(), dtype=dtype)
    by_host = reader_of(Entropy(0.3), ToyModel(2))
    for row in logits:
        token = int(row.argmax())
        read = signals_of(Normalised(row[None]), torch.tensor([token]), ["entropy"])["entropy"]
        assert min(float(entropy(row)), float(read), by_host.read(0, row, token).entropy) >= 0.0


def lengths_of(policy: Policy, logits: list[float]) -> list[str]:
    """What becomes of each token, of a draft that goes on whatever the policy says."""
    state, said = policy.begin(policy.start()), []
    for position, logit in enumerate(logits):
        seen = AfterDraw(position, prefix_logit=logit)
        before = policy.stops_before and bool(policy.stop_before(state, seen.before))
        state, after = policy.after(state, seen)
        said.append("before" if before else "after" if after else "on")
    return said


def test_a_prefix_head_stops_before_the_token_that_it_doubts_or_keeps_it_and_stops_there():
    head, logits = PREFIX, [2.0, 1.0, -0.5, 3.0]
    assert [round(float(x), 2) for x in np.cumprod(sigmoid(np.array(logits)))] == [0.88, 0.64, 0.24, 0.23]
    assert lengths_of(HeadPolicy(head, 0.6), logits) == ["on", "on", "before", "before"]
    assert lengths_of(HeadPolicy(head, 0.6, keeps_newest=True), logits) == ["on", "on", "after", "after"]
    assert lengths_of(HeadPolicy(head, 0.6), [-9.0]) == ["on"], "the first token is always drafted"


def test_auto_stops_before_the_draw_only_for_the_sake_of_a_tokens_own_verification():
    logits = [2.0, 1.0, -0.5, -3.0]
    rule = Auto(PREFIX, 0.1, 1.0, 0.05, throughput=2.0, is_online=False, index_offset=0.5)
    # S = 0.88, 0.64, 0.24, 0.01: before at S < 2 * 0.05, after at 0.5 S < 2 * (0.1 + 0.05)
    assert lengths_of(rule, logits) == ["on", "on", "after", "before"]
    assert lengths_of(replace(rule, t_verify_s=0.0), logits) == ["on", "on", "after", "after"]
