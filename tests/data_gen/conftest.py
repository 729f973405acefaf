"""The toy pair on disk, its prompts, runs of data_gen on it, and servers in this process."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from configs.schema import Config, ServerConfig
from data_gen.pipeline.command import make
from data_gen.prompts import sets
from tests.data_gen.on_disk import toy_of, with_data
from tests.toys.answering import answering, echo, url_of
from tests.toys.saved_pair import save_toy


@pytest.fixture(autouse=True)
def _unparsed() -> None:
    """Each test parses its prompt sets: those of the hub are other ones in each test."""
    sets.parsed.cache_clear()


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
def tokenizer(toy_pair: Path):
    return AutoTokenizer.from_pretrained(toy_pair / "target")


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve prompts of differing length; a test that changes them takes a copy."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = [{"instruction": "Say it " + "again " * (i % 5), "input": "x" * (i % 3)} for i in range(12)]
    path.write_text("".join(json.dumps({"id": f"p{i}"} | text) + "\n" for i, text in enumerate(texts)))
    return path


@pytest.fixture
def toy_config(toy_pair: Path, prompts_file: Path, tmp_path: Path) -> Config:
    return toy_of(toy_pair, prompts_file, tmp_path / "data")


@pytest.fixture(scope="session")
def toy_run(toy_pair: Path, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = toy_of(toy_pair, prompts_file, tmp_path_factory.mktemp("run") / "data")
    make(config)
    return Path(config.data.dir)


@pytest.fixture(scope="session")
def apart_run(toy_pair: Path, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy run in sequential mode."""
    config = toy_of(toy_pair, prompts_file, tmp_path_factory.mktemp("apart") / "data")
    make(with_data(config, mode="sequential"))
    return Path(config.data.dir)


@pytest.fixture
def made(toy_config: Config, toy_run: Path) -> Config:
    """The toy run, finished: a copy of one that is made once."""
    shutil.copytree(toy_run, toy_config.data.dir)
    return toy_config


@pytest.fixture
def server():
    with answering(echo) as server:
        yield server


@pytest.fixture
def second():
    with answering(echo) as server:
        yield server


@pytest.fixture
def served(toy_config, server):
    """The toy run with its responses from `server`."""
    served = ServerConfig(url=url_of(server), max_retries=2, timeout_s=30, concurrency=3)
    return with_data(toy_config, source="server", server=served, max_error_share=1.0)
