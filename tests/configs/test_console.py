"""What `all` leaves on a terminal: few lines, none twice, commands that can be pasted, and the verdict last."""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from docs.outputs import in_terminal, screen
from tests.toys.saved_pair import save_toy

MOST_LINES = 60
COLUMNS = 100
NUM_HEADS = 40
ALL = "from configs.front import main; main()"
OWN_WORDS = re.compile(r"v_num|calibrated_kl|raw_kl|rho_|_violations|acceptance_rate|token_prob\b|head_drawn")
"""Names of variables and columns, which no reader of a terminal knows."""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Lines of `all` on a toy pair with 40 heads, each with the rows that it takes."""
    folder = tmp_path_factory.mktemp("all")
    save_toy(folder / "target", hidden_size=32, seed=1)
    save_toy(folder / "draft", hidden_size=16, seed=2)
    prompts = [json.dumps({"prompt": f"Count from {n} to {n + 3}."}) for n in range(60)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    (folder / "experiment.yaml").write_text(
        "pair: {target: {path: target}, draft: {path: draft}, num_threads: 1}\n"
        "data: {dir: data, prompts: prompts.jsonl, num_train: null, num_dev: 12, num_test: 12, max_new_tokens: 16,\n"
        "  max_prompt_tokens: 64, template: chat}\n"
        "heads: {dir: heads, timings: [fed, drawn], depths: [0, 1], embeddings: [false, true], dropout: [0.0],\n"
        "  reject_weights: [1, 2, 3, 6, 12]}\n"
        "trainer: {max_epochs: 2}\n"
        "decode: {dir: decode, num_dev: 12, num_test: 12, max_new_tokens: 16, max_draft_length: 6, ratios: [8],\n"
        "  t_draft_s: 0.001, t_target_s: 0.005}\n"
    )
    command = [sys.executable, "-c", ALL, "all", "--config", "experiment.yaml"]
    status, written = in_terminal(command, folder, COLUMNS)
    lines = screen(written, COLUMNS)
    assert status == 0, lines
    assert len(list(Path(folder, "heads/exported").iterdir())) > NUM_HEADS / 2
    return lines


@pytest.mark.slow
def test_all_leaves_few_lines_and_the_verdict_last(shown: list[list[str]]):
    rows = [row for line in shown for row in line]
    assert len(rows) <= MOST_LINES, "\n".join(rows)
    text = "\n".join("".join(line) for line in shown)
    verdict = text.rpartition("\n\n")[2]
    assert re.match(r"Use |No verdict", verdict)
    assert len(re.findall(r"^(?:Use |No verdict)", text, re.MULTILINE)) == 1
    sentences = [line for line in text.splitlines() if len(line) > 40 and not line.startswith(("│", "┃"))]
    assert [line for line, count in Counter(sentences).items() if count > 1] == []


@pytest.mark.slow
def test_what_all_prints_is_in_the_fields_words_and_has_whole_commands(shown: list[list[str]]):
    text = "\n".join("".join(line) for line in shown)
    assert OWN_WORDS.findall(text) == []
    assert "…" not in text
    assert re.findall(r"^next: (.*)", text, re.MULTILINE) == [
        "acceptance-heads generate --config experiment.yaml --prompt 'Why is the sky blue?'"
    ]
    assert len(re.findall(r"wrote \d+ heads to heads/exported", text)) == 1
    header = next(line for line in text.splitlines() if "within" in line and "threshold" in line)
    assert "tokens/s" in header
