"""The draft step as one compiled step is the step by step one: same tokens, laws and signals. Left uncompiled but in
the last test.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from decode import ModelDrafter, Session
from decode.generate.in_transformers import ProcessedSampling
from decode.loop.fused import fused_step
from decode.policies import AfterDraw, FixedLength, Policy
from heads import AcceptanceHead
from lm import CachedModel, RandomSampler, Sampling, UniformSource
from tests.toys.loop import SAMPLINGS

SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
PROMPT = [1, 2, 3]


@dataclass(frozen=True)
class Watch(Policy):
    """Never stops; keeps what it was shown."""

    fed_head: AcceptanceHead | None = None
    drawn_head: AcceptanceHead | None = None
    prefix_head: AcceptanceHead | None = None
    seen: list[AfterDraw] = field(default_factory=list)
    signals = frozenset(AfterDraw._fields) - {"position", "confidence_logit"}

    def after(self, state, drawn):
        self.seen.append(drawn)
        return state, False


def a_model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_hidden_layers=1)).eval()


def a_head(timing, *inputs):
    torch.manual_seed(1)
    head = AcceptanceHead(16, 2, timing, *inputs).eval().requires_grad_(False)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head


def drafted(compile, sampling, draws, heads):
    """Tokens, laws and signals of two rounds: the second feeds the last token of the first, which was accepted, and one
    more.
    """
    policy = Watch(*heads)
    drafter = ModelDrafter(CachedModel(a_model(), with_hidden=True, compile=compile), policy)
    drafter.start(Session(sampling, frozenset(), draws))
    first = drafter.propose(list(PROMPT), 5)
    committed = [*PROMPT, *first.tokens, 7]
    drafter.conclude(committed, 5)
    second = drafter.propose(committed, 4)
    assert (drafter._fused is not None) == (compile is not False)
    return first.tokens + second.tokens, torch.stack(first.dists + second.dists), torch.tensor(policy.seen)


def assert_alike(sampling, heads, make_draws=lambda: RandomSampler(torch.Generator().manual_seed(3))):
    expected = drafted(False, sampling, make_draws(), heads)
    tokens, laws, signals = drafted("stop", sampling, make_draws(), heads)
    assert tokens == expected[0]
    torch.testing.assert_close(laws, expected[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(signals, expected[2], rtol=1e-4, atol=1e-4)


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_tokens_laws_and_signals_are_those_of_the_unfused_step(sampling):
    assert_alike(sampling, (a_head("fed", True, True), a_head("drawn", True, True), a_head("prefix", True)))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("inputs", [(), (True,), (("entropy",), True), (("text_position",),)])
def test_heads_of_every_input_score_as_in_the_unfused_step(inputs):
    assert_alike(Sampling(), (a_head("fed", *inputs), a_head("drawn", *inputs)))


@pytest.mark.usefixtures("uncompiled")
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


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0)])
def test_a_distribution_that_is_not_finite_is_refused(sampling):
    model = a_model()
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    drafter = ModelDrafter(CachedModel(model, compile="stop"), FixedLength(2))
    drafter.start(Session(sampling, frozenset(), RandomSampler()))
    with pytest.raises(ValueError, match="not finite"):
        drafter.propose(list(PROMPT), 2)


@pytest.mark.usefixtures("uncompiled")
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
        "import sys; sys.path += ['tests/decode', 'tests/decode/loop']; import test_fused as here; from lm import "
        "Sampling; "
        "here.assert_alike(Sampling(0.7, 5, 0.9), (here.a_head('fed', True, True), here.a_head('drawn', True, "
        "True))); print('alike')"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert found.stdout.split()[-1:] == ["alike"], found.stderr[-2000:]
