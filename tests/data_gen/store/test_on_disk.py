"""What is on disk: one writer per directory; rows keep their stated precision, a model is known by all of its weights,
and a byte that has flipped is found and named at the start of whatever reads it; data_gen makes its shard again.
"""

import errno
import fcntl
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from configs.schema import Config, ModelSource
from data_gen.__main__ import main
from data_gen.pipeline.command import make
from data_gen.pipeline.inspect import check, responses
from data_gen.responses.exchange import Exchange
from data_gen.stats import stats
from data_gen.store import manifest
from data_gen.store.manifest import describe_model, same_model
from data_gen.store.rows import POSITION_COLUMNS, read_rows, to_parquet
from store import facts, shards
from store.facts import FileFacts
from store.lock import LOCK, only_writer
from store.shards import broken_shards, check_sums, clean_partial, shard_path, sidecar_path, write_shard
from tests.data_gen.on_disk import files_of, flip, hidden_states_of, with_data
from tests.data_gen.processes import at_once, meanwhile


def test_a_second_process_is_told_who_writes(toy_config, tmp_path):
    folder = tmp_path / "d"
    lock = folder / LOCK

    def hold() -> None:
        with only_writer(folder, setting="data.dir"):
            signal.pause()

    with meanwhile(hold, until=lambda: lock.is_file() and lock.read_text() != "") as pid:
        says = rf"d is in use by process {pid} on \S+ since 20.*choose another data\.dir"
        with pytest.raises(ValueError, match=says):
            make(with_data(toy_config, dir=str(folder)))
        assert [path.name for path in folder.iterdir()] == [LOCK]


