"""A race on the embedded trio: every arm in every cell; stored prompt by prompt, it continues where it stopped."""

import json
from dataclasses import replace

import pytest

from configs.flag_types import RaceRules
from decode.policies import HeadPolicy
from decode.policies.registry import POLICIES
from evaluation.bench.arms import CONSTANT, DEFAULT, HEURISTIC, UNASSISTED
from evaluation.bench.command import bench
from evaluation.bench.race import SAMPLINGS, Race
from evaluation.bench.results import OTHER_SAMPLING
from evaluation.competitor import competitors_of
from evaluation.contest import hold, replay_dataset
from evaluation.families import ALONE
from evaluation.gain import Splits
from evaluation.traces.recording import trace_folder
from heads import AcceptanceHead
from heads.model.head import Provenance
from lm import Sampling
from tests.evaluation.commands import config_with, spelt
from tests.toys.small_pair import trace
from tests.toys.times import flat_times

TIMES = flat_times(0.001, 0.005)
ASKED = {"policies": ("fixed_length:k=2", "fixed_length:k=3", "entropy:max_sqrt_entropy=0.5"), "constants": (2,)}
ASKED |= {"samplings": ("nucleus",), "num_prompts": 2, "num_tokens": 4}


@pytest.fixture
def config(tmp_path):
    small = {"num_dev": 2, "num_test": 2, "max_new_tokens": 8, "max_draft_length": 4}
    flags = {"dir": tmp_path / "decode", "t_draft_s": 0.001, "t_target_s": 0.005} | small
    spelt_out = spelt({f"decode.{name}": value for name, value in flags.items()})
    return config_with(["--config=configs/tiny.yaml", f"--heads.dir={tmp_path / 'heads'}", *spelt_out], "bench")


def test_every_arm_runs_in_every_cell_and_a_killed_race_continues(config, tmp_path, monkeypatch, capsys):
    document = bench(config, **ASKED, json=True)
    assert json.loads(capsys.readouterr().out) == document
    assert [(cell["dataset"], cell["sampling"]) for cell in document["cells"]] == [("stories", "nucleus")]
    (cell,) = document["cells"]
    families = [arm["family"] for arm in cell["arms"]]
    assert families == [ALONE, "fixed_length", "fixed_length", "entropy", UNASSISTED, DEFAULT, HEURISTIC, CONSTANT]
    assert cell["times"] == {"t_draft_s": 0.001, "t_target_s": 0.005, "origin": "given"}
    for arm in cell["arms"]:
        assert 0 < arm["first_token_p50_s"] < arm["request_p50_s"] <= arm["request_p95_s"]

    path = tmp_path / "decode" / "bench.jsonl"
    *rows, _ = path.read_bytes().splitlines(keepends=True)
    half = len(families)  # the first of two prompts
    path.write_bytes(b"".join(rows[:half]))
    bench(config, **ASKED)
    resumed = path.read_bytes().splitlines(keepends=True)
    assert resumed[:half] == rows[:half], "what was decoded before the race was killed is kept"
    assert len(resumed) == len(rows) + 1
    path.write_bytes(b"".join(rows) + resumed[-1])

    monkeypatch.setattr(Race, "_arms", lambda *_: pytest.fail("a finished cell was measured again"))
    assert bench(config, **ASKED)["cells"] == document["cells"]
    last = " ".join(capsys.readouterr().out.rpartition("\n\n")[2].split())
    assert last.startswith("stories, T=0.7, top-p 0.9 at ratio 5.00: fastest of the named policies on these")
    assert last.endswith(".")
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        bench(config, **ASKED | {"num_tokens": 5})


def race_of(config, *families):
    return Race(config, RaceRules(transformers=False), num_prompts=2, num_tokens=4, families=families)


