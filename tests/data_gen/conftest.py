"""The toy pair on disk, its prompts, and a run of data_gen on it."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.schema import Config, DataConfig, ModelSource, PairConfig
from data_gen.pipeline.command import make
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
    return {name: AutoModelForCausalLM.from_pretrained(toy_pair / name).eval() for name in ("target", "draft")}


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve prompts of differing length; a test that changes them takes a copy."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = [{"instruction": "Say it " + "again " * (i % 5), "input": "x" * (i % 3)} for i in range(12)]
    path.write_text("".join(json.dumps({"id": f"p{i}"} | text) + "\n" for i, text in enumerate(texts)))
    return path


def toy(pair: Path, prompts: Path, directory: Path) -> Config:
    target, draft = (ModelSource(path=str(pair / name)) for name in ("target", "draft"))
    sizes = {"num_train": 8, "num_dev": 0, "num_test": 4, "max_prompt_tokens": 60, "max_new_tokens": 10}
    sizes |= {"split_weights": (2, 0, 1), "rows_per_shard": 3, "batch_size": 2}
    data = DataConfig(dir=str(directory), prompts=str(prompts), **sizes)
    return Config(pair=PairConfig(target=target, draft=draft, num_threads=1), data=data)


@pytest.fixture
def toy_config(toy_pair: Path, prompts_file: Path, tmp_path: Path) -> Config:
    """Eight training and four test prompts in shards of three, ten tokens each."""
    return toy(toy_pair, prompts_file, tmp_path / "data")


@pytest.fixture(scope="session")
def toy_run(toy_pair: Path, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = toy(toy_pair, prompts_file, tmp_path_factory.mktemp("run") / "data")
    make(config)
    return Path(config.data.dir)


@pytest.fixture
def made(toy_config: Config, toy_run: Path) -> Config:
    """The toy run, finished: a copy of one that is made once."""
    shutil.copytree(toy_run, toy_config.data.dir)
    return toy_config
