"""A small number of random prompts; `python -m tests.data_gen.fuzz_prompts 2000` tries many."""

from pathlib import Path

from tests.data_gen.fuzz_prompts import run

TOKENIZER = str(Path(__file__).parents[3] / "checkpoints/tiny/target")


def test_random_prompts_are_rendered_with_the_users_words_or_refused_in_one_line(tmp_path: Path):
    fuzz = run(200, 0, tmp_path, TOKENIZER)
    assert fuzz.faults == []
    assert fuzz.outcomes.keys() >= {"rendered", "rendering refused", "record refused"}
    assert fuzz.outcomes["rendered"] > 60
