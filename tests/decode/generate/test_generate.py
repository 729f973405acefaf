"""python -m decode generate: what a person sees, what a program reads, and the records of rounds."""

import json
from pathlib import Path

import pytest

from configs.command import run
from decode import Generation
from decode.generate.command import generate
from decode.generate.transcript import STYLES, Detokenizer, styled, summary
from decode.policies import FixedLength
from tests.toys.enumeration import seeded
from tests.toys.loop import PROMPT, decoder_of

ROOT = Path(__file__, "../../../..").resolve()


class Letters:
    """A tokenizer of letters: token i is the i-th; 9 and 8 are the halves of one character."""

    def decode(self, token_ids, **_):
        return "".join(chr(97 + i) for i in token_ids).replace("ji", "é").replace("j", "\ufffd")


def printed(capsys, monkeypatch, *flags: str) -> str:
    monkeypatch.chdir(ROOT)
    prompt = ("--prompt", "Tom has 3 apples.", "--max_new_tokens", "24")
    run({"generate": generate}, argv=["generate", "--config", "configs/tiny.yaml", *prompt, *flags])
    return capsys.readouterr().out


def test_the_command_shows_text_and_one_summary_line_and_one_prompt_needs_no_prompt_set(capsys, monkeypatch, tmp_path):
    flags = ("--svg", str(tmp_path / "picture.svg"), "--data.prompts", "nowhere/at-all.jsonl")
    output = printed(capsys, monkeypatch, "--policy", "entropy:max_sqrt_entropy=0.4", *flags)
    assert "accepted" in output.splitlines()[0]
    assert "acceptance length" in output
    assert (tmp_path / "picture.svg").read_text().startswith("<svg")


def test_json_holds_every_round_and_the_same_tokens(capsys, monkeypatch):
    document = json.loads(printed(capsys, monkeypatch, "--policy", "heuristic", "--json", "true").splitlines()[-1])
    assert [token for played in document["rounds"] for token in played["emitted"]] == document["token_ids"]
    generation = decoder_of(FixedLength(2)).generate(PROMPT, 20, generator=seeded(1))
    for record in (document, generation.as_dict()):
        assert sum(len(played["drafted"]) for played in record["rounds"]) == record["counts"]["num_drafted"]
    assert Generation.of(generation.rounds) == generation
    assert "rounds" in summary(generation, FixedLength(2))
    counts = document["counts"]
    assert counts["num_emitted"] == len(document["token_ids"]) <= 24
    names = {"drafted", "num_accepted", "emitted", "next_kind", "stop_reason", "draft_s", "target_s"}
    assert document["rounds"][0].keys() == names


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--policy", "svip"), "no policy 'svip'"),
        (("--policy", "fixed_length:k=2", "--max_new_tokens", "0"), "--max_new_tokens is 0; it must be at least 1"),
    ],
)
def test_a_mistake_ends_in_one_line(capsys, monkeypatch, flags, message):
    with pytest.raises(SystemExit) as stopped:
        printed(capsys, monkeypatch, *flags)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_each_token_wears_the_colour_of_what_it_was():
    detokenizer = Detokenizer(Letters())
    for played in decoder_of(FixedLength(2), eos_ids=()).generate(PROMPT, 30, generator=seeded()).rounds:
        kinds = ["accepted"] * played.num_accepted + ["rejected"] * (played.num_accepted < len(played.drafted))
        styles = [str(span.style) for span in styled(played, detokenizer).spans]
        assert styles == [STYLES[kind] for kind in (*kinds, played.next_kind)]


def test_half_a_character_waits_for_its_other_half():
    detokenizer = Detokenizer(Letters())
    assert [detokenizer.add(token) for token in (0, 9, 8, 1)] == ["a", "", "é", "b"]
    assert detokenizer.peek((2, 3)) == "cd"
    assert "".join(detokenizer.add(token % 5) for token in range(100)) == "abcde" * 20
