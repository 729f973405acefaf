"""What a server and a request may ask for, and what each is told where they cannot have it."""

import random
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from decode.policies import AfterDraw, CumulativeTokenProb, Entropy, FixedLength, HeadPolicy
from decode.policies.batch import BatchAuto
from decode.policies.registry import POLICIES, RULES
from heads import AcceptanceHead, Provenance
from lm import Sampling
from serve.lanes import Lanes, RequestRow
from serve.settings import Policies, Settings

DRAFT = {"name": "draft", "weights": "1", "hidden_size": 8}
TARGET = {"name": "target", "weights": "2", "hidden_size": 16}


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A head for these models at temperature 1."""
    provenance = Provenance(draft=DRAFT, target=TARGET, sampling=Sampling().as_dict())
    AcceptanceHead(8, 1, "drawn", provenance=provenance).save_pretrained(tmp_path / "head")
    return str(tmp_path / "head")


def made(value: dict, warned: list[str] | None = None, *, draft: dict = DRAFT, target: dict = TARGET) -> Policies:
    how = {"draft": lambda: draft, "target": lambda: target, "warn": ([] if warned is None else warned).append}
    return Policies(Settings.parsed(value), hidden_size=8, **how)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("head:x", "use an object with at least a policy"),
        ({}, "use an object with at least a policy"),
        ({"policy": 3}, "policy is 3; use a string"),
        ({"policy": "entropy", "polcy": "x"}, "has no key 'polcy'; use policy, heads, allow_foreign_heads"),
        ({"policy": "entropy", "heads": ["x"]}, "use an object of names"),
        ({"policy": "entropy", "allow_foreign_heads": "no"}, "use true or false"),
        ({"policy": "entropi"}, "there is no policy 'entropi'"),
        ({"policy": "entropy:max_entropy=1"}, "has no parameter 'max_entropy'"),
        ({"policy": "ada_edl:scale=-3"}, "scale is -3; it must be a number, at least 0"),
        ({"policy": "head"}, "needs an exported head"),
        ({"policy": "dspark"}, "needs the confidence head"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(value: object, message: str):
    with pytest.raises(ValueError, match=message) as raised:
        made(value)
    assert "\n" not in str(raised.value)


def test_auto_is_the_rule_of_the_batch(tmp_path: Path):
    tuned = Provenance(recommended={"t_draft_s": 1.0, "t_target_s": 5.0, "next_mean": 0.7})
    AcceptanceHead(8, 1, "drawn", provenance=tuned).save_pretrained(tmp_path)
    policies = made({"policy": f"head:{tmp_path},max_rejection_prob=auto", "heads": {"small": str(tmp_path)}})
    for policy in (policies.default, policies.of_request("head:small,max_rejection_prob=auto", Sampling())):
        assert isinstance(policy, BatchAuto)
        assert (policy.next_mean, policy.is_learning) == (0.7, True)


def test_a_head_of_another_model_is_refused_unless_it_is_allowed_and_one_of_another_width_always(path: str, tmp_path):
    for role, model in (("draft", DRAFT), ("target", TARGET)):
        other = {role: model | {"weights": "3"}}
        with pytest.raises(ValueError, match=rf"was trained with {role} .*, but the {role} is .*allow_foreign_heads"):
            made({"policy": f"head:{path}"}, **other)
        made({"policy": f"head:{path}", "allow_foreign_heads": True}, **other)
    AcceptanceHead(4, 0, "fed").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="width 4, but this draft's have width 8"):
        made({"policy": f"head:{tmp_path}", "allow_foreign_heads": True})
    with pytest.raises(FileNotFoundError, match="missing"):
        made({"policy": f"head:{tmp_path / 'missing'}"})


def test_a_request_gets_what_it_asks_for_and_the_same_object_every_time(path: str):
    policies = made({"policy": "cumulative_token_prob:min_token_prob=0.3", "heads": {"small": path}})
    assert policies.of_request(None, Sampling()) == CumulativeTokenProb(0.3)
    assert policies.of_request("entropy:max_sqrt_entropy=0.4", Sampling()) == Entropy(0.4)
    named = policies.of_request("head:small,max_rejection_prob=0.25", Sampling())
    assert isinstance(named, HeadPolicy)
    assert named.max_rejection_prob == 0.25
    assert named is policies.of_request("head:small,max_rejection_prob=0.25", Sampling())


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("nonsense", "no such policy"),
        (7, "no such policy"),
        ({"policy": "entropy"}, "must be parameter=value"),
        ("fixed_length:k=-1", "k is -1"),
        ("ada_edl:scale=-3", "scale is -3"),
        ("self_verify:initial=abc", "initial is 'abc'"),
        ("module_of_a_request:Policy", "no such policy"),  # imports no module
        ("head:PATH", "the server has no head"),  # reads no file that the server has not named
    ],
)
def test_what_a_request_cannot_have_is_warned_of_once_and_the_servers_policy_serves(
    asked, reason, path, tmp_path, monkeypatch
):
    (tmp_path / "module_of_a_request.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    warned: list[str] = []
    policies = made({"policy": "fixed_length:k=4"}, warned)
    for _ in range(3):
        spec = asked.replace("PATH", path) if isinstance(asked, str) else asked
        assert policies.of_request(spec, Sampling()) == FixedLength(4)
    assert len(warned) == 1
    assert "gets the server's policy fixed_length:k=4" in warned[0]
    assert reason in warned[0]
    assert not policies.heads


def test_a_sampling_that_the_head_was_not_trained_for_is_served_and_warned_of_once(path: str):
    warned: list[str] = []
    policies = made({"policy": f"head:{path}"}, warned)
    for _ in range(3):
        for sampling in (Sampling(), Sampling(temperature=0.0), Sampling(0.7, top_p=0.9)):
            assert policies.of_request(None, sampling) is policies.default
    assert len(warned) == 2
    assert "'temperature': 0.0" in warned[0]


def request_strings(num: int, path: str) -> Iterator[str]:
    """Policies as requests may write them: pieces of right and wrong ones, in random orders."""
    rng = random.Random(0)
    known = {name: [field.name for field in fields(entry.kind)] for name, entry in (POLICIES | RULES).items()}
    names = ["auto", path, "os:system", "decode.policies:Entropy", "", " ", "é", "head:small", "auto:small", *known]
    odd_keys = ["load_head", "self", "name", "k", "head", ""]
    values = ["5", "2", "true", "false", "auto", "0.4", "0.9", "-1", "1e999", "nan", "small", "[1]", "9" * 400, "", "="]
    for _ in range(num):
        name = rng.choice(names)
        keys = known.get(name, odd_keys) if rng.random() < 0.8 else odd_keys
        parts = [f"{rng.choice(keys)}={rng.choice(values)}" for _ in range(rng.randrange(3)) if keys]
        parts = [rng.choice(values) if rng.random() < 0.1 else part for part in parts]
        yield name + rng.choice([":", ":", "::"]) + ",".join(parts)


def test_no_request_stops_the_engine(path: str):
    """1,000 policies in one batch: each request is served by the policy that it names, or by the server's."""
    warnings: list[str] = []
    policies = made({"policy": "fixed_length:k=2", "heads": {"small": path}}, warnings)
    requests = list(request_strings(1000, path))
    served = [policies.of_request(request, Sampling()) for request in requests]
    assert len(set(map(repr, served))) > 20, "most of them are refused"
    lanes, drafts, extremes = Lanes(), [[] for _ in requests], (0.0, 1.0, 1e-30)
    for value in extremes:
        signals = AfterDraw(**dict.fromkeys(AfterDraw._fields, value))
        pairs = enumerate(zip(served, drafts, strict=True))
        rows = [RequestRow(str(i), policy, ids, len(ids) // 2, 4, frozenset()) for i, (policy, ids) in pairs]
        lanes.begin(rows, set(map(str, range(len(rows)))))
        for position in range(4):
            if lanes.is_going:
                lanes.step([7] * len(rows), [signals._replace(position=position)] * len(rows))
        drafts = lanes.drafts
    assert len(drafts) == 1000


def test_a_request_fills_neither_memory_nor_log(path: str):
    warnings: list[str] = []
    policies = made({"policy": "entropy", "heads": {"small": path}}, warnings)
    for number in range(300):
        for temperature in (0.5, 0.7):
            policies.of_request(f"no_such_policy:k={number}", Sampling(temperature))
    assert len(warnings) == 101
    assert warnings[-1].endswith("100 different warnings about requests; further ones are not logged")
    assert len(set(warnings)) == 101
