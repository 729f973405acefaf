"""Policies are shown untruncated temperature-1 signals and head scores at the right time (laws 4.1, 4.8, 4.8b), also by
the fused step, which is compiled in the last test alone.
"""

import gc
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode import ModelDrafter, Session, SpeculativeDecoder, speculative_generate
from decode.generate.in_transformers import ProcessedSampling
from decode.loop.fused import fused_step
from decode.loop.signals import DeviceSignals, HostSignals
from decode.policies import AfterDraw, FixedLength, HeadPolicy, Policy
from heads import AcceptanceHead
from heads.model import step as stepwise
from heads.model.step import HostHead, StepwiseHead, Vocabulary
from lm import CachedModel, RandomSampler, Sampling, entropy
from lm.draws import UniformSource
from lm.signals import SCALARS
from tests.toys.enumeration import ToyModel, seeded
from tests.toys.extending import added_to
from tests.toys.loop import PROMPT, SAMPLINGS, decoder_of, random_head, toy_head
from tests.toys.random_pairs import random_pair
from tests.toys.small_pair import llama


@dataclass(frozen=True)
class Watch(Policy):
    """Never stops; keeps what it was shown."""

    heads: tuple[AcceptanceHead, ...] = ()
    seen: list[AfterDraw] = field(default_factory=list)
    signals = frozenset(AfterDraw._fields) - {"position", "confidence_logit"}

    def after(self, state, drawn):
        self.seen.append(drawn)
        return state, False


def head_with_every_input(timing: str, scalars: bool | list[str] = True) -> AcceptanceHead:
    return random_head(4, timing, scalars, timing != "prefix", timing != "fed").double()


@pytest.fixture
def _margin():
    """The scalar of docs/extending.md, which is an entry of a table and nothing else."""
    with added_to(SCALARS, "SCALARS"):
        yield


NAMES = [{"entropy"}, {"token_prob", "max_prob"}, {"drawn_logit"}, {"fed_logit", "entropy"}, {"prefix_logit"}]


@pytest.mark.usefixtures("_margin")
@pytest.mark.parametrize("reader", [HostSignals, DeviceSignals])
@pytest.mark.parametrize("named", [*NAMES, Watch.signals])
@pytest.mark.parametrize("scalars", [True, ["margin", "entropy", "text_position"]])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0), Sampling(0.5, top_k=2)])
def test_signals_are_those_of_the_untruncated_distribution_and_heads_score_at_their_time(
    sampling, scalars, named, reader
):
    """By each reader, whatever the policy names."""
    fed, drawn = (head_with_every_input(timing, scalars) for timing in ("fed", "drawn"))
    prefix, model = head_with_every_input("prefix"), ToyModel(2, 5)
    policy = type("Names", (Watch,), {"signals": frozenset(named)})((fed, drawn, prefix))
    drafter = ModelDrafter(model, policy)
    drafter._signals = reader(policy, model)
    drafter.start(Session(sampling, frozenset(), RandomSampler(seeded(4))))
    proposal = drafter.propose(list(PROMPT), 4)
    inputs = None
    for i, (token, shown) in enumerate(zip(proposal.tokens, policy.seen, strict=True)):
        fresh = ToyModel(2, 5)
        logits = fresh.feed([*PROMPT, *proposal.tokens[:i]])[-1]
        probs, hidden, nats = logits.softmax(-1), fresh.hidden[-1], entropy(logits)
        expected = {"entropy": nats, "max_prob": probs.max(), "token_prob": probs[token]}
        expected["fed_logit"] = float("inf") if inputs is None else fed(hidden, *inputs)
        extended = [logits.max() - logits[token], nats, torch.tensor(1.0 + len(PROMPT) + i).log()]
        numbers = torch.stack([probs[token].log(), nats] if scalars is True else extended)
        inputs = numbers, model.embedding(torch.tensor([token]))[0]
        expected |= {"drawn_logit": drawn(hidden, *inputs), "prefix_logit": prefix(hidden, nats[None])}
        assert shown.position == i
        for name in named & expected.keys():
            tolerance = 1e-12 if reader is HostSignals and not name.endswith("logit") else 1e-5
            assert getattr(shown, name) == pytest.approx(float(expected[name]), rel=tolerance), name
        assert sampling.probs(logits)[token] > 0
        assert sampling.is_greedy or torch.equal(proposal.dists[i], sampling.probs(logits))


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("scalars", [False, True])
@pytest.mark.parametrize(("embedding", "largest_table"), [(False, 0), (True, 0), (True, 2**24)])
def test_the_stepwise_heads_equal_the_head(depth, scalars, embedding, largest_table, monkeypatch):
    """With what embeddings add worked out for every token, or for each anew."""
    monkeypatch.setattr(stepwise, "_LARGEST_TABLE", largest_table)
    torch.manual_seed(depth)
    head = AcceptanceHead(8, depth, "drawn", scalars, embedding).double().requires_grad_(False)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    embeddings = torch.randn(5, 8).double()
    step = StepwiseHead(head, Vocabulary(5, lambda tokens: embeddings[tokens]))
    on_host = HostHead(step)
    for token_id in (3, 0):
        hidden, pair = torch.randn(8).double(), torch.randn(2).double() if scalars else None
        expected = head(hidden, pair, embeddings[token_id] if embedding else None)
        torch.testing.assert_close(step(hidden, pair, torch.tensor([token_id]))[0], expected)
        numbers = () if pair is None else tuple(pair.tolist())
        assert on_host.score(hidden.numpy(), numbers, token_id) == pytest.approx(expected.item(), rel=1e-12)


