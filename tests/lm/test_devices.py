"""Models on devices that this machine lacks (`tests.toys.devices`): draft and target apart, or spread over two."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from data_gen.labels.labeller import Labeller
from data_gen.responses.exchange import Exchange, Request
from data_gen.responses.target import TargetInProcess
from decode.drafters.hierarchies import InnerRounds, InterleavedDrafter, PreVerifiedDrafter
from decode.drafters.trees import TreeDrafter
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.policies import Entropy, FixedLength, HeadPolicy, Policy
from decode.policies.base import State
from heads.model.head import AcceptanceHead
from lm import CachedModel, RandomSampler, Sampling, verify
from lm.draws import draw
from lm.verification import revealed_probs
from tests.cases import first_fast
from tests.toys.devices import FakeDevices, device_of, put
from tests.toys.enumeration import seeded
from tests.toys.small_pair import random_llama as model_of

FIRST, SECOND = "cuda:0", "cuda:1"
PROMPT = [1, 2, 3]
PLAIN, GREEDY = SAMPLINGS = Sampling(), Sampling(temperature=0.0)


def place(model, device):
    """On a device; where it is None, over two, as accelerate does it: every part takes its inputs to where it is, and
    the whole model its outputs back to the ids. A tied LM head is where the embedding is.
    """
    put(model, device or FIRST)
    if device is None:
        is_tied = model.lm_head.weight is model.model.embed_tokens.weight
        devices = {model.model.layers[1]: SECOND, model.model.norm: SECOND, model.lm_head: FIRST if is_tied else SECOND}
        for module, place in devices.items():
            put(module, place)
            module.forward = partial(_take_along, module.forward, torch.device(place))
        model.forward = partial(_bring_back, model.forward)
        model._hf_hook = None


def _take_along(forward, device, *args, **kwargs):
    args, kwargs = torch.utils._pytree.tree_map(partial(moved, device=device), (args, kwargs))
    return forward(*args, **kwargs)


def _bring_back(forward, *args, **kwargs):
    output = forward(*args, **kwargs)
    output.logits = moved(output.logits, torch.device(FIRST))
    if output.hidden_states is not None:
        output.hidden_states = tuple(moved(states, torch.device(FIRST)) for states in output.hidden_states)
    return output


def moved(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def timeless(generation):
    return [(one.drafted, one.emitted) for one in generation.rounds]


def loop(target, drafter, sampling=PLAIN):
    return SpeculativeDecoder(target, drafter, sampling=sampling, eos_ids=frozenset())


def head_of(timing, **inputs):
    torch.manual_seed(0)
    return AcceptanceHead(16, 1, timing, scalars=True, **inputs)


HEADS = [HeadPolicy(head_of(timing, embedding=True), 0.6) for timing in ("fed", "drawn")]


@dataclass(frozen=True)
class Learns(Policy):
    """Looks at no token, and learns of each after verification: the next draft is as long as that says."""

    signals: frozenset[str] = frozenset()
    zero_feedback = (0.0,)

    def start(self) -> State:
        return (0.0,)

    def limit(self, state):
        return 1.0 + np.floor(17.3 * state[0]) % 3.0

    def feedback(self, state, drawn, acceptance_prob):
        return (drawn.position + drawn.entropy + acceptance_prob,)

    def end(self, state, outcome):
        return (0.5 * state[0] + outcome.rejected_entropy + outcome.feedback[0],)


@pytest.mark.parametrize(
    ("policy", "sampling", "places"),
    [
        *((FixedLength(3), sampling, (target, SECOND)) for target in (FIRST, None) for sampling in SAMPLINGS),
        *((policy, PLAIN, ("cpu", None)) for policy in HEADS),
        *((Learns(signals), PLAIN, (FIRST, FIRST)) for signals in (frozenset(), frozenset({"entropy"}))),
        pytest.param(Learns(), GREEDY, (FIRST, FIRST), marks=pytest.mark.slow),
    ],
)
def test_output_is_the_same_wherever_target_and_draft_are(policy, sampling, places):
    def generated(models):
        decoder = loop(models[0], ModelDrafter(models[1], policy), sampling)
        return timeless(decoder.generate(PROMPT, 12, generator=seeded()))

    expected, models = generated([model_of(0), model_of(1)]), [model_of(0), model_of(1)]
    for model, device in zip(models, places, strict=True):
        place(model, device)
    with FakeDevices():
        assert generated(models) == expected


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", ["chain", "tree", "batch"])
def test_heads_score_a_draft_that_is_spread_over_two_devices(kind, is_tied):
    """Logits come back to the ids, and the states that the LM head has read do not."""

    def generated(draft):
        policy = HeadPolicy(head_of("drawn").double(), 0.6)
        return played(kind, loop(model_of(0), drafter_of(kind, draft, policy)))

    expected, draft = generated(model_of(1, tie_word_embeddings=is_tied)), model_of(1, tie_word_embeddings=is_tied)
    place(draft, None)
    with FakeDevices():
        assert generated(draft) == expected


@pytest.mark.parametrize("policy", [Entropy(0.9), HeadPolicy(head_of("drawn", embedding=True).double(), 0.6)])
def test_signals_are_read_where_logits_are_if_only_the_embedding_is_on_the_cpu(policy):
    def generated(draft):
        return played("chain", loop(model_of(0), ModelDrafter(draft, policy)))

    expected, draft = generated(model_of(1)), model_of(1)
    place(draft, FIRST)
    put(draft.model.embed_tokens, "cpu")
    draft.model.forward = partial(_embed_and_take_along, draft.model.embed_tokens, draft.model.forward)
    with FakeDevices():
        assert generated(draft) == expected


def _embed_and_take_along(embedding, forward, **kwargs):
    embedded = {"inputs_embeds": embedding(kwargs["input_ids"]), "input_ids": None}
    return _take_along(forward, torch.device(FIRST), **(kwargs | embedded))


def test_batches_read_signals_where_there_is_no_float64():
    def generated(models):
        return played("batch", loop(models[0], ModelDrafter(models[1], Entropy(0.9))))

    expected, models = generated([model_of(0), model_of(1).float()]), [model_of(0), model_of(1).float()]
    put(models[1], "mps")
    with FakeDevices():
        assert generated(models) == expected


class Elsewhere(torch.Generator):
    device = torch.device(FIRST)


def test_draws_take_a_generator_of_any_device_and_are_the_same_where_there_is_no_float64():
    probs = torch.rand(20, generator=seeded())

    def drawn(probs):
        by_seed = [RandomSampler(seeded(seed)).token(probs) for seed in range(9)]
        uniforms = [torch.tensor([0.1 * index], dtype=torch.float64) for index in range(9)]
        return by_seed, [draw(probs[None], uniform).item() for uniform in uniforms]

    expected = drawn(probs)
    with FakeDevices():
        assert drawn(probs.to("mps")) == expected
        draws = RandomSampler(Elsewhere().manual_seed(0))
        assert draws.token(torch.full((4,), 0.25, device=FIRST)) in range(4)


def test_tensors_of_two_devices_do_not_meet():
    """The account that these tests rest on."""
    with FakeDevices():
        one, other = torch.ones(2, device=FIRST), torch.ones(2, device=SECOND)
        with pytest.raises(RuntimeError, match="same device"):
            one + other
        with pytest.raises(TypeError, match="host"):
            one.numpy()
        assert str((one + other.to(FIRST)).device) == FIRST


def test_responses_of_a_spread_target_are_those_of_a_whole_one():
    """With sequences that end early, so that the others are left."""
    requests = [Request(str(index), "", [1 + index, 2]) for index in range(6)]

    def answered(model):
        how = {"vocab_size": 20, "eos_ids": frozenset([3, 4, 5]), "max_new_tokens": 12, "batch_size": 6}
        source = TargetInProcess(model, Sampling(), **how, keeps_states=True)
        return [response.response_ids for response in source.respond(requests, 0, lambda _: None)]

    expected = answered(model_of(0))
    assert len(set(map(len, expected))) > 1
    target = model_of(0)
    place(target, None)
    with FakeDevices():
        assert answered(target) == expected


class Moves(FakeDevices):
    """Also notes the shape of everything that moves."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        if func in (torch.Tensor.to, torch.Tensor.cpu) and device_of(result) != device_of(args[0]):
            self.shapes.append(args[0].shape)
        return result