def test_the_lock_of_a_dead_process_is_no_obstacle_and_none_is_left_over(tmp_path):
    def die() -> None:
        with only_writer(tmp_path, setting="data.dir"):
            os.kill(os.getpid(), signal.SIGKILL)

    assert at_once(die) == [-signal.SIGKILL]
    assert (tmp_path / LOCK).is_file()
    (tmp_path / "kept").touch()
    with only_writer(tmp_path, setting="data.dir"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.slow
def test_a_thousand_handovers_never_let_two_in(tmp_path):
    """Four processes take turns as fast as they can; each adds one to a number, which two at once would lose."""
    total = tmp_path / "total"
    total.write_text("0")

    def add() -> None:
        done = 0
        while done < 250:
            try:
                with only_writer(tmp_path / "d", setting="data.dir"):
                    total.write_text(str(int(total.read_text()) + 1))
                    done += 1
            except ValueError:
                time.sleep(0)

    assert at_once(*[add] * 4) == [0] * 4
    assert total.read_text() == "1000"


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_directory_that_is_a_file_is_refused(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"data\.dir is .*file"), only_writer(tmp_path / place, setting="data.dir"):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_filesystem_without_locks_is_named_with_the_remedy_and_nothing_is_left_there(tmp_path, monkeypatch, number):
    def no_flock(*_args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_flock)
    says = rf"heads\.dir is .*run, on a filesystem without file locks \(flock: {os.strerror(number)}\)"
    says += r".*mount it with locks.*another disk"
    with pytest.raises(ValueError, match=says), only_writer(tmp_path / "run", setting="heads.dir"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_only_the_partial_files_of_writers_are_removed(tmp_path):
    ours = {"rows/.a.parquet.12.partial", ".manifest.json.7.partial"}
    theirs = {"rows/.a.partial", "decode/.b.json.9.partial", "mine.partial"}
    for name in ours | theirs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    clean_partial(tmp_path, "rows")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == theirs


COUNT = 4000


def break_shards(config: Config) -> list[Path]:
    """Shards of rows and of labels, of which a byte flips."""
    paths = [shard_path(config.data.dir, "rows", "train", 1), shard_path(config.data.dir, "labels", "test", 0)]
    for path in paths:
        flip(path)
    return paths


@pytest.mark.parametrize("mode", ["together", pytest.param("sequential", marks=pytest.mark.slow)])
def test_a_flipped_byte_is_named_and_its_shard_made_again_byte_for_byte(toy_config, capsys, mode):
    config = with_data(toy_config, mode=mode)
    make(config)
    whole, broken = files_of(config.data.dir), break_shards(config)
    capsys.readouterr()
    make(config)
    said = capsys.readouterr()
    assert all(f"{path} is corrupted" in said.err for path in broken)
    assert "(2 made in this run)" in said.out
    assert files_of(config.data.dir) == whole


def test_check_names_every_broken_shard_changes_nothing_and_ends_with_exit_code_2(made, tmp_path, capsys):
    hidden_states_of(made, "train", "fed")
    cached = Path(made.data.dir, "states", "fed", "train-00001.safetensors")
    capsys.readouterr()
    check(made)
    said = capsys.readouterr()
    assert "5 shards intact" in said.out
    assert said.out.endswith(" are intact.\n")
    broken = break_shards(made)
    flip(cached)
    shard_path(made.data.dir, "labels", "train", 0).unlink()
    sidecar_path(shard_path(made.data.dir, "labels", "train", 1)).write_text("{")
    lost = shard_path(made.data.dir, "rows", "test", 1)
    lost.unlink()
    sidecar_path(lost).unlink()
    for never_made in Path(made.data.dir).rglob("train-00002.*"):  # the manifest counts it
        never_made.unlink()
    before, path = files_of(made.data.dir), tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({"pair": asdict(made.pair), "data": {"dir": made.data.dir}}))
    with pytest.raises(SystemExit, match="2"):
        main(["check", "--config", str(path)])
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith("error: 8 shards in ")
    assert "are damaged or missing" in said.err.splitlines()[-1]
    for path in broken:
        assert f"{path} is corrupted: its sha256 differs from its sidecar's; delete it" in said.out
    remedy = "delete it and that, and run `acceptance-heads train` again"
    assert f"{cached} is corrupted: its sha256 differs from its sidecar's; {remedy}" in said.out
    assert "labels/train-00000.safetensors is missing" in said.out
    assert "labels/train-00001.safetensors.json: invalid JSON" in said.out
    assert said.out.count("train-00002") == 2
    assert f"{lost} is missing or incomplete" in said.out
    assert files_of(made.data.dir) == before


def test_responses_and_statistics_of_a_broken_shard_are_refused(made, tmp_path):
    flip(shard_path(made.data.dir, "rows", "test", 0))
    with pytest.raises(ValueError, match=r"test-00000\.parquet is corrupted"):
        responses(made, out=str(tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.jsonl").exists()
    flip(shard_path(made.data.dir, "rows", "train", 0))
    with pytest.raises(ValueError, match="is corrupted: its sha256"):
        stats(made, plots=False)


def test_a_shard_is_read_once_in_a_process_and_again_where_it_has_changed(tmp_path, monkeypatch):
    path, read = tmp_path / "train-00000.parquet", []
    digest = shards.hashlib.file_digest
    monkeypatch.setattr(shards.hashlib, "file_digest", lambda file, name: read.append(file.name) or digest(file, name))
    for content, num_read in ((b"x" * 100, 1), (b"y" * 100, 2)):
        write_shard(path, content)
        check_sums([path])
        check_sums([path])
        assert len(read) == num_read


def test_an_unreadable_shard_is_named_among_the_others(tmp_path, monkeypatch):
    paths = [tmp_path / f"train-{index:05d}.parquet" for index in range(3)]
    for path in paths:
        write_shard(path, b"x")
    flip(paths[2])
    verify = shards.verify_shard

    def failing(path: Path, *, command: str, known: FileFacts | None) -> None:
        if path == paths[1]:
            raise OSError(5, "Input/output error", str(path))
        verify(path, command=command, known=known)

    monkeypatch.setattr(shards, "verify_shard", failing)
    problems = dict(broken_shards(paths))
    assert list(problems) == paths[1:]
    assert problems[paths[1]].startswith(f"{paths[1]} cannot be read (Input/output error); repair the disk")


def test_numbers_keep_the_stated_precision_and_ids_are_exact(tmp_path):
    columns = {name: torch.rand(COUNT) for name in POSITION_COLUMNS}
    columns["log_p"] = -30 * columns["log_p"]
    columns["log_p"][7] = -torch.inf
    columns["acceptance_prob"][:3] = torch.tensor([0.0, 1.0, 1e-7])
    columns["draft_ids"] = torch.randint(0, 152_000, (COUNT,))
    exchange = Exchange("a", "text", [1, 2], torch.randint(0, 152_000, (COUNT,)).tolist(), "length")
    path = tmp_path / "rows.parquet"
    path.write_bytes(to_parquet([exchange], columns | {"from_target": torch.zeros(COUNT).bool()}))
    row = read_rows(path).to_pylist()[0]
    assert row["response_ids"] == exchange.response_ids
    assert row["draft_ids"] == columns["draft_ids"].tolist()
    for name in POSITION_COLUMNS:
        rtol = 2**-16 if "entropy" in name else 2**-11
        torch.testing.assert_close(torch.tensor(row[name]), columns[name], rtol=rtol, atol=3e-8)


@pytest.fixture
def model(tmp_path, monkeypatch) -> tuple[ModelSource, Callable[[], None]]:
    """A directory with 4 MiB of weights, and a function that changes one number in their middle."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(facts, "_LARGE_BYTES", 1)
    monkeypatch.setattr(facts, "_SETTLED_NS", 0)
    LlamaConfig(hidden_size=64).save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    save_file({"weight": torch.zeros(2**20)}, path)

    def change() -> None:
        weights = load_file(path)["weight"].clone()
        weights[2**19] += 1
        save_file({"weight": weights}, path)

    return ModelSource(path=str(path.parent)), change


def test_one_changed_weight_anywhere_is_another_model_and_a_large_file_is_hashed_once(model, tmp_path, monkeypatch):
    source, change = model
    before = describe_model(source)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "sha256_of", lambda path: "hashed again")
        assert describe_model(source) == before
    change()
    after = describe_model(source)
    assert after["weights"] != before["weights"]
    assert same_model(before, after) is False
    assert same_model({"weights": after["weights"]}, after) is True
    assert same_model({"commit": None}, after) is None
    (tmp_path / "cache" / "acceptance-heads" / "files.json").write_text("{")
    assert describe_model(source) == after, "a broken cache is only slower"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "model" / "config.json"))
    assert describe_model(source) == after, "so is a home that cannot be written to"


def test_a_config_that_decides_logits_is_compared_and_its_version_is_not(model):
    source, _ = model
    before = describe_model(source)["config"]
    path = Path(source.path) / "config.json"
    path.write_text(re.sub('"transformers_version": ".*?"', '"transformers_version": "0"', path.read_text()))
    assert describe_model(source)["config"] == before
    LlamaConfig(hidden_size=64, rms_norm_eps=0.1).save_pretrained(source.path)
    assert describe_model(source)["config"] != before


def test_a_feature_draft_is_described_though_transformers_knows_not_its_layout(tmp_path):
    layout = '{"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": 24}}'
    (tmp_path / "config.json").write_text(layout)
    save_file({"fc.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    described = describe_model(ModelSource(path=str(tmp_path)))
    assert described["hidden_size"] == 24
    assert described["weights"]