def test_each_family_runs_at_what_dev_chose_under_the_sampling_of_the_cell(config, tmp_path):
    known = {"temperature": 1.0, "top_k": None, "top_p": None}
    head = AcceptanceHead(96, 0, "drawn", provenance=Provenance(sampling=known))
    head.save_pretrained(tmp_path / "heads" / "exported" / "linear")
    race = race_of(config, "auto_token_prob", "head_drawn", "auto")
    for name, foreign in (("greedy", True), ("sampled", False)):
        best_arms = race.best_arms("stories", name)
        assert list(best_arms) == ["fixed_length", "auto_token_prob", "head_drawn", "auto"]
        arms = race._arms("stories", name)
        assert list(arms) == [ALONE, *best_arms]
        of_other_sampling = [arms[family][1].version == OTHER_SAMPLING for family in best_arms]
        assert of_other_sampling == [False, False, foreign, foreign]
        assert best_arms["fixed_length"].policy.k == int(TIMES.tokens_per_s(best_arms["fixed_length"].arm.dev).argmax())
    with pytest.raises(ValueError, match="no family 'oracle'"):
        race_of(config, "oracle").best_arms("stories", "own")


def test_on_a_transfer_set_the_rule_has_the_head_of_the_first_dataset(config):
    """Also where another timing's head is the best of the transfer set's own dev prompts."""
    splits = Splits(*(trace(Sampling(temperature=0.6), seed=seed) for seed in (1, 2)))
    heads = {timing: AcceptanceHead(16, 0, timing, scalars=True).eval() for timing in ("drawn", "prefix")}
    competitors = competitors_of({"head": {"max_rejection_prob": [0.5]}}, heads, max_draft_length=5)
    replays = replay_dataset(splits, competitors, perfect_head=False, name="")
    stop_of = {head.timing: HeadPolicy(head).stop_kind for head in heads.values()}
    results = {}
    for dataset, slow, timing in (("stories", "prefix", "drawn"), ("travel", "drawn", "prefix")):
        times = replace(TIMES, t_stop_s={stop_of[slow]: 1.0})
        results[dataset] = hold(replays, times).results
        assert results[dataset]["auto"].competitor.head == timing
    race = race_of(config, "auto", "token_prob")
    race._on_dev = lambda _, dataset: results[dataset]
    best_arms = race.best_arms("travel", "own")
    assert best_arms["auto"] is results["stories"]["auto"]
    assert best_arms["token_prob"] is results["travel"]["token_prob"]


def test_a_race_records_dev_alone_under_its_sampling_and_an_evaluation_the_rest(config):
    race = race_of(config)
    for name in ("greedy", "own"):
        race.best_arms("stories", name)
        experiment = race.under(name)
        folder = trace_folder(experiment)
        dev = folder.load_split("stories", "dev")
        assert dev.sampling == (race.experiment.sampling if name == "own" else SAMPLINGS[name])
        assert {key.split for key in folder.shards if key.is_done(folder.directory)} == {"dev"}
        with pytest.raises(FileNotFoundError, match="test"):
            folder.load("stories")
        folder.complete()
        both = folder.load("stories")
        assert both.dev.rows == dev.rows, "recorded rows are kept"
        assert len(both.test.rows) == experiment.decode.num_test


def test_custom_policies_compete_and_have_their_own_cells(config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    imports = "from dataclasses import dataclass\nfrom decode.policies import TokenProb\n"
    (tmp_path / "racing.py").write_text(f"{imports}@dataclass(frozen=True)\nclass Unsure(TokenProb):\n    pass\n")
    monkeypatch.setitem(POLICIES, "racing:Unsure", POLICIES["entropy"])  # so that its end removes what the race enters
    del POLICIES["racing:Unsure"]
    for named, of_decode in ((("fixed_length:k=2", "racing:Unsure"), ()), ((), ("token_prob", "racing:Unsure"))):
        decode = replace(config.decode, policies=of_decode, perfect_head=False)
        asked = ASKED | {"samplings": ("own",), "policies": named}
        (cell,) = bench(replace(config, decode=decode), **asked)["cells"]
        families = {arm["family"] for arm in cell["arms"]}
        assert {"fixed_length", "racing:Unsure", *of_decode} <= families


def test_a_race_without_a_fixed_length_or_on_an_unknown_dataset_is_refused_before_anything_runs(config, monkeypatch):
    with pytest.raises(ValueError, match=r"--race\.datasets names 'moon'; decode\.datasets are stories"):
        bench(config, **ASKED, race=RaceRules(datasets=("moon",)))
    monkeypatch.setattr(Race, "cells", lambda *_: pytest.fail("a cell was measured"))
    with pytest.raises(ValueError, match="--policies names entropy, and gains are measured from a fixed length; name"):
        bench(config, **ASKED | {"policies": ("entropy",)})
