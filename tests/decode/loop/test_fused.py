"""The draft step as one compiled step is the step by step one; left uncompiled but in the last test."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode import ModelDrafter, Session
from decode.generate.in_transformers import ProcessedSampling
from decode.loop.fused import fused_step
from decode.policies import FixedLength
from heads import AcceptanceHead
from lm import CachedModel, RandomSampler, Sampling, UniformSource
from tests.decode.loop.test_signals import Watch
from tests.toys.enumeration import seeded
from tests.toys.loop import SAMPLINGS
from tests.toys.small_pair import llama

PROMPT = [1, 2, 3]


def a_model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama(num_hidden_layers=1, num_key_value_heads=2)).eval()


def a_head(timing, *inputs):
    torch.manual_seed(1)
    head = AcceptanceHead(16, 2, timing, *inputs).eval().requires_grad_(False)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head


def drafted(compile, sampling, draws, heads):
    """Tokens, laws and signals of two rounds: after the first, which was accepted, two tokens are fed."""
    policy = Watch(tuple(heads))
    drafter = ModelDrafter(CachedModel(a_model(), with_hidden=True, compile=compile), policy)
    drafter.start(Session(sampling, frozenset(), draws))
    first = drafter.propose(list(PROMPT), 5)
    committed = [*PROMPT, *first.tokens, 7]
    drafter.conclude(committed, 5)
    second = drafter.propose(committed, 4)
    assert (drafter._fused is not None) == (compile is not False)
    return first.tokens + second.tokens, torch.stack(first.dists + second.dists), torch.tensor(policy.seen)


def assert_alike(sampling, heads, make_draws=lambda: RandomSampler(seeded(3))):
    expected = drafted(False, sampling, make_draws(), heads)
    tokens, laws, signals = drafted("stop", sampling, make_draws(), heads)
    assert tokens == expected[0]
    torch.testing.assert_close(laws, expected[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(signals, expected[2], rtol=1e-4, atol=1e-4)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """In this process; the last test compiles in another."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.parametrize(
    ("sampling", "inputs"),
    [
        *((sampling, (True, True)) for sampling in SAMPLINGS.values()),
        *((Sampling(), inputs) for inputs in ((), (True,), (("entropy",), True), (("text_position",),))),
    ],
)
def test_tokens_laws_and_signals_are_those_of_the_unfused_step_for_heads_of_every_input(sampling, inputs):
    assert_alike(sampling, (a_head("fed", *inputs), a_head("drawn", *inputs), a_head("prefix", *inputs[:1])))


def test_a_settled_token_is_drawn_and_its_own_signals_are_read():
    class Settled(RandomSampler):
        def token(self, law):
            super().token(law)
            return 4

        def uniform(self):
            return super().uniform()[0], 4

    heads = a_head("fed", True, True), a_head("drawn", True, True)
    assert_alike(Sampling(), heads, Settled)
    assert drafted("stop", Sampling(), Settled(), heads)[0] == [4] * 9


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0)])
def test_a_distribution_that_is_not_finite_is_refused(sampling):
    model = a_model()
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    drafter = ModelDrafter(CachedModel(model, compile="stop"), FixedLength(2))
    drafter.start(Session(sampling, frozenset(), RandomSampler()))
    with pytest.raises(ValueError, match="not finite"):
        drafter.propose(list(PROMPT), 2)


def test_what_cannot_be_fused_is_not_and_a_step_outlives_its_drafter():
    class Told:
        def token(self, law):
            return 0

        num_accepted = draw = token

    assert not isinstance(Told(), UniformSource)
    policy, model, draws = FixedLength(2), CachedModel(a_model(), compile="stop"), RandomSampler()
    assert fused_step(policy, model, Sampling(), Told()) is None
    assert fused_step(policy, model, ProcessedSampling(), draws) is None
    assert fused_step(policy, CachedModel(a_model()), Sampling(), draws) is None
    made = fused_step(policy, model, Sampling(), draws)
    assert fused_step(FixedLength(3), model, Sampling(), draws) is made
    assert fused_step(policy, model, Sampling(0.5), draws) is not made


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
def test_the_fused_step_really_compiles_to_the_same():
    """In a process of its own, since what checks shapes in this one does not compile."""
    script = (
        "from lm import Sampling; from tests.decode.loop.test_fused import a_head, assert_alike; "
        "assert_alike(Sampling(0.7, 5, 0.9), [a_head(time, True, True) for time in ('fed', 'drawn')]); print('alike')"
    )
    how = {"capture_output": True, "text": True, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "check": False}
    found = subprocess.run([sys.executable, "-c", script], **how)
    assert found.stdout.split()[-1:] == ["alike"], found.stderr[-2000:]
