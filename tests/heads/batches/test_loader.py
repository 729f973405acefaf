"""Reading: each response once an epoch, the same order everywhere, resumable, bounded in memory; broken shards refused."""

import shutil
from pathlib import Path

import pytest
import torch
from made_up import feature_data, make_config, write_data
from safetensors.torch import load_file, save

from data_gen.store.shards import features_path, sidecar_path, write_shard
from heads.batches.loader import BatchLoader, read_ahead
from heads.batches.order import batches, blocks, num_batches, shuffled

SIZES = [40, 24, 7]


def numbers(items: object) -> list[tuple[int, int]]:
    return [(item.block.shard, item.block.start + item.place) for item in items]  # type: ignore[attr-defined]


def test_an_epoch_visits_every_response_once_in_an_order_of_its_own():
    epochs = [numbers(shuffled(blocks(SIZES, 4), 3, seed=5, epoch=epoch)) for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [(shard, i) for shard, size in enumerate(SIZES) for i in range(size)]


def test_no_more_than_a_pool_of_blocks_is_open_at_once():
    order = numbers(shuffled(blocks(SIZES, 4), 3, seed=5, epoch=0))
    for start in range(0, len(order), 12):
        assert len({(shard, i // 4) for shard, i in order[start : start + 12]}) <= 6


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_processes_share_each_batch_equally(world_size: int):
    def order():
        return shuffled(blocks(SIZES, 4), 3, seed=5, epoch=0)

    shares = [[numbers(batch) for batch in batches(order(), 8, rank=rank, world_size=world_size)] for rank in range(world_size)]
    assert {len(share) for share in shares} == {num_batches(sum(SIZES), 8, world_size)}
    assert all(len({len(batch) for batch in step}) == 1 for step in zip(*shares, strict=True))
    whole = [numbers(batch) for batch in batches(order(), 8 * world_size)]
    for step, batch in zip(zip(*shares, strict=True), whole, strict=True):
        assert sorted({number for share in step for number in share}) == sorted(batch)


def test_a_loader_goes_on_where_its_consumer_stopped():
    def loader() -> BatchLoader:
        made = BatchLoader(numbers, SIZES, batch_size=8, seed=1)
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


def test_read_ahead_keeps_order_and_hands_errors_over():
    def source():
        yield from range(10)
        raise ValueError("the shard is broken")

    got = []
    with pytest.raises(ValueError, match="the shard is broken"):
        got.extend(iter_into(read_ahead(source(), 3), got))
    assert got == list(range(10))


def iter_into(source, got):
    for element in source:
        got.append(element)
    return []


def test_only_drafted_positions_are_kept_and_timings_agree(data_dir: Path, tmp_path: Path):
    data = feature_data(make_config(data_dir, tmp_path, timings=("fed", "drawn")))
    batch = next(iter(data.loader("dev")))
    stored = load_file(features_path(data_dir, "fed", "dev", 0))
    count = int(stored["row_offsets"][8])
    kept = stored["is_drafted"][:count]
    assert torch.equal(batch["fed"].hidden, stored["hidden"][:count][kept])
    assert torch.equal(batch["fed"].scalars["log_token_prob"], stored["log_token_prob"][:count][kept])
    assert (
        int(batch["fed"].row_lengths.sum())
        == len(batch["fed"].hidden)
        < len(batch["drawn"].hidden)
        == int(batch["drawn"].row_lengths.sum())
    )


def rewrite(path: Path, **changes: torch.Tensor) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()} | changes
    write_shard(path, save(tensors), rows=len(tensors["row_offsets"]) - 1, tokens=int(tensors["row_offsets"][-1]))


def break_data(directory: Path, how: str) -> None:
    path = features_path(directory, "fed", "train", 1)
    stored = load_file(path)
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "corrupted":
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    elif how == "no sidecar":
        sidecar_path(path).unlink()
    elif how == "nan":
        rewrite(path, hidden=stored["hidden"].clone().index_fill_(0, torch.tensor([50]), torch.nan))
    elif how == "probability":
        rewrite(path, acceptance_prob=stored["acceptance_prob"] + 1)
    elif how == "width":
        rewrite(path, hidden=stored["hidden"][:, :8].contiguous())
    elif how == "empty":
        for index in range(2):
            empty = {name: tensor[:0].clone() for name, tensor in stored.items()} | {"row_offsets": torch.zeros(1, dtype=torch.int64)}
            write_shard(features_path(directory, "fed", "train", index), save(empty), rows=0, tokens=0)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("truncated", "train shard 1"),
        ("corrupted", "sha256"),
        ("no sidecar", "train shard 1"),
        ("nan", r"train-00001.*hidden of row \d+ is NaN"),
        ("probability", r"acceptance_prob of row 0 is outside"),
        ("width", "width 8"),
        ("empty", "no token at all"),
    ],
)
def test_broken_features_are_refused_and_named(tmp_path: Path, how: str, says: str):
    data_dir = write_data(tmp_path / "data")
    break_data(data_dir, how)
    with pytest.raises(ValueError, match=says):
        list(feature_data(make_config(data_dir, tmp_path)).loader("train"))


def test_data_of_another_draft_or_sampling_is_refused(data_dir: Path, tmp_path: Path):
    config = make_config(data_dir, tmp_path)
    text = (data_dir / "manifest.json").read_text()
    for old, new, says in (("made-up/draft", "other/draft", "draft name"), ('"temperature": 1.0', '"temperature": 0.5', "sampling")):
        changed = tmp_path / "changed"
        shutil.copytree(data_dir, changed, dirs_exist_ok=True)
        (changed / "manifest.json").write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=says):
            feature_data(make_config(changed, tmp_path))
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        feature_data(make_config(tmp_path / "nowhere", tmp_path))
    assert config.data.dir == str(data_dir)


def test_num_train_takes_the_first_responses(data_dir: Path, tmp_path: Path):
    assert feature_data(make_config(data_dir, tmp_path, num_train=50)).num_responses("train") == 50
    with pytest.raises(ValueError, match="num_train is 65"):
        feature_data(make_config(data_dir, tmp_path, num_train=65)).num_responses("train")