@pytest.mark.parametrize(("is_with_draft", "num_crossings"), [(False, 0), (True, 1)])
def test_logits_cross_to_another_device_only_to_meet_those_of_the_draft(is_with_draft, num_crossings):
    exchanges = [Exchange("a", "", [2, 3], [4, 5, 6], "length"), Exchange("b", "", [7], [8, 9], "length")]
    known = {"draft_ids": torch.tensor([4, 5, 7, 8, 10]), "log_q": torch.full((5,), -2.0)}
    settings = {"sampling": Sampling(), "vocab_size": 20, "batch_size": 2, "chunk_mb": 1}

    def labelled(models):
        labeller = Labeller(**models, **settings)
        return labeller.label(exchanges, known, progress=lambda count: None).columns

    def models():
        return {"target": model_of(0), "draft": model_of(1) if is_with_draft else None}

    expected, there = labelled(models()), models()
    put(there["target"], FIRST)
    if is_with_draft:
        put(there["draft"], SECOND)
    with Moves() as moves:
        columns = labelled(there)
    for name, values in expected.items():  # an entropy is summed in another order on a device
        torch.testing.assert_close(columns[name], values, rtol=1e-6, atol=1e-6)
    assert sum(shape[-1:] == (20,) for shape in moves.shapes) == num_crossings


