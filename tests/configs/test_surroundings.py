"""Commands in a container without a home directory, and in a locale without UTF-8."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = """
import sys
from configs.front import main
pair = ["--target", sys.argv[1] + "/target", "--draft", sys.argv[1] + "/draft"]
main(["init", *pair, "--prompts", "prompts.jsonl", "--out", "study.yaml"])
small = ["--config", "study.yaml", "--data.max_new_tokens", "8"]
small += ["--heads.depths", "[0]", "--heads.embeddings", "[false]", "--trainer.max_epochs", "1"]
for step in (["data"], ["train"], ["export", "--force"]):
    main([*step, *small])
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "surroundings",
    [{"HOME": "/nonexistent"}, {"HOME": None, "USER": None}, {"HOME": "/dev/null"}, ASCII],
    ids=["no_such_home", "no_home", "home_is_no_folder", "ascii"],
)
def test_init_data_training_and_export_run_without_a_home_and_in_any_locale(surroundings, tmp_path: Path):
    prompts = [json.dumps({"prompt": f"Wie viel sind {n} Äpfel 😀?"}, ensure_ascii=False) for n in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts), encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "HF_", "MPL"))}
    variables |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **surroundings}
    variables = {name: value for name, value in variables.items() if value is not None}
    command = [sys.executable, "-c", STEPS, str(ROOT / "checkpoints/tiny")]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert b"Traceback" not in done.stderr
    assert list((tmp_path / "checkpoints/runs/study/exported").glob("*/config.json"))
