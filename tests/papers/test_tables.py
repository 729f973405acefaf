"""The papers' tables have the rows and columns that are printed, and their replayed cells are what replay says; of the
clocked tables dev chooses by counts and times, and test chooses nothing.
"""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import Config, DecodeConfig, ModelSource, PairConfig
from decode.drafters.factory import PairModels
from decode.experiment import Experiment
from decode.loop.counts import Counts
from decode.policies import Entropy, FixedLength, Heuristic, MaxProb, TokenProb
from evaluation.competitor import Competitor
from evaluation.sources.clock import Clocked
from evaluation.traces.replay import replay_settings
from heads import AcceptanceHead
from heads.model.head import Provenance
from lm import Sampling
from papers import svip
from papers.hierarchies.decoded import StoredLoop, decoded_of
from papers.svip import CHAIN, at_fastest_setting, by_category, competitor_of, row_cells, stop_competitors, stop_verdict
from tests.evaluation.commands import called, config_with, printed, refusal, spelt
from tests.toys.small_pair import trace
from tests.toys.times import flat_times

COST = flat_times(0.2, 1.0)
SMALL = {"num_dev": 3, "num_test": 3, "max_new_tokens": 24, "max_draft_length": 8}
SMALL |= {"t_draft_s": 0.01, "t_target_s": 0.05}
METHODS = {"Const.": FixedLength(5), "Heuristics": Heuristic(5), "SVIP": Entropy(0.3)}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Flags of a run with a recorded trace, four of SpecDec++'s heads and another one."""
    directory = tmp_path_factory.mktemp("run")
    exported = directory / "heads" / "exported"
    torch.manual_seed(0)
    for depth, weight in ((0, 1.0), (1, 1.0), (0, 6.0), (1, 6.0)):
        known = Provenance(reject_weight=weight, metrics={"raw_kl": 0.1 + depth, "train_raw_kl": 0.2 * weight})
        AcceptanceHead(96, depth, provenance=known).save_pretrained(exported / f"fed-d{depth}-w{weight:g}")
    AcceptanceHead(96, 0, "drawn", True).save_pretrained(exported / "drawn+s")
    small = spelt({f"decode.{name}": value for name, value in SMALL.items()})
    flags = ["--config", "configs/tiny.yaml", f"--decode.dir={directory}", f"--heads.dir={exported.parent}", *small]
    called("trace", *flags)
    return flags


@pytest.fixture(scope="module")
def played():
    made = trace(Sampling(temperature=0.6), copies=1)
    return replace(made, rows=tuple(replace(row, category=("even", "odd")[i % 2]) for i, row in enumerate(made.rows)))


def tables_of(capsys, paper, *flags):
    lines, document = printed(capsys, "tables", "--paper", paper, *flags)
    return lines, document["tables"]


@pytest.mark.slow
def test_specdec_tables_have_the_papers_rows_and_columns(flags, capsys):
    _, (first, times, ablation) = tables_of(capsys, "specdec++", *flags)
    assert [row["Dataset"] for row in first["rows"]] == ["SpecDec++", "SpecDec (baseline)"]
    settings = product(("stand-alone", "SpecDec", "SpecDec++"), ("stories", "average"))
    assert [(row["Setting"], row["Dataset"]) for row in times["rows"]] == list(settings)
    rows = ablation["rows"]
    assert list(rows[0]) == ["w_rej", "Depth D", "train/KL", "eval/KL", "stories"]
    assert [(row["w_rej"], row["Depth D"], row["train/KL"], row["eval/KL"]) for row in rows] == [
        (weight, depth, train_kl, f"{depth + 0.1:.3f}")
        for weight, train_kl in (("1", "0.200"), ("6", "1.200"))
        for depth in (0, 1)
    ]
    assert any(row["stories"].endswith(" *") for row in rows)
    best = max(float(row["stories"].split()[0]) for row in rows)
    assert first["rows"][0]["stories"].startswith(f"{best:.2f} ")
    assert "replayed" in first["title"]
    assert "clocked" in times["title"]