@pytest.mark.parametrize("device", ["cpu", FIRST])
@pytest.mark.parametrize(
    "devices", [("cpu", FIRST, SECOND), (FIRST, "cpu", "cpu"), (SECOND, SECOND, SECOND), (FIRST, FIRST, SECOND)]
)
def test_a_token_is_verified_wherever_its_distribution_is_and_however_narrow(devices, device):
    laws = [torch.rand(width).double() for width in (6, 4, 6)]
    laws, p = [law / law.sum() for law in laws], torch.rand(4, 6).double().softmax(-1)

    def verified(laws, p):
        tokens, draws = [1, 3, 5], [RandomSampler(seeded(seed)) for seed in range(20)]
        return revealed_probs(tokens, laws, p, draws[0]), [verify(tokens, laws, p, each) for each in draws]

    expected = verified(laws, p)
    assert {num_accepted for num_accepted, _ in expected[1]} >= {0, 1, 3}
    with FakeDevices():
        assert verified([law.to(each) for law, each in zip(laws, devices, strict=True)], p.to(device)) == expected


def drafter_of(kind, draft, policy):
    if kind == "tree":
        return TreeDrafter(draft, policy)
    if kind == "interleaved":
        return InterleavedDrafter(CachedModel(model_of(2)), CachedModel(draft, vocab_size=15), m=2, n=1)
    if kind == "hierarchy":
        micro = ModelDrafter(model_of(2), FixedLength(2))
        return PreVerifiedDrafter(micro, draft, policy, rounds=InnerRounds(window=2))
    return ModelDrafter(draft, policy)


@pytest.mark.parametrize(
    "policy", first_fast([FixedLength(3), Entropy(0.9), HeadPolicy(head_of("fed").double(), 0.8)], 1)
)
@pytest.mark.parametrize("kind", ["chain", "tree", "hierarchy", "interleaved", "batch"])
def test_a_draft_may_be_moved_between_two_generations(kind, policy):
    draft = model_of(1)
    decoder = loop(model_of(0), drafter_of(kind, draft, policy))

    expected = played(kind, decoder)
    with FakeDevices():
        for device in (FIRST, SECOND, "cpu"):
            put(draft, device)
            assert played(kind, decoder) == expected, device


def played(kind, decoder):
    """Rounds of a generation of 12 tokens, in a batch of two for that kind."""
    if kind == "batch":
        return timeless(decoder.generate_batch([PROMPT, [4]], 12, batch_size=2, generator=seeded())[0])
    return timeless(decoder.generate(PROMPT, 12, generator=seeded()))