def test_a_heads_table_is_built_once_for_all_rows_and_calls_and_anew_where_weights_changed():
    pair = random_pair("llama")
    embedding, built = pair[1].get_input_embeddings(), []
    embedding.register_forward_hook(lambda module, ids, _: built.append(ids[0].numel() == module.num_embeddings))
    head = AcceptanceHead(16, 1, "drawn", embedding=True)

    def num_built(target, draft) -> int:
        built.clear()
        settings = {"draft_model": draft, "policy": HeadPolicy(head), "max_new_tokens": 6, "do_sample": False}
        target.generate(torch.tensor([[3, 1, 4]]), custom_generate=speculative_generate, **settings)
        decoder = SpeculativeDecoder(CachedModel(target), ModelDrafter(CachedModel(draft), HeadPolicy(head)))
        decoder.generate_batch([[3, 1, 4], [1, 5], [2]], 6, batch_size=3)
        return sum(built)

    assert [num_built(*pair), num_built(*pair)] == [1, 0]
    with torch.no_grad():
        head.mix.weight.add_(1)
        embedding.weight.mul_(2)
    assert [num_built(*pair), num_built(*pair)] == [1, 0]
    assert len(stepwise._TABLES[head]) == 1
    del embedding, pair
    gc.collect()
    assert len(stepwise._TABLES[head]) == 0


class Wrong(Policy):
    signals = frozenset({"mood"})


def test_an_unknown_signal_and_a_head_of_another_width_are_refused_and_what_no_policy_asks_for_is_not_computed():
    for policy, message in ((Wrong(), "mood"), (HeadPolicy(AcceptanceHead(6, 1)), "width 6")):
        with pytest.raises(ValueError, match=message):
            ModelDrafter(ToyModel(2), policy)
    drafter = ModelDrafter(ToyModel(2), FixedLength(3))
    drafter.start(Session(Sampling(), frozenset(), RandomSampler(seeded())))
    drafter.propose(list(PROMPT), 3)
    assert [drawn.entropy for _, drawn in drafter.run.steps] == [0.0, 0.0, 0.0]


def test_a_fed_head_scores_each_token_once_and_a_stop_costs_no_forward_more():
    decoder = decoder_of(HeadPolicy(toy_head("fed", seed=2), 0.5), eos_ids=())
    for played in decoder.generate(PROMPT, 40, generator=seeded()).rounds:
        assert played.counts.num_draft_forwards == len(played.drafted)


TEXT = [1, 2, 3]


def a_model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama(num_hidden_layers=1, num_key_value_heads=2)).eval()


def a_head(timing, *inputs):
    return random_head(16, timing, *inputs, std=0.5)


def drafted(compile, sampling, draws, heads):
    """Tokens, laws and signals of two rounds: after the first, which was accepted, two tokens are fed."""
    policy = Watch(tuple(heads))
    drafter = ModelDrafter(CachedModel(a_model(), with_hidden=True, compile=compile), policy)
    drafter.start(Session(sampling, frozenset(), draws))
    first = drafter.propose(list(TEXT), 5)
    committed = [*TEXT, *first.tokens, 7]
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
        drafter.propose(list(TEXT), 2)


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
    assert fused_step(FixedLength(3), model, Sampling(), draws) is fused_step(policy, model, Sampling(), draws)
    assert fused_step(policy, model, Sampling(0.5), draws) is not fused_step(policy, model, Sampling(), draws)


def test_generate_with_a_draft_that_is_kept_makes_the_rounds_of_an_eager_one_and_compiles_once():
    target, draft = random_pair("llama")
    kept, head = CachedModel(draft, compile="stop"), HeadPolicy(a_head("drawn", True, True))
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9}):
        how, rounds = {"custom_generate": speculative_generate, "policy": head, "return_dict_in_generate": True}, []
        for model in (draft, kept, kept):
            torch.manual_seed(0)
            output = target.generate(torch.tensor([TEXT]), draft_model=model, max_new_tokens=30, **how, **sampling)
            rounds.append([(one.drafted, one.emitted) for one in output.generation.rounds])
        assert rounds[0] == rounds[1] == rounds[2]
    assert [len(step._graphs) for step in kept.compiled_steps.values()] == [1, 1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
def test_the_fused_step_really_compiles_to_the_same():
    """In a process of its own, since what checks shapes in this one does not compile."""
    script = (
        "from tests.decode.loop.test_signals import *; "
        "test_generate_with_a_draft_that_is_kept_makes_the_rounds_of_an_eager_one_and_compiles_once(); "
        "assert_alike(Sampling(0.7, 5, 0.9), [a_head(time, True, True) for time in ('fed', 'drawn')]); print('alike')"
    )
    how = {"capture_output": True, "text": True, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "check": False}
    found = subprocess.run([sys.executable, "-c", script], **how)
    assert found.stdout.split()[-1:] == ["alike"], found.stderr[-2000:]