def test_svip_tables_have_a_column_per_category_and_per_length(flags, capsys):
    lines, (by_kind, by_length) = tables_of(capsys, "svip", *flags)
    for table in (by_kind, by_length):
        assert [row["Methods"] for row in table["rows"]] == ["Const.", "Heuristics", "SVIP"]
    assert list(by_length["rows"][0]) == ["Methods", "16"]
    assert by_kind["title"].startswith("SVIP Table 5")
    assert by_length["title"].startswith("SVIP Table 2")
    last = " ".join("\n".join(lines).rpartition("\n\n")[2].split())
    assert last.startswith("Figures of svip's tables are predicted from a trace and times")
    assert last.endswith("acceptance-heads evaluate compares every policy.")


def test_svips_cells_are_speed_ups_of_the_prompts_of_a_category(played):
    rows = svip.category_rows({name: by_category(played, policy, COST, "made") for name, policy in METHODS.items()})
    part = played.select(range(0, len(played.rows), 2))
    seconds = COST.time_s(replay_settings(part, FixedLength(5))).sum()
    assert rows[0]["even"] == f"{part.num_positions / seconds:.2f}"
    unsorted = replace(played, rows=tuple(replace(row, category="") for row in played.rows))
    assert list(by_category(unsorted, METHODS["SVIP"], COST, "made")) == ["made"]


def test_svips_threshold_is_the_papers_for_its_pairs_and_chosen_for_others(played):
    for name, threshold in {"pythia-6.9b": 0.4, "Meta-Llama-3-70B-Instruct": 0.3, "Qwen2.5-14B": 0.3}.items():
        assert svip.threshold_for(name, played, COST)[0] == threshold
    held_out = played.select(range(8))
    speeds = {h: COST.tokens_per_s(replay_settings(held_out, Entropy(h)))[0] for h in svip.CHOICES}
    chosen, _ = svip.threshold_for("another", played, COST)
    assert speeds[chosen] == pytest.approx(max(speeds.values()))


def test_hsddw_tables_have_the_papers_rows(flags, capsys):
    _, (first, ablation, *mathematics, utilisation) = tables_of(capsys, "hsddw", *flags, "--repeats", "1")
    assert [row[""] for row in first["rows"]] == ["AT", "HSDDW", "PEARL, two devices, predicted"]
    assert first["rows"][0]["stories"] == "1.00x"
    marks = [(row["Pre-verify"], row["Self-verify"], row["HSDDW"]) for row in ablation["rows"]]
    assert marks == [("", "", ""), ("x", "", ""), ("", "x", ""), ("x", "x", ""), ("", "", "x")]
    assert [row["Model"] for row in utilisation["rows"]] == ["target-draft", "target-micro", "Pre+Self-verify", "HSDDW"]
    hsddw = first["rows"][1]["stories"].split()[0]
    assert hsddw == ablation["rows"][-1]["stories"] == utilisation["rows"][-1]["Speedup"]
    assert mathematics == []


TREES = {"num_dev": 1, "num_test": 2, "max_new_tokens": 10, "max_draft_length": 6}
GRID = {"fixed_length": {"k": [2]}, "entropy": {"max_sqrt_entropy": [0.3]}}
PAIR = PairConfig(target=ModelSource(path="target"), draft=ModelSource(path="draft"))
EXPERIMENT = Experiment(Config(pair=PAIR, decode=DecodeConfig(max_draft_length=8)))
MODELS = PairModels(lambda: None)
"""No model is loaded to choose."""
STOP = Competitor("stop", "stop", TokenProb(0.1), ({"min_token_prob": 0.1}, {"min_token_prob": 0.2}))
ROUNDS = {1: (30, 28, 32), 2: (18, 20, 19), 4: (16, 15, 17), 0.1: (30,) * 3, 0.2: (14,) * 3}
DRAFTED = {1: 1, 2: 2, 4: 4, 0.1: 1, 0.2: 3}


def timed(rounds: int, length: int, stall: float = 1.0, seconds: float = 1.0, emitted: int = 48) -> Clocked:
    """At 1 + 2 f seconds for a draft of f forwards, and 10 + 3 k for a verification of k tokens."""
    drafted = rounds * length
    run = Clocked(
        counts=Counts(num_emitted=emitted, num_drafted=drafted, num_target=rounds, num_draft_forwards=drafted),
        lengths=(*[0] * length, rounds),
        whole_s=seconds,
        first_token_s=0.0,
        drafting_s=stall * rounds * (1 + 2 * length),
        verifying_s=stall * rounds * (10 + 3 * length),
    )
    return replace(run, later=run)


