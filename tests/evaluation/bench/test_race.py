"""A race on the embedded trio: every arm in every cell, finished cells are kept, slow models write the same tokens,
gains are paired.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from configs.command import config_of, parser_for
from decode.policies.registry import POLICIES
from evaluation.bench.batch_sizes import size_verdict
from evaluation.bench.choices import Choices
from evaluation.bench.command import bench
from evaluation.bench.plots import race_plot
from evaluation.bench.race import SAMPLINGS, Race
from evaluation.bench.schedules import CONSTANT, DEFAULT, HEURISTIC, UNASSISTED
from evaluation.bench.standings import standings_of, summary_sheet, verdict_of
from evaluation.families import ALONE
from evaluation.gain import Spent, gain_over
from evaluation.times import Times
from evaluation.traces.disk import places_in
from evaluation.traces.recording import trace_folder
from heads import AcceptanceHead
from heads.model.provenance import Provenance
from lm import Sampling

ROOT = Path(__file__, "../../../..").resolve()
COST = Times.constant(0.001, 0.005)
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


def test_every_arm_runs_in_every_cell_and_finished_cells_are_kept(config, monkeypatch, capsys):
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


def test_the_fastest_policy_of_every_size_is_named_in_a_sentence():
    sizes = [
        {"batch_size": size, "policy": policy, "tokens_per_s": speed, "against_fixed": speed / 100}
        for size, policy, speed in ((1, "entropy", 110.0), (1, "fixed_length:k=2", 100.0), (4, "entropy", 90.0))
    ]
    assert "entropy in batches of 1 (+10.0%), entropy in batches of 4 (-10.0%)." in size_verdict(sizes)


def test_each_family_runs_at_what_dev_chose_under_the_sampling_of_the_cell(config, tmp_path):
    known = {"temperature": 1.0, "top_k": None, "top_p": None}
    AcceptanceHead(96, 0, "drawn", provenance=Provenance(sampling=known)).save_pretrained(
        tmp_path / "heads" / "exported" / "linear"
    )
    for name, is_foreign in (("greedy", True), ("sampled", False)):
        choices = Choices(config, name, SAMPLINGS[name])
        chosen = choices.at(COST, ("head_drawn", "auto_drawn"))
        assert list(chosen) == ["fixed_length", "head_drawn", "auto_drawn"]
        assert choices.replays(choices.home).traces.dev.sampling == SAMPLINGS[name]
        assert [one.is_foreign(SAMPLINGS[name]) for one in chosen.values()] == [False, is_foreign, is_foreign]
        fixed = next(arm for arm in choices.replays(choices.home).arms if arm.grid.family == "fixed_length")
        assert chosen["fixed_length"].policy.k == int(COST.tokens_per_s(fixed.dev).argmax())
    with pytest.raises(ValueError, match="no family 'oracle'"):
        choices.at(COST, ("oracle",))


def test_a_race_records_dev_alone_and_an_evaluation_the_rest(config):
    for name in ("greedy", "own"):
        choices = Choices(config, name, (SAMPLINGS | {"own": Sampling(**vars(config.pair.sampling))})[name])
        dev = choices.replays(choices.home).traces.dev
        folder = trace_folder(choices.experiment)
        assert places_in(folder.directory, choices.home, "dev")
        assert not places_in(folder.directory, choices.home, "test")
        with pytest.raises(FileNotFoundError, match="test"):
            folder.load(choices.home)
        folder.complete()
        both = folder.load(choices.home)
        assert both.dev.rows == dev.rows, "what was there is kept"
        assert len(both.test.rows) == choices.experiment.decode.num_test


def test_policies_of_ones_own_compete_and_a_cell_without_them_is_not_theirs(config, tmp_path, monkeypatch):
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


def made_up(**seconds):
    unchosen = {"is_foreign": False, "on_dev": None}
    arms = [
        {"family": name, "setting": name, "tokens": [10] * len(values), "seconds": values} | unchosen
        for name, values in seconds.items()
    ]
    return {
        "dataset": "stories",
        "sampling": "greedy",
        "num_tokens": 10,
        "cycles": 1,
        "times": {"t_draft_s": 0.01, "t_target_s": [0.05], "origin": "given"},
        "default_schedule": "",
        "arms": arms,
    }


CELL = made_up(
    target_alone=[4.0, 6.0],
    fixed_length=[2.0, 3.0],
    entropy=[1.0, 3.0],
    max_prob=[2.5, 3.5],
    **{DEFAULT: [2.2, 3.1], HEURISTIC: [2.0, 4.0], CONSTANT: [5.0, 5.0]},
)


def test_a_gain_is_that_of_totals_and_its_interval_is_paired():
    entropy = standings_of(CELL)[2]
    tokens = np.array([10, 10])
    assert entropy.over["fixed_length"] == gain_over(
        Spent(tokens, np.array([2.0, 3.0])), Spent(tokens, np.array([1.0, 3.0]))
    )
    assert entropy.over["fixed_length"].value == pytest.approx(0.25)
    assert entropy.median_over["fixed_length"] == pytest.approx(0.5)
    assert entropy.over["target_alone"].value == pytest.approx(1.5)


def test_a_lost_cell_says_so():
    verdict = verdict_of(CELL, standings_of(CELL))
    assert "Lost: largest probability behind transformers: default" in verdict
    assert "entropy (SVIP) behind" not in verdict
    won = made_up(target_alone=[4.0], fixed_length=[2.0], **{DEFAULT: [2.2]})
    assert verdict_of(won, standings_of(won)).endswith("None of ours is behind.")


def test_dev_chooses_which_arm_of_ours_is_reported_and_test_does_not():
    on_dev = {"fixed_length": 5.0, "entropy": 6.0, "max_prob": 7.0}
    chosen = CELL | {"arms": [arm | {"on_dev": on_dev.get(arm["family"])} for arm in CELL["arms"]]}
    assert "dev chose largest probability: -" in verdict_of(chosen, standings_of(chosen)), "entropy is faster on test"
    named = verdict_of(CELL, standings_of(CELL))
    assert "fastest of the named policies on these very prompts: entropy (SVIP): +" in named


def test_the_best_constant_schedule_is_what_gains_are_measured_from():
    faster = CELL["arms"][-1] | {"setting": "k=9", "seconds": [2.0, 2.0]}
    assert standings_of(CELL | {"arms": [*CELL["arms"], faster]})[1].over[CONSTANT].value == pytest.approx(-0.2)


def test_the_best_training_free_policy_is_what_heads_have_to_lead():
    arms = [
        CELL["arms"][0] | {"family": family, "seconds": [1.0, 1.0]} for family in ("head", "head_drawn", "auto_drawn")
    ]
    cell = CELL | {"arms": [*CELL["arms"], *arms]}
    assert standings_of(cell)[-2].over["training-free"].value == pytest.approx(1.0), (
        "over entropy, and not over a head that was named"
    )
    sheet = summary_sheet([(cell, standings_of(cell))])
    assert sheet.column("policy") == ["best head, drawn-time", "auto, drawn-time head"]
    assert sheet.column("over best training-free") == ["+100.0 (+0, +200)"] * 2
    no_schedules = cell | {"arms": [arm for arm in cell["arms"] if not arm["family"].startswith("transformers")]}
    headings = summary_sheet([(no_schedules, standings_of(no_schedules))]).columns
    assert headings[-2:] == ["over best fixed length", "over best training-free"], "no column for what did not run"
    assert "% over the best fixed length; without --race.assistant" in verdict_of(
        no_schedules, standings_of(no_schedules)
    )


def test_without_a_fixed_length_there_is_nothing_to_gain_from():
    with pytest.raises(ValueError, match="name at least one"):
        standings_of(made_up(target_alone=[1.0], entropy=[1.0]))


def test_the_plot_has_a_line_per_family_and_a_panel_per_sampling():
    cells = [(cell, standings_of(cell)) for cell in (CELL, CELL | {"sampling": "nucleus"})]
    text = race_plot(cells).svg
    assert text.count("entropy (SVIP)") == 1
    assert "greedy" in text
    assert "top-p 0.9" in text
    assert "target alone" not in text, "so far behind that the others could not be told apart"
