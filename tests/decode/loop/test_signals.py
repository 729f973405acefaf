"""Policies are shown untruncated temperature-1 signals and head scores at the right time (laws 4.1, 4.8, 4.8b)."""

import gc
from dataclasses import dataclass, field

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode import ModelDrafter, Session, SpeculativeDecoder, speculative_generate
from decode.loop.signals import HostSignals, SignalReader
from decode.policies import AfterDraw, FixedLength, HeadPolicy, Policy
from heads import AcceptanceHead
from heads.model import step as stepwise
from heads.model.step import HostHead, Vocabulary
from lm import CachedModel, RandomSampler, Sampling, entropy
from lm.signals import SCALARS
from tests.toys.enumeration import ToyModel, seeded
from tests.toys.extending import added_to
from tests.toys.loop import PROMPT, decoder_of, random_head, toy_head
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
@pytest.mark.parametrize("reader", [HostSignals, SignalReader])
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
        standard = [probs[token].log(), nats, probs[token].logit()]
        numbers = torch.stack(standard if scalars is True else extended)
        inputs = numbers, model.embedding(torch.tensor([token]))[0]
        of_prefix = torch.stack([nats, probs.max().logit()])
        expected |= {"drawn_logit": drawn(hidden, *inputs), "prefix_logit": prefix(hidden, of_prefix)}
        assert shown.position == i
        for name in named & expected.keys():
            tolerance = 1e-12 if reader is HostSignals and not name.endswith("logit") else 1e-5
            assert getattr(shown, name) == pytest.approx(float(expected[name]), rel=tolerance), name
        assert sampling.probs(logits)[token] > 0
        assert sampling.is_greedy or torch.equal(proposal.dists[i], sampling.probs(logits))


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("scalars", [False, True])
@pytest.mark.parametrize(("embedding", "largest_table"), [(False, 0), (True, 0), (True, 2**24)])
def test_the_host_head_equals_the_head(depth, scalars, embedding, largest_table, monkeypatch):
    """With what embeddings add worked out for every token, or for each anew."""
    monkeypatch.setattr(stepwise, "_LARGEST_TABLE", largest_table)
    torch.manual_seed(depth)
    head = AcceptanceHead(8, depth, "drawn", scalars, embedding).double().requires_grad_(False)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    embeddings = torch.randn(5, 8).double()
    on_host = HostHead(head, Vocabulary(5, lambda tokens: embeddings[tokens]))
    for token_id in (3, 0):
        hidden, pair = torch.randn(8).double(), torch.randn(3).double() if scalars else None
        expected = head(hidden, pair, embeddings[token_id] if embedding else None)
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


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0)])
def test_a_distribution_that_is_not_finite_is_refused(sampling):
    model = a_model()
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    drafter = ModelDrafter(CachedModel(model), FixedLength(2))
    drafter.start(Session(sampling, frozenset(), RandomSampler()))
    with pytest.raises(ValueError, match="not finite"):
        drafter.propose(list(TEXT), 2)
