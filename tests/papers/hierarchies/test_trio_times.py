"""sigma, eta, the times of three models (HSDDW; law 4.9), when a third level pays; `hierarchy` and `theory`."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decode import Counts
from decode.policies import Entropy, FixedLength
from evaluation.competitor import Competitor
from evaluation.sources.clock import Clocked
from evaluation.times import Times
from heads import AcceptanceHead
from heads.model.head import Provenance
from lm import Sampling
from papers.hierarchies import configurations
from papers.hierarchies.command import play
from papers.hierarchies.decoded import MICRO_ALONE, Decoded, StoredLoop, decoded_of
from papers.hierarchies.tables import paying, third_level_frame, third_level_verdict
from papers.hierarchies.times import at_ratios, break_even, fit_times, redundancy
from tests.evaluation.commands import called, printed, refusal
from tests.toys.times import times_by_length

FREE = Competitor("sd", "sd", FixedLength(0), ({"k": 3},))
STOPPED = Competitor("HSDDW", "HSDDW", Entropy(), ({"window": 10},), micro_policy=Entropy())
FIXED = Competitor("pre-verified", "pre-verified", FixedLength(0), ({"n": 1}, {"n": 4}))
TRIO = (5, 2, 1), (0, 3, 2), (7, 7, 1), (1, 0, 5)


def counts(micro: int, draft: int, target: int, **more: int) -> Counts:
    return Counts(num_micro_forwards=micro, num_draft_forwards=draft, num_target=target, **more)


def stored(micro: int, draft: int, target: int, *, stop_s: float = 0.0, stall: float = 1.0, **more: int) -> Clocked:
    """Rounds at 1, 4 and 20 ms a forward; the first reads the prompt and takes an hour, which no fit may see."""
    drafting_s = stall * (0.001 * micro + 0.004 * draft + stop_s * (micro + draft))
    later = Clocked(
        counts=counts(micro, draft, target),
        lengths=(target,),
        whole_s=drafting_s,
        first_token_s=0.0,
        drafting_s=drafting_s,
        verifying_s=stall * 0.02 * target,
    )
    total = counts(micro, draft, target, **more)
    return replace(later, counts=total, whole_s=3600.0, drafting_s=3600.0, first_token_s=3600.0, later=later)


def three(times: Times) -> tuple[float, ...]:
    return times.t_micro_s, times.t_draft_s, times.alone_s


def test_sigma_and_eta_of_the_papers_published_pair_fit_one_set_of_counts():
    """44.36 % and 14.46 %: 10.6 tokens handed over per round, 5.9 accepted, 6.9 emitted."""
    round_of = Counts(num_emitted=6916, num_drafted=10633, num_accepted=5916, num_target=1000)
    assert (redundancy(round_of), round_of.verification_rate) == pytest.approx((0.4436, 0.1446), abs=1e-4)
    assert redundancy(Counts(num_emitted=3, num_target=3)) == 0.0
    one = stored(0, 6, 2, num_drafted=6)
    total = decoded_of(replace(FREE, family=MICRO_ALONE), [[one, one]]).played.total()
    counted = total.num_micro_forwards, total.num_draft_forwards, total.num_micro, total.num_drafted
    assert counted == (12, 0, 12, 12), "forwards of the micro alone count as micro's"


def test_the_fit_recovers_the_three_times_and_a_stalled_generation_changes_none():
    times, r2 = fit_times([decoded_of(FREE, [[stored(*of) for of in TRIO]])])
    assert (*three(times), r2) == pytest.approx((0.001, 0.004, 0.02, 1.0))
    of = [stored(*each) for each in (*TRIO, (2, 9, 3), (8, 1, 4))]
    times, r2 = fit_times([decoded_of(FREE, [[*of, *of, stored(2, 9, 3, stall=60.0)]])])
    assert three(times) == pytest.approx((0.001, 0.004, 0.02), rel=0.02)
    assert r2 < 0.5
    with pytest.raises(ValueError, match="no generation has a second round"):
        fit_times([decoded_of(FREE, [[stored(5, 2, 0)]])])


def test_a_stop_is_paid_at_every_forward_of_the_models_that_it_stops():
    """2 ms a stop: HSDDW pays it at micro's forwards and at the draft's, plain speculation nowhere."""
    free = decoded_of(FREE, [[stored(*of) for of in ((0, 3, 2), (6, 1, 2), (1, 0, 5))]])
    slower = decoded_of(STOPPED, [[stored(*of, stop_s=0.002) for of in ((5, 2, 1), (7, 7, 1), (3, 9, 2))]])
    times, _ = fit_times([free, slower])
    kind = Entropy().stop_kind
    assert (*three(times), times.t_stop_s[kind]) == pytest.approx((0.001, 0.004, 0.02, 0.002))
    plain = replace(slower.played, stop_kind="", micro_stop_kind="")
    more_s = times.time_s(slower.played) - times.time_s(plain)
    assert more_s.tolist()[0] == pytest.approx([0.002 * forwards for forwards in (7, 14, 12)])
    assert at_ratios(0.1, 0.5, {kind: 0.2}).t_stop_s == {kind: 0.1}


def test_at_the_break_even_both_take_the_same_time_per_token():
    played = (FREE, (0, 50, 10), 50), (STOPPED, (60, 20, 10), 54), (FREE, (60, 60, 12), 50)
    plain, hierarchy, slow = (decoded_of(one, [[stored(*of, num_emitted=num)]]).played for one, of, num in played)
    for stop_s in (0.0, 0.05):
        times = times_by_length(0.3, (1.0,), t_stop_s={Entropy().stop_kind: stop_s}, t_micro_s=7.0)
        there = replace(times, t_micro_s=0.3 * break_even(hierarchy, plain, times))
        assert there.tokens_per_s(hierarchy) == pytest.approx(there.tokens_per_s(plain))
        assert break_even(slow, plain, times) < 0


def forty(competitor: Competitor, *settings: tuple[int, int, int]) -> Decoded:
    """Forty prompts: ten tokens, `target` rounds of five handed over, three accepted."""
    more = [{"num_emitted": 10, "num_drafted": 5 * of[2], "num_accepted": 3 * of[2]} for of in settings]
    return decoded_of(competitor, [[stored(*of, **each)] * 40 for of, each in zip(settings, more, strict=True)])


def test_a_third_level_pays_exactly_between_its_break_evens():
    """Two runs of ten tokens: T = 4 c + 2 + 20 c m against 10 c + 3, equal at m = (6 c + 1) / 20 c, which is 0.55 for c
    = 0.2.
    """
    free = replace(STOPPED, policy=FixedLength(0), micro_policy=None)
    gain = third_level_frame(
        [forty(FREE, (0, 10, 3)), forty(free, (20, 4, 2))], times_by_length(0.2, (1.0,), t_micro_s=1.0), {}
    )
    here = gain[gain["is_here"]]
    assert paying(here) == "0.00-0.54"
    ends = here[["gain", "low", "high"]].dropna()  # every prompt gains alike
    assert len(ends) > 0
    assert np.ptp(ends.to_numpy(dtype=float), axis=1) == pytest.approx(0.0)


class Loop(StoredLoop):
    """Decodes nothing: the short setting takes more rounds."""

    def __init__(self, *, has_dev: bool = True):
        self.has_dev = has_dev

    def play(self, competitors, split, *, repeats=1):
        forwards = {1: (9, 12, 2), 4: (9, 9, 2), None: (9, 12, 2)}
        entries = competitors if split == "test" or self.has_dev else ()
        return [forty(one, *(forwards[setting.get("n")] for setting in one.settings)) for one in entries]


def test_dev_chooses_what_runs_on_test_and_both_sides_of_the_verdict():
    for has_dev, best in ((True, 1), (False, 0)):
        dev, test = play(Loop(has_dev=has_dev), [FREE, FIXED])
        assert [len(one.played.counts.num_target) for one in dev] == [1, 2] * has_dev
        assert [one.competitor for one in test] == [FREE, FIXED.at(best)]
    dev = [forty(FREE, (0, 10, 3)), forty(STOPPED, (20, 4, 2)), forty(FIXED.at(0), (20, 8, 2))]
    test = [forty(FREE, (0, 10, 3)), forty(STOPPED, (20, 40, 9)), forty(FIXED.at(0), (2, 2, 1))]
    times = times_by_length(0.1, (1.0,), t_micro_s=0.01)
    for chosen_on, best, where in ((dev, "HSDDW window=10", "dev"), ([], "pre-verified n=1", "the same prompts")):
        gain = third_level_frame(chosen_on or test, times, {})
        verdict = third_level_verdict(test, chosen_on, gain, times=times)
        assert f"both sides chosen on {where}: the best hierarchy, {best}, " in verdict


WIDTHS = {"micro": 24, "draft": 96}
FEW = [f"--decode.{value}" for value in ("num_dev=1", "num_test=2", "max_new_tokens=8", "max_draft_length=4")]


@pytest.fixture(autouse=True)
def few_settings(monkeypatch):
    monkeypatch.setattr(configurations, "_LENGTHS", (2, 3))
    monkeypatch.setattr(configurations, "_INNER", ((1, 2),))
    monkeypatch.setattr(configurations, "_SCHEDULES", ((1, 1),))


def command(name: str, directory: Path, *flags: str) -> list[str]:
    return [name, "--config=configs/tiny.yaml", f"--decode.dir={directory}", f"--heads.dir={directory}", *flags]


def head_of(level: str, directory: Path, **provenance) -> str:
    torch.manual_seed(0)
    head = AcceptanceHead(WIDTHS[level], 1, "drawn", True)
    head.provenance = Provenance(sampling=vars(Sampling()), **provenance)
    head.save_pretrained(directory / level)
    return str(directory / level)


@pytest.mark.slow
def test_hierarchy_decodes_every_drafter_with_heads_and_resumes_where_it_was_killed(capsys, tmp_path):
    heads = json.dumps([head_of(level, tmp_path) for level in ("micro", "draft")])
    argv = command("hierarchy", tmp_path, *FEW, "--level_heads", heads)
    lines, document = printed(capsys, *argv)
    assert "a third level pays at" in "\n".join(lines).rpartition("\n\n")[2]
    arms = document["datasets"]["stories"]["arms"]
    assert len(arms) == 13
    assert [row["drafter"] for row in arms[-2:]] == ["sd with head", "HSDDW with heads"]
    for arm in arms:
        assert arm["num_emitted"] <= 16
        assert arm["num_accepted"] <= arm["num_drafted"]
        assert (arm["break_even"] is None) == (arm["num_levels"] < 3)
    path = tmp_path / "hierarchy" / "stories" / "clocked.jsonl"
    whole = path.read_bytes()
    called(*argv)
    assert path.read_bytes() == whole, "stored generations are not decoded again"
    lines = whole.splitlines(keepends=True)
    kept = b"".join(lines[: len(lines) // 2])
    path.write_bytes(whole[: len(kept) + 100])  # killed in the middle of a line
    counted = ("drafter", "num_emitted", "num_drafted", "num_accepted", "num_micro_forwards", "num_draft_forwards")
    resumed = printed(capsys, *argv)[1]["datasets"]["stories"]["arms"]
    assert path.read_bytes().startswith(kept), "what was decoded before is kept"
    before, after = ({tuple(arm[name] for name in counted) for arm in each} for each in (arms, resumed))
    assert {row for row in after if row[0].startswith(("HSDDW", "sd + "))} <= before
    assert "no test prompts to decode" in refusal(capsys, *argv, "--decode.num_test=0")
    manifest = path.with_name("manifest.json")
    manifest.write_text(manifest.read_text().replace("PCG64DXSM", "MT19937"))
    assert "differs in generator: 'MT19937' there, 'PCG64DXSM' in this run" in refusal(capsys, *argv)


@pytest.mark.draws
def test_theory_writes_its_table_and_figure_and_names_the_fastest(capsys, tmp_path):
    lines, document = printed(capsys, *command("theory", tmp_path))
    sentence = " ".join("\n".join(lines).rpartition("\n\n")[2].split())
    assert re.fullmatch(r"By the closed forms .* is fastest, .* times the target alone \(.*\)\.", sentence)
    assert {row["form"] for row in document["forms"]} == {"Leviathan", "Chen", "pre-verified"}
    assert all(Path(path).stat().st_size > 0 for path in document["written"])


def test_a_head_at_the_wrong_level_and_a_pair_without_a_micro_model_are_refused_in_one_line(capsys, tmp_path):
    refused = refusal(capsys, *command("hierarchy", tmp_path, "--pair.micro", "null"))
    assert refused.startswith("error: pair.micro is not set")
    other = {"weights": "0" * 64, "path": "somewhere/else"}
    heads = json.dumps([head_of("micro", tmp_path), head_of("draft", tmp_path, draft=other)])
    refused = refusal(capsys, *command("hierarchy", tmp_path, *FEW, "--level_heads", heads))
    assert "somewhere/else, but pair.draft is checkpoints/tiny/draft" in refused
