"""Imports of the official SpecDec++ data: rows, labels by the draft, and heads that train on them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from configs.schema import Config, HeadsConfig
from data_gen.official import _parse, import_
from data_gen.pipeline.command import make
from data_gen.store.rows import read_rows
from heads.training.command import train
from store.shards import list_shards, shard_path
from tests.data_gen.on_disk import rows_of, with_data

LOGS = {"log_p_7b": "log_q", "log_p_70b": "log_p"}
COLUMNS = {"prefix": "prompt_ids", "tokens": "response_ids", "draft": "draft_ids"} | LOGS
"""Name in the official JSON -> column of our rows."""


def item(**changes: str) -> dict[str, str]:
    lists = {"prefix": [1, 5], "tokens": [7, 8, 9], "draft": [7, 3, 9]}
    lists |= {"log_p_7b": [-0.5, -1.0, -2.0], "log_p_70b": [-1.5, -0.25, -2.0]}
    texts = {name: str(values) for name, values in lists.items()}
    return {"prompt": "[INST] hi [/INST]", "continuation": "x"} | texts | changes


def test_an_object_of_the_official_json_becomes_a_row():
    for log_p, first in (("[-1.5, -0.25, -2.0]", math.exp(-1.0)), ("[-inf, -0.25, -2.0]", 0.0)):
        exchange, columns = _parse(item(log_p_70b=log_p), "train-0", where="")
        assert exchange[:5] == ("train-0", "[INST] hi [/INST]", [1, 5], [7, 8, 9], None)
        assert columns["draft_ids"].tolist() == [7, 3, 9]
        assert columns["acceptance_prob"].tolist() == pytest.approx([first, 1.0, 1.0])


@pytest.mark.parametrize(
    ("items", "complaint"),
    [
        ([item(draft="[7, 3]")], r"item 0: expected one number per response token, got lengths"),
        ([item(), item(draft="7, 3")], r"item 1: expected draft to be a list of numbers written as a string"),
        ([{"prompt": "x"}], r"item 0: expected prefix to be a list of token ids, got None"),
        ({"a": 1}, r"expected a list of objects, got dict"),
        ([item(prefix="[1, 31999]")], r"train-0 has token ids up to 31999, but pair\.draft's are 0 to 259"),
    ],
)
def test_an_official_json_that_is_malformed_or_of_another_vocabulary_is_refused(toy_config, tmp_path, items, complaint):
    path = tmp_path / "train.json"
    path.write_text(json.dumps(items, indent=2))
    with pytest.raises(ValueError, match=complaint):
        import_(toy_config, file=str(path))
    assert not Path(toy_config.data.dir).exists()


def as_official(config: Config, split: str, folder: Path) -> str:
    """The rows of one split as the official code would have written them."""
    items = [
        {"prompt": row["prompt"], "continuation": ""} | {ours: str(row[theirs]) for ours, theirs in COLUMNS.items()}
        for row in rows_of(config, split)
    ]
    path = folder / f"{split}.json"
    path.write_text(json.dumps(items))
    return str(path)


@pytest.fixture
def imports(toy_config, tmp_path) -> tuple[Config, Config, dict[str, str]]:
    """A run of our own, the config of an import of it, and the official files of its splits."""
    sizes = {"split_weights": (2, 1, 1), "num_train": 6, "num_dev": 3, "num_test": 3}
    own = with_data(toy_config, mixing_ratio=0.4, **sizes)
    make(own)
    files = {split: as_official(own, split, tmp_path) for split in ("train", "dev", "test")}
    return own, with_data(own, dir=str(tmp_path / "imported")), files


def test_imported_labels_are_those_of_a_run_of_our_own(imports):
    """Rows are float16, and acceptance_rate needs the target. A stopped import goes on; another file is refused."""
    own, config, files = imports
    for split, file in files.items():
        import_(config, file=file, split=split)
        for path in list_shards(own.data.dir, split):
            ours, theirs = (load_file(Path(c.data.dir, "labels", f"{path.stem}.safetensors")) for c in (own, config))
            ours.pop("acceptance_rate", None)
            assert ours.keys() == theirs.keys()
            for key, values in ours.items():
                rtol = {"log_q": 1e-3, "acceptance_prob": 1e-2}.get(key, 1e-4)
                torch.testing.assert_close(
                    theirs[key], values, rtol=rtol, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}"
                )
            row = read_rows(Path(config.data.dir, "rows", path.name)).to_pylist()[0]
            assert row["entropy"]
            assert row["from_target"]
            assert row["acceptance_rate"] is row["cross_entropy"] is None
    whole = {path: path.read_bytes() for path in Path(config.data.dir).rglob("train-0*")}
    shard_path(config.data.dir, "rows", "train", 1).unlink()
    import_(config, file=files["train"])
    assert {path: path.read_bytes() for path in whole} == whole
    with pytest.raises(ValueError, match=r"holds train rows of another file \(train\.json"):
        import_(config, file=files["dev"])


@pytest.mark.slow
@pytest.mark.parametrize("states", ["cached", "online"])
@pytest.mark.filterwarnings("ignore")
def test_heads_train_on_imported_data(imports, tmp_path, states):
    _, config, files = imports
    for split, file in files.items():
        import_(config, file=file, split=split)
    grid = {"depths": (1,), "timings": ("fed", "drawn"), "embeddings": (False,), "dropout": (0.0,)}
    heads = HeadsConfig(dir=str(tmp_path / "run"), batch_size=2, states=states, **grid)
    trainer = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    config = replace(config, heads=heads, trainer=trainer)
    results = train(config)
    assert {name.split("-")[0] for name in results["test"]["heads"]} == {"fed+s", "drawn+s"}
    assert all(math.isfinite(head["calibrated_kl"]) for head in results["dev"]["heads"].values())
    prefix = replace(heads, dir=str(tmp_path / "prefix"), timings=("drawn", "prefix"))
    with pytest.raises(ValueError, match=r"has no acceptance_rate.* or remove prefix from heads\.timings"):
        train(replace(config, heads=prefix))


def test_what_the_draft_or_the_labels_do_not_fit_is_refused(imports, tmp_path):
    _, config, files = imports
    pair, swapped = config.pair, tmp_path / "swapped.json"
    text, keys = Path(files["train"]).read_text(), ("log_p_7b", "log_p_70b")
    swapped.write_text(text.replace(keys[0], "x").replace(keys[1], keys[0]).replace('"x"', f'"{keys[1]}"'))
    warm = replace(pair.sampling, top_k=50)
    refusals = (
        ({"draft": pair.target}, {}, r"log q of the draft at .* differs from log_p_7b of the file by .* nats"),
        ({}, {"file": str(swapped)}, "set pair.draft to the model that made the file"),
        ({"sampling": warm}, {}, r"temperature 1 without truncation; pass --pair\.sampling\.temperature 1"),
    )
    for changes, flags, complaint in refusals:
        with pytest.raises(ValueError, match=complaint):
            import_(replace(config, pair=replace(pair, **changes)), **{"file": files["train"]} | flags)
        assert not [path for path in Path(config.data.dir).rglob("*") if path.is_file()]
    import_(config, file=files["train"])
