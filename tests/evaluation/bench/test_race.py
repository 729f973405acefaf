"""A race on the embedded trio: every arm in every cell, and finished cells are stored."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from configs.command import config_of, parser_for
from decode.policies.registry import POLICIES
from evaluation.bench.arms import CONSTANT, DEFAULT, HEURISTIC, UNASSISTED
from evaluation.bench.choices import Choices, of_other_sampling
from evaluation.bench.command import bench
from evaluation.bench.race import SAMPLINGS, Race
from evaluation.families import ALONE
from evaluation.flag_types import RaceRules
from evaluation.times import Times
from evaluation.traces.disk import shard_keys
from evaluation.traces.recording import trace_folder
from heads import AcceptanceHead
from heads.model.provenance import Provenance
from lm import Sampling

ROOT = Path(__file__, "../../../..").resolve()
TIMES = Times.constant(0.001, 0.005)
ASKED = {
    "samplings": ("nucleus",),
    "policies": ("fixed_length:k=2", "fixed_length:k=3", "entropy:max_sqrt_entropy=0.5"),
    "constants": (2,),
    "num_prompts": 2,
    "num_tokens": 4,
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = {
        "decode.dir": tmp_path / "decode",
        "heads.dir": tmp_path / "heads",
        "decode.t_draft_s": 0.001,
        "decode.t_target_s": 0.005,
    }
    flags |= {"decode.num_dev": 2, "decode.num_test": 2, "decode.max_new_tokens": 8, "decode.max_draft_length": 4}
    parser = parser_for(bench)
    spelt = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return config_of(parser, parser.parse_args(["--config", "configs/tiny.yaml", *spelt]))


def test_every_arm_runs_in_every_cell_and_finished_cells_are_stored(config, monkeypatch, capsys):
    document = bench(config, **ASKED, json=True)
    assert json.loads(capsys.readouterr().out) == document
    assert [(cell["dataset"], cell["sampling"]) for cell in document["cells"]] == [("stories", "nucleus")]
    (cell,) = document["cells"]
    families = [arm["family"] for arm in cell["arms"]]
    assert families == [ALONE, "fixed_length", "fixed_length", "entropy", UNASSISTED, DEFAULT, HEURISTIC, CONSTANT]
    assert cell["times"] == {"t_draft_s": 0.001, "t_target_s": [0.005], "origin": "given"}
    assert (Path(config.decode.dir) / "plots" / "bench.svg").read_text().startswith("<svg")

    monkeypatch.setattr(Race, "_arms", lambda *_: pytest.fail("a finished cell was measured again"))
    assert bench(config, **ASKED)["cells"] == document["cells"]
    last = " ".join(capsys.readouterr().out.rpartition("\n\n")[2].split())
    assert last.startswith("stories, T=0.7, top-p 0.9 at ratio 5.00: fastest of the named policies on these")
    assert last.endswith(".")
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        bench(config, **ASKED | {"num_tokens": 5})


def test_each_family_runs_at_what_dev_chose_under_the_sampling_of_the_cell(config, tmp_path):
    known = {"temperature": 1.0, "top_k": None, "top_p": None}
    AcceptanceHead(96, 0, "drawn", provenance=Provenance(sampling=known)).save_pretrained(
        tmp_path / "heads" / "exported" / "linear"
    )
    for name, foreign in (("greedy", True), ("sampled", False)):
        choices = Choices(config, name, SAMPLINGS[name])
        chosen = choices.at(TIMES, ("head_drawn", "auto_drawn"))
        assert list(chosen) == ["fixed_length", "head_drawn", "auto_drawn"]
        assert choices.replays(choices.first_dataset).traces.dev.sampling == SAMPLINGS[name]
        assert [of_other_sampling(one.policy, SAMPLINGS[name]) for one in chosen.values()] == [False, foreign, foreign]
        fixed = next(
            arm for arm in choices.replays(choices.first_dataset).arms if arm.competitor.family == "fixed_length"
        )
        assert chosen["fixed_length"].policy.k == int(TIMES.tokens_per_s(fixed.dev).argmax())
    with pytest.raises(ValueError, match="no family 'oracle'"):
        choices.at(TIMES, ("oracle",))


def test_a_race_records_dev_alone_and_an_evaluation_the_rest(config):
    for name in ("greedy", "own"):
        choices = Choices(config, name, (SAMPLINGS | {"own": Sampling(**vars(config.pair.sampling))})[name])
        dev = choices.replays(choices.first_dataset).traces.dev
        folder = trace_folder(choices.experiment)
        assert shard_keys(folder.directory, choices.first_dataset, "dev")
        assert not shard_keys(folder.directory, choices.first_dataset, "test")
        with pytest.raises(FileNotFoundError, match="test"):
            folder.load(choices.first_dataset)
        folder.complete()
        both = folder.load(choices.first_dataset)
        assert both.dev.rows == dev.rows, "recorded rows are kept"
        assert len(both.test.rows) == choices.experiment.decode.num_test


def test_custom_policies_compete_and_have_their_own_cells(config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    signals = "    signals = frozenset({'token_prob'})\n"
    after = "    def after(self, state, drawn):\n        return state, drawn.token_prob"
    (tmp_path / "racing_policies.py").write_text(
        "from dataclasses import dataclass\nfrom decode.policies import Policy\n"
        f"@dataclass(frozen=True)\nclass Unsure(Policy):\n{signals}{after} < 0.3\n"
        f"@dataclass(frozen=True)\nclass Doubting(Policy):\n{signals}{after} < 0.6\n"
    )
    names = ("racing_policies:Unsure", "racing_policies:Doubting")
    for name in names:
        monkeypatch.setitem(POLICIES, name, POLICIES["entropy"])  # so that its end removes what the race enters
        del POLICIES[name]
    asked = ASKED | {"samplings": ("own",), "policies": ("fixed_length:k=2", *names)}
    (cell,) = bench(config, **asked)["cells"]
    assert [arm["family"] for arm in cell["arms"]][:4] == [ALONE, "fixed_length", *names]

    def families(*policies: str) -> set[str]:
        of_policies = replace(config, decode=replace(config.decode, policies=policies, perfect_head=False))
        (cell,) = bench(of_policies, **asked | {"policies": ()})["cells"]
        return {arm["family"] for arm in cell["arms"]}

    assert names[0] not in families("token_prob")
    assert {names[0], "token_prob"} <= families("token_prob", names[0])


def test_a_race_without_a_fixed_length_is_refused_before_anything_runs(config, monkeypatch):
    monkeypatch.setattr(Race, "cells", lambda *_: pytest.fail("a cell was measured"))
    with pytest.raises(ValueError, match="--policies names entropy, and gains are measured from a fixed length; name"):
        bench(config, **ASKED | {"policies": ("entropy",)})


def test_a_race_on_an_unknown_dataset_is_refused(config):
    with pytest.raises(ValueError, match=r"--race\.datasets names 'moon'; decode\.datasets are stories"):
        bench(config, **ASKED, race=RaceRules(datasets=("moon",)))