class Dev(StoredLoop):
    """Plays dev: length 2 emits most per second; its last generation may stall."""

    def __init__(self, stall: float = 1.0):
        self.stall = stall

    def play(self, competitors, split, *, repeats=1):
        values = [[next(iter(setting.values())) for setting in one.settings] for one in competitors]
        made = [
            [[timed(num, DRAFTED[value], self.stall if num == 19 else 1.0) for num in ROUNDS[value]] for value in of]
            for of in values
        ]
        return list(map(decoded_of, competitors, made)) if self.stall else []


def chosen(stops, lengths, loop):
    return {
        method: at_fastest_setting(competitor_of(EXPERIMENT, MODELS, CHAIN, stop), [loop]).settings
        for method, stop in svip.methods_of(CHAIN, stops, lengths)
    }


def test_dev_chooses_by_counts_and_fitted_times_whatever_stalled_on_the_clock():
    times = svip.fitted_times(Dev().play([svip.fixed((1, 2, 4))], "dev"))
    assert (times.t_draft_s, *times.target_s(np.arange(5))) == pytest.approx((2, 11, 14, 17, 20, 23), rel=1e-3)
    best = {"chain, as published": {"k": 4}, "chain, best fixed": {"k": 2}, "chain + stop": {"min_token_prob": 0.2}}
    for stall in (1.0, 8.0):
        assert chosen([STOP], [1, 2, 4], Dev(stall)) == {method: (setting,) for method, setting in best.items()}
    with pytest.raises(ValueError, match=r"decode\.num_dev"):
        chosen([], [1, 2, 4], Dev(0.0))
    assert list(chosen([], [4], Dev(0.0)).values()) == [({"k": 4},)] * 2, "nothing to choose"


def rows_at(stop_s: tuple[float, ...], best_s: tuple[float, ...] = (2.0, 2.0, 4.0, 4.0)):
    methods = {"chain, as published": (4.0, 4.0, 8.0, 8.0), "chain, best fixed": best_s, "chain + stop": stop_s}
    rows = {
        name: decoded_of(
            Competitor(name, name, FixedLength(0), ({},)), [[timed(5, 2, seconds=each, emitted=10) for each in seconds]]
        ).result()
        for name, seconds in (methods | {"alone": (8.0,) * 4}).items()
    }
    return rows, rows.pop("alone").throughput


def test_a_toy_clock_gives_its_speed_ups_and_gains():
    results, alone = rows_at((1.6, 1.6, 3.2, 3.2))
    rows = list(row_cells(results, alone, ["a", "a", "b", "b"]))
    assert [(row["Methods"], row["a"], row["b"], row["Avg."]) for row in rows] == [
        ("chain, as published", "2.00", "1.00", "1.33"),
        ("chain, best fixed", "4.00", "2.00", "2.67"),
        ("chain + stop", "5.00", "2.50", "3.33"),
    ]
    assert [row["over best fixed"].split(" ")[0] for row in rows] == ["-50.0%", "", "+25.0%"]
    assert rows[-1]["over published"].startswith("+150.0%")


FEW = "; 4 test prompts are too few for an interval (at least 10 are needed)"
FASTER = "chain + stop is faster than chain, best fixed by more than noise, +25.0 % (25.0, 25.0)"
VERDICTS = {
    "a gain on every prompt": (((1.6, 1.6, 3.2, 3.2),), FASTER),
    "an interval that holds 0": (
        ((1.0, 1.0, 4.5, 4.5),),
        "chain + stop and chain, best fixed differ by no more than noise, +9.1 %",
    ),
    "an unlucky choice": (
        ((4.0, 4.0, 8.0, 8.0), (5.0, 5.0, 10.0, 10.0)),
        "chain + stop and chain, as published do the same",
    ),
}


@pytest.mark.parametrize(("seconds", "verdict"), VERDICTS.values(), ids=VERDICTS)
def test_a_stop_has_to_beat_the_faster_fixed_length_by_more_than_noise_and_on_enough_prompts(seconds, verdict):
    few, _ = rows_at(*seconds)
    assert stop_verdict([few]).startswith("chain + stop over chain, ")
    assert FEW in stop_verdict([few])
    three_times = np.tile(np.arange(4), 3)
    runs = {}
    for method, one in few.items():
        many = replace(one.played.select([0], three_times), prompt_of_row=np.arange(12))
        runs[method] = replace(one, played=many)
    assert stop_verdict([runs]).startswith(verdict)


