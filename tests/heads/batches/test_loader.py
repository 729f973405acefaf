"""Reading: each response once an epoch, the same order everywhere, bounded in memory; broken shards are refused."""

import json
import random
import shutil
import statistics
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from safetensors.torch import load_file, save

from configs.schema import ModelSource
from data_gen.store.manifest import describe_model
from heads.batches.loader import BatchLoader, Item, batches, read_ahead, shuffled, stored_features, stored_order
from heads.training.command import train
from store import shards
from store.shards import shard_path, sidecar_path, write_shard
from tests.toys.made_up import ROOT, feature_data, make_config, write_data, write_features

LENGTHS = [[7 + (31 * i) % 23 for i in range(size)] for size in (400, 240, 7)]
EVERY = stored_order(LENGTHS)


def test_an_epoch_visits_every_response_once_in_an_order_of_its_own_from_a_pool_of_blocks():
    epochs = [list(shuffled(LENGTHS, seed=5, epoch=epoch)) for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == EVERY
    for start in range(0, len(EVERY), 256):
        assert len({(shard, i // 16) for shard, i in epochs[0][start : start + 256]}) <= 32

    def spread(visited: list[tuple[int, int]]) -> float:
        tokens = [sum(LENGTHS[shard][i] for shard, i in visited[start : start + 32]) for start in range(0, 512, 32)]
        return statistics.pstdev(tokens) / statistics.fmean(tokens)

    assert spread(epochs[0]) < 0.02 < 0.05 < spread(random.Random(0).sample(EVERY, len(EVERY)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 60])
@pytest.mark.parametrize(
    "items", [list(shuffled(LENGTHS, seed=5, epoch=0)), stored_order(LENGTHS)], ids=["train", "dev"]
)
def test_processes_cut_the_very_batches_of_one_in_equal_parts(items: list[Item], world_size: int):
    """The last batch has 47 responses, of which some of 60 processes have none; all take part in the sums."""
    shares = [list(batches(items, 120, rank=rank, world_size=world_size)) for rank in range(world_size)]
    for parts, batch in zip(zip(*shares, strict=True), batches(items, 120), strict=True):
        assert [item for part in parts for item in part] == batch
    assert {len(part) for share in shares for part in share[:-1]} == {120 // world_size}


def test_a_loader_goes_on_where_its_consumer_stopped():
    def loader() -> BatchLoader:
        made = BatchLoader(list, LENGTHS, batch_size=8, seed=1, features=list)
        made.set_epoch(3)
        return made

    whole, first, second = list(loader()), loader(), loader()
    taken = [batch for _, batch in zip(range(4), first, strict=False)]
    state = first.state_dict()
    assert state == {"epoch": 3, "taken": 4}
    second.load_state_dict(state)
    assert taken + list(second) == whole
    second.set_epoch(4)
    assert len(list(second)) == len(whole)


def test_read_ahead_keeps_order_and_hands_errors_over_and_slow_threads_change_no_batch(data_dir, tmp_path):
    def read(number: int) -> int:
        if number == 10:
            raise ValueError("the shard is broken")
        time.sleep(0.01 * (number % 3 == 0))  # so that others are ready before
        return number

    results, batches_read = [], read_ahead(read, iter(range(20)), 3)
    with pytest.raises(ValueError, match="the shard is broken"):
        deque(map(results.append, batches_read), maxlen=0)
    assert results == list(range(10))
    loader = feature_data(make_config(data_dir, tmp_path)).loader("train", seed=1)
    order = batches(shuffled(loader.lengths, seed=1, epoch=0), 8)
    one_by_one, fast = [stored_features(loader.read(items)) for items in order], loader.read
    loader.read = lambda items: time.sleep(0.02 * random.random()) or fast(items)
    for batch, alone in zip(loader, one_by_one, strict=True):
        assert all(map(torch.equal, batch["fed"][2:], alone["fed"][2:]))
        assert torch.equal(batch["fed"].hidden, alone["fed"].hidden)


def test_only_drafted_positions_are_kept_and_timings_agree(data_dir: Path, tmp_path: Path):
    data = feature_data(
        make_config(data_dir, tmp_path, timings=("fed", "drawn"), scalars=(("text_position", "log_token_prob"),))
    )
    batch = next(iter(data.loader("dev")))
    fed, drawn = batch["fed"], batch["drawn"]
    stored = load_file(shard_path(data_dir, "labels", "dev", 0)) | load_file(
        shard_path(data_dir, "states/fed", "dev", 0)
    )
    before = torch.cat([torch.arange(length) for length in stored["row_offsets"][:9].diff().tolist()])
    count = int(stored["row_offsets"][8])
    drafted = stored["is_drafted"][:count]
    assert torch.equal(fed.hidden, stored["hidden"][:count][drafted])
    assert torch.equal(fed.scalars["log_token_prob"], stored["log_token_prob"][:count][drafted])
    torch.testing.assert_close(fed.scalars["text_position"], before[drafted].float().log1p())
    torch.testing.assert_close(drawn.scalars["text_position"], before.float().log1p())
    assert [int(each.row_lengths.sum()) for each in (fed, drawn)] == [len(fed.hidden), len(drawn.hidden)]
    assert len(fed.hidden) < len(drawn.hidden)


def rewrite(path: Path, **changes: torch.Tensor) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()} | changes
    write_shard(path, save(tensors), rows=24, tokens=len(next(iter(tensors.values()))))


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def empty_train(path: Path) -> None:
    """No responses in any training shard of labels."""
    for file in path.parent.glob("train-*.safetensors"):
        empty = {name: tensor[: name == "row_offsets"].clone() for name, tensor in load_file(file).items()}
        write_shard(file, save(empty), rows=0, tokens=0)


DAMAGES = {
    "flipped": (flip_last_byte, "train-00001.safetensors is corrupted: its sha256"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "train-00001"),
    "no sidecar": (lambda path: sidecar_path(path).unlink(), "train-00001"),
    "probability": (
        lambda path: rewrite(path, acceptance_prob=load_file(path)["acceptance_prob"] + 1),
        r"labels/train-00001.*acceptance_prob of token 0 is outside",
    ),
    "empty": (empty_train, "no tokens; raise data"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_broken_labels_are_refused_and_named(tmp_path: Path, how: str):
    (damage, message), data_dir = DAMAGES[how], write_data(tmp_path / "data")
    damage(data_dir / "labels" / "train-00001.safetensors")
    with pytest.raises(ValueError, match=message):
        list(feature_data(make_config(data_dir, tmp_path)).loader("train"))


def test_data_of_another_draft_or_sampling_and_more_responses_than_there_are_are_refused(data_dir, tmp_path):
    text = (data_dir / "manifest.json").read_text()
    changed = Path(shutil.copytree(data_dir, tmp_path / "changed"))
    for old, new, message in (
        ("made-up/draft", "other/draft", "draft name"),
        ('"temperature": 1.0', '"temperature": 0.5', "sampling"),
        ('"mixes": 1', '"format": 2', "has data format 2, but this version reads format 3; make the data in another"),
        (
            '"mixes": 1',
            '"mixes": 3',
            r"has 3 token mixings .*\(data.mixes\), but this version reads one; make the data",
        ),
    ):
        (changed / "manifest.json").write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=message):
            feature_data(make_config(changed, tmp_path))
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        feature_data(make_config(tmp_path / "nowhere", tmp_path))
    assert feature_data(make_config(data_dir, tmp_path, num_train=50)).num_responses("train") == 50
    with pytest.raises(ValueError, match="num_train is 65"):
        feature_data(make_config(data_dir, tmp_path, num_train=65)).num_responses("train")


def test_a_target_that_is_not_on_this_machine_is_the_manifests_with_a_warning(data_dir: Path, tmp_path: Path, capsys):
    """Training on cached features reads no target: its directory need not be on the machine."""
    target = Path(shutil.copytree(ROOT / "checkpoints" / "tiny" / "target", tmp_path / "models" / "target"))
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    source = ModelSource(path=str(target))
    manifest = json.loads((data / "manifest.json").read_text()) | {"target": describe_model(source)}
    (data / "manifest.json").write_text(json.dumps(manifest))
    config = make_config(data, tmp_path)
    config = replace(config, pair=replace(config.pair, target=source))
    feature_data(config)
    assert capsys.readouterr().err == ""
    (target / "model.safetensors").unlink()
    feature_data(config)
    assert "warning: the target" in capsys.readouterr().err, "a directory without weights"
    shutil.rmtree(target)
    feature_data(config)
    (warning,) = capsys.readouterr().err.splitlines()
    assert f"warning: the target {target} is not on this machine, so only its name was compared" in warning
    target.mkdir()
    feature_data(config)
    assert "warning: the target" in capsys.readouterr().err, "an empty mount point"
    renamed = replace(config, pair=replace(config.pair, target=ModelSource(path=str(tmp_path / "gone"))))
    with pytest.raises(ValueError, match=r"made with target name 'target', but this config has '.*gone'"):
        feature_data(renamed)
    target.rmdir()
    shutil.copytree(ROOT / "checkpoints" / "tiny" / "draft", target)
    with pytest.raises(ValueError, match="made with target weights"):
        feature_data(config)


def test_sums_are_taken_once_by_the_first_process_and_of_no_shard_that_is_not_read(tmp_path: Path, monkeypatch):
    data_dir, read, digest = write_data(tmp_path / "data"), [], shards.hashlib.file_digest
    watched = lambda file, name: read.append(Path(file.name)) or digest(file, name)  # noqa: E731
    monkeypatch.setattr(shards.hashlib, "file_digest", watched)
    train(make_config(data_dir, tmp_path / "run", num_train=40, trainer={"max_epochs": 1}))
    names = [f"{split}-00000.safetensors" for split in ("train", "dev", "test")]
    shards_read = [data_dir / folder / name for folder in ("labels", "states/fed") for name in names]
    shards_read += [data_dir / "rows" / f"{Path(name).stem}.parquet" for name in names]
    assert sorted(read) == sorted(shards_read)
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # the first of several processes takes the sums
    flip_last_byte(read[0])
    feature_data(make_config(data_dir, tmp_path / "run"))


def test_a_shard_without_rows_changes_nothing(data_dir: Path, tmp_path: Path):
    """As a shard of which every prompt was refused; also where the first evaluation batch has no response."""
    results = []
    for name, sizes in (("whole", (40, 24)), ("holes", (0, 40, 0, 24))):
        folder = Path(shutil.copytree(data_dir, tmp_path / name))
        for path in folder.rglob("train-*"):
            path.unlink()
        for index, num_rows in enumerate(sizes):
            write_features(folder, "train", index, num_rows=num_rows, seed=num_rows)
        data = feature_data(make_config(folder, tmp_path / "run", timings=("fed", "drawn"), scalars=(True,)))
        loader = data.loader("train")
        assert [len(features.token) for features in stored_features(loader.read([])).values()] == [0, 0]
        loaders = data.first_shard(), data.first_tokens(200), data.loader("train")
        results.append([[batch["fed"].token.tolist() for batch in loader] for loader in loaders])
    assert results[0] == results[1]


def test_data_of_an_earlier_version_gives_logit_q_of_the_token_with_a_warning_and_refuses_prefix_heads(
    tmp_path, capsys
):
    directory = write_data(tmp_path / "data")
    for split, index in (("train", 0), ("train", 1), ("dev", 0), ("test", 0)):
        path = shard_path(directory, "labels", split, index)
        rows = json.loads(sidecar_path(path).read_text())["rows"]
        kept = {name: values for name, values in load_file(path).items() if not name.startswith("logit_")}
        write_shard(path, save(kept), rows=rows)
    features = next(iter(feature_data(make_config(directory, tmp_path, scalars=(True,))).loader("dev")))["fed"]
    expected = features.scalars["log_token_prob"].double().exp().logit()
    torch.testing.assert_close(features.scalars["logit_token_prob"].double(), expected, rtol=1e-5, atol=1e-5)
    [warning] = capsys.readouterr().err.splitlines()
    assert "was made by version 0.2.0 or earlier" in warning
    assert f"delete {directory}/labels" in warning
    with pytest.raises(ValueError, match=r"has no logit_max_prob.*delete .*labels and run .*or remove prefix from"):
        feature_data(make_config(directory, tmp_path, timings=("prefix",)))
    assert feature_data(make_config(write_data(tmp_path / "new"), tmp_path, timings=("prefix",))).columns
    assert not capsys.readouterr().err
