"""The toy pair on disk, its prompts, and a run of data_gen on it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.schema import Config, DataConfig, ModelSource, PairConfig
from tests.toys.saved_pair import save_toy


@pytest.fixture(scope="session")
def toy_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with target and draft."""
    folder = tmp_path_factory.mktemp("toy")
    save_toy(folder / "target", hidden_size=16, seed=1)
    save_toy(folder / "draft", hidden_size=8, seed=2, scale=0.3)
    return folder


@pytest.fixture(scope="session")
def models(toy_pair: Path) -> dict[str, PreTrainedModel]:
    """The toy pair, loaded."""
    return {name: AutoModelForCausalLM.from_pretrained(toy_pair / name).eval() for name in ("target", "draft")}


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    """Twelve prompts of differing length."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(
            json.dumps({"id": f"p{i}", "instruction": "Say it " + "again " * (i % 5), "input": "x" * (i % 3)}) + "\n"
            for i in range(12)
        )
    )
    return path


@pytest.fixture
def toy_config(toy_pair: Path, prompts_file: Path, tmp_path: Path) -> Config:
    """Eight training and four test prompts in shards of three, ten tokens each."""
    return Config(
        pair=PairConfig(
            target=ModelSource(path=str(toy_pair / "target")),
            draft=ModelSource(path=str(toy_pair / "draft")),
            num_threads=1,
        ),
        data=DataConfig(
            dir=str(tmp_path / "data"),
            prompts=str(prompts_file),
            split_weights=(2, 0, 1),
            num_train=8,
            num_dev=0,
            num_test=4,
            max_prompt_tokens=60,
            max_new_tokens=10,
            rows_per_shard=3,
            batch_size=2,
        ),
    )


@pytest.fixture
def with_data():
    """with_data(config, **changes): the config with other `data` settings."""
    return lambda config, **changes: replace(config, data=replace(config.data, **changes))