def flags_of(directory: Path, *more: str) -> list[str]:
    folders = [f"--decode.dir={directory}", f"--heads.dir={directory}", "--decode.grid", json.dumps(GRID)]
    small = spelt({f"decode.{name}": value for name, value in TREES.items()})
    return ["tables", "--config", "configs/tiny.yaml", *folders, *small, *more]


@pytest.mark.slow
def test_the_clock_of_test_prompts_makes_the_gains_and_no_choice(capsys, tmp_path):
    argv = flags_of(tmp_path, "--paper", "svip-trees", "--pair.draft.path", "checkpoints/tiny/glide", "--repeats", "2")
    (first,) = printed(capsys, *argv)[1]["tables"]
    path = tmp_path / "svip-table-3" / "glide" / "stories" / "clocked.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    tests = [line for line in lines if line["value"]["repeats"] == 2]
    dev = [line for line in lines if line not in tests]
    assert not {line["key"]["prompt"] for line in tests} & {line["key"]["prompt"] for line in dev}
    pace_s = {"target alone": 4.0, "chain": 2.0, "chain + entropy": 1.0, "CaPE": 1.0, "CaPE + entropy": 2.0}
    for line in tests:
        line["value"]["whole_s"] = pace_s[line["key"]["arm"].partition(":")[0]] * line["value"]["counts"]["num_emitted"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (second,) = printed(capsys, *argv)[1]["tables"]
    assert [row["setting"] for row in second["rows"]] == [row["setting"] for row in first["rows"]]
    names = (", as published", ", best fixed", " + entropy")
    assert [row["Methods"] for row in second["rows"]] == [draft + name for draft in ("chain", "CaPE") for name in names]
    assert [row["Avg."] for row in second["rows"]] == ["2.00", "2.00", "4.00", "4.00", "4.00", "2.00"]
    assert [row["over best fixed"] for row in second["rows"][2::3]] == ["+100.0%", "-50.0%"]
    assert second["note"].startswith("chain + entropy over chain k=")
    assert "2 test prompts are too few" in second["note"]
    assert len(path.read_text().splitlines()) == len(lines), "nothing was decoded again"


@pytest.mark.slow
def test_an_eagle_draft_has_a_row_in_hsddws_first_table(capsys, tmp_path):
    argv = flags_of(tmp_path, "--paper", "hsddw", "--eagle", "checkpoints/tiny/eagle", "--repeats", "1")
    first, *_ = printed(capsys, *argv)[1]["tables"]
    assert [row[""] for row in first["rows"]] == ["AT", "EAGLE-2", "HSDDW", "PEARL, two devices, predicted"]
    assert first["rows"][0]["stories"] == "1.00x"


REFUSED = {
    "no heads of the paper's": (("specdec++",), "none of 0 heads is fed-time"),
    "no micro": (("hsddw", "--pair.micro", "null"), "pair.micro is not set"),
    "no feature draft": (("hsddw", "--eagle", "checkpoints/tiny/draft"), "is no feature draft"),
    "no EAGLE": (("hsddw", "--eagle", "checkpoints/tiny/glide"), "give an EAGLE's directory"),
    "no repeats": (("svip-trees", "--repeats", "0"), "at least once"),
    "no dev prompts": (("svip-trees", "--decode.num_dev", "0"), "decode.num_dev"),
    "too short": (("svip-trees", "--decode.max_draft_length", "5"), "published length of 6"),
    "no such stop": (("svip-trees", "--stops", "[entropi]"), "there is no policy"),
    "an engine's rule": (("svip-trees", "--stops", "[llama_cpp]"), "--stops names llama_cpp, an engine's rule"),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_table_is_refused_in_one_line(flags, message, capsys, tmp_path):
    assert message in refusal(capsys, *flags_of(tmp_path, "--paper", *flags))


def test_a_stop_that_is_named_twice_has_one_row_with_its_name(tmp_path):
    config = config_with([*flags_of(tmp_path)[1:], "--paper", "svip-trees"], "tables")
    stops = stop_competitors(
        Experiment(config), ("entropy", "entropy", "max_prob:min_max_prob=0.5", "entropy", "token_prob")
    )
    kinds = {stop.name: type(stop.policy) for stop in stops}
    assert kinds == {"entropy": Entropy, "max_prob:min_max_prob=0.5": MaxProb, "token_prob": TokenProb}
