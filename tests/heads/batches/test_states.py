"""Hidden states follow from rows and labels: a cache that is filled on demand, by any number of processes and after any
end to the same bytes, and never with states of other rows; or states of each batch, which train the same heads. Neither
runs the target.
"""

import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaForCausalLM, LlamaModel

from configs.load import yaml_of
from configs.schema import Config, DataConfig, HeadsConfig, ModelSource, PairConfig
from data_gen.labels.states import DraftStates, Text
from data_gen.pipeline.command import make
from data_gen.pipeline.share import Share
from heads.batches.module import FeatureData
from heads.command import export
from heads.training.command import train
from store.shards import read_sidecar, sidecar_path, write_shard
from tests.data_gen.on_disk import files_of, flip
from tests.data_gen.processes import at_once
from tests.toys.devices import FakeDevices, device_of, put
from tests.toys.killed import die_in_write
from tests.toys.made_up import ROOT, environment
from tests.toys.saved_pair import save_toy
from tests.toys.small_pair import llama

TARGET_WIDTH = 16
TINY = {name: ModelSource(path=str(ROOT / "checkpoints" / "tiny" / name)) for name in ("target", "eagle")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Data of a toy pair: rows and labels alone."""
    folder = tmp_path_factory.mktemp("states")
    save_toy(folder / "target", hidden_size=TARGET_WIDTH, seed=1)
    save_toy(folder / "draft", hidden_size=8, seed=2, scale=0.3)
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say it {'again ' * (i % 5)}{i}"}) + "\n" for i in range(14)))
    sizes = {"num_train": 8, "num_dev": 3, "num_test": 0, "max_prompt_tokens": 60, "max_new_tokens": 10}
    data = DataConfig(dir=str(folder / "data"), prompts=str(path), rows_per_shard=3, batch_size=2, **sizes)
    pair = PairConfig(
        target=ModelSource(path=str(folder / "target")), draft=ModelSource(path=str(folder / "draft")), num_threads=1
    )
    heads = HeadsConfig(depths=(0, 1), batch_size=4, learning_rate=1e-2, timings=("fed", "drawn"), dropout=(0.0,))
    quiet = {"max_epochs": 2, "enable_progress_bar": False, "logger": False, "accelerator": "cpu"}
    config = Config(pair=pair, data=data, heads=heads, trainer=quiet)
    make(config)
    assert not (folder / "data" / "states").exists()
    return config


@pytest.fixture
def config(whole: Config, tmp_path: Path) -> Config:
    """A copy of the data, for one test."""
    shutil.copytree(whole.data.dir, tmp_path / "data")
    data, heads = replace(whole.data, dir=str(tmp_path / "data")), replace(whole.heads, dir=str(tmp_path / "run"))
    return replace(whole, data=data, heads=heads)


def with_heads(config: Config, **changes: object) -> Config:
    return replace(config, heads=replace(config.heads, **changes))  # type: ignore[arg-type]


def fill(config: Config) -> dict[str, bytes]:
    """The files of the cache, once one process has filled it."""
    FeatureData(config.data, config.heads, pair=config.pair).setup()
    return files_of(Path(config.data.dir, "states"))


@contextmanager
def forwards() -> Iterator[Counter[int]]:
    """Forwards of models by their width, while the block runs."""
    counts: Counter[int] = Counter()

    def count(module: torch.nn.Module, _: object) -> None:
        if isinstance(module, LlamaModel):
            counts[module.config.hidden_size] += 1

    hook = register_module_forward_pre_hook(count)
    try:
        yield counts
    finally:
        hook.remove()


def test_a_second_timing_another_layer_and_another_dtype_need_no_forward_of_the_target(config: Config):
    rows = files_of(config.data.dir)
    timings = {"timings": ("drawn",)}, {"timings": ("fed",)}, {"layer": 1}, {"state_dtype": "float32"}
    for number, changes in enumerate(timings):
        with forwards() as counts:
            train(with_heads(config, dir=f"{config.heads.dir}-{number}", **changes))
        assert counts[TARGET_WIDTH] == 0 < counts[8]
        with forwards() as counts:
            train(with_heads(config, dir=f"{config.heads.dir}-{number}-again", **changes))
        assert counts == {}, "the cache has them"
    after = files_of(config.data.dir)
    assert {name: after[name] for name in rows} == rows
    folders = {path.name for path in Path(config.data.dir, "states").iterdir()}
    assert folders == {"drawn", "fed", "drawn-layer1", "fed-layer1"}


def test_fed_states_are_those_after_each_token_of_the_mixed_sequence(config: Config):
    """In a batch, where shorter texts are padded, and alone."""
    draft = LlamaForCausalLM.from_pretrained(config.pair.draft.path)
    prompt, expected = [2, 40], []
    for mixed in ([41, 50, 43, 44], [45, 60]):
        expected.append(draft.model(torch.tensor([prompt + mixed])).last_hidden_state[0, 2:].detach())
    ends = torch.tensor([4]), torch.tensor([2])
    texts = [
        Text(
            prompt, [41, 42, 43, 44], torch.tensor([41, 50, 51, 52]), torch.tensor([True, True, False, False]), ends[0]
        ),
        Text(prompt, [45, 46], torch.tensor([47, 60]), torch.tensor([False, True]), ends[1]),
    ]
    torch.testing.assert_close(DraftStates(draft)(texts, "fed"), torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_drawn_states_are_those_that_the_tokens_were_drawn_from(config: Config):
    draft = LlamaForCausalLM.from_pretrained(config.pair.draft.path)
    texts = [Text([2, 40], [41, 42], torch.tensor([50, 51]), torch.tensor([True, True]), torch.tensor([2]))]
    states = DraftStates(draft)(texts, "drawn")
    logits = draft(torch.tensor([[2, 40, 41]])).logits[0, 1:].detach()
    torch.testing.assert_close(draft.lm_head(states).detach(), logits, rtol=1e-5, atol=1e-5)


def test_states_of_a_layer_are_those_after_it_and_heads_that_read_them_are_not_exported(config: Config):
    texts = [
        Text([2, 40], [41, 42, 43], torch.tensor([41, 50, 43]), torch.tensor([False, True, True]), torch.tensor([3]))
    ]
    draft = LlamaForCausalLM.from_pretrained(config.pair.draft.path)
    outputs = draft.model(torch.tensor([[2, 40, 41, 42]]), output_hidden_states=True)
    for layer in (0, 1):
        states = DraftStates(draft, layer=layer)(texts, "drawn")
        torch.testing.assert_close(states, outputs.hidden_states[layer][0, 1:].detach())
    with pytest.raises(ValueError, match=r"heads\.layer is 3, but the draft has 2 layers; choose 0 to 2"):
        fill(with_heads(config, layer=3))
    train(with_heads(config, layer=1))
    with pytest.raises(ValueError, match=r"heads\.layer is 1, .* decoding reads the draft's last hidden state"):
        export(with_heads(config, layer=1), force=True)


def weights_of(config: Config) -> dict[str, torch.Tensor]:
    """The exported weights of all heads that a config trains."""
    train(config)
    paths = export(config, head="all", force=True)
    tensors = {path.name: load_file(path / "model.safetensors") for path in paths}
    return {f"{head} {name}": tensor for head, of_head in tensors.items() for name, tensor in of_head.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("draft", ["draft", pytest.param("eagle", marks=pytest.mark.slow)])
def test_online_states_train_the_heads_of_cached_ones(config: Config, tmp_path: Path, draft: str):
    if draft == "eagle":
        pair = PairConfig(target=TINY["target"], draft=TINY["eagle"], num_threads=1)
        data = replace(config.data, dir=str(tmp_path / "eagle"), draft_length=3)
        config = replace(config, pair=pair, data=data)
        make(config)
    config = with_heads(config, state_dtype="float32")
    cached = weights_of(with_heads(config, dir=str(tmp_path / "cached")))
    shutil.rmtree(Path(config.data.dir, "states"))
    online = weights_of(with_heads(config, dir=str(tmp_path / "online"), states="online"))
    assert not Path(config.data.dir, "states").exists()
    assert cached.keys() == online.keys()
    for name, tensor in cached.items():
        torch.testing.assert_close(online[name], tensor, rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def with_share(config: Config, share: Share) -> Callable[[], None]:
    """Fills one process's share of the cache, as training does."""
    module = FeatureData(config.data, config.heads, pair=config.pair)
    return lambda: module._states.fill([shard for split in module._shards.values() for shard in split], share)


def test_two_processes_fill_the_cache_of_one_and_each_computes_its_share(config: Config):
    once = fill(config)
    shutil.rmtree(Path(config.data.dir, "states"))
    works = [with_share(config, Share(rank, 2, launcher="Lightning")) for rank in range(2)]
    with forwards() as counts:
        assert at_once(*works) == [0, 0]
    assert counts == {}, "the children ran them"
    assert files_of(Path(config.data.dir, "states")) == once
    shutil.rmtree(Path(config.data.dir, "states"))
    with pytest.raises(ValueError, match="is incomplete, because another process failed"):
        with_share(config, Share(1, 2))()
    num_own = len(list(Path(config.data.dir, "states", "drawn").glob("*.safetensors")))
    assert num_own == 2, "shards 1 and 3 of four"


@pytest.mark.slow
def test_processes_of_one_training_share_the_shards(config: Config, tmp_path: Path):
    """Lightning starts the second one."""
    once = fill(config)
    shutil.rmtree(Path(config.data.dir, "states"))
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml_of(config))
    command = [sys.executable, ROOT / "train.py", "--config", path, "--trainer.devices", "2"]
    subprocess.run(list(map(str, command)), cwd=tmp_path, env=environment(), check=True, timeout=300)
    assert files_of(Path(config.data.dir, "states")) == once
    assert Path(config.heads.dir, "val_metrics.json").is_file()


def fill_and_die(config: Config, write: int) -> None:
    die_in_write(write)
    fill(config)


def test_a_cache_whose_filling_is_killed_at_any_write_is_filled_to_the_same_bytes(config: Config):
    once = fill(config)
    shutil.rmtree(Path(config.data.dir, "states"))
    for write in (1, 2, 5, 6, 3):
        assert at_once(lambda write=write: fill_and_die(config, write)) == [-signal.SIGKILL]
    assert fill(config) == once
    assert not list(Path(config.data.dir).rglob(".*.partial"))


def not_a_number(path: Path) -> None:
    facts = read_sidecar(path)
    hidden = load_file(path)["hidden"].index_fill(0, torch.tensor([5]), torch.nan)
    write_shard(path, save({"hidden": hidden}), **{name: facts[name] for name in ("rows", "tokens", "key")})


def narrow(path: Path) -> None:
    facts = read_sidecar(path)
    hidden = load_file(path)["hidden"][:, :4].contiguous()
    write_shard(path, save({"hidden": hidden}), **{name: facts[name] for name in ("rows", "tokens", "key")})


def of_other_rows(path: Path) -> None:
    facts = read_sidecar(path)
    sidecar_path(path).write_text(json.dumps(facts | {"key": facts["key"] | {"rows_sha256": "another"}}))


DAMAGES = {
    "flipped": (
        flip,
        "train-00001.safetensors is corrupted: its sha256 differs from its sidecar's; computing it again",
    ),
    "NaN": (not_a_number, "hidden of token 5 is NaN or infinite; computing it again"),
    "narrow": (narrow, "has hidden states of width 4, but the draft of manifest.json has 8; computing it again"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-9]), ""),
    "no sidecar": (lambda path: sidecar_path(path).unlink(), ""),
    "of other rows": (of_other_rows, "1 shards were computed from other rows, or with another draft or dtype"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_or_stale_shard_of_the_cache_is_computed_again_with_one_line(config: Config, how: str, capsys):
    once = fill(config)
    damage, message = DAMAGES[how]
    damage(Path(config.data.dir, "states", "fed", "train-00001.safetensors"))
    capsys.readouterr()
    assert fill(config) == once
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("states: fed")]
    assert len(lines) == bool(message)
    assert all(message in line for line in lines)


def test_states_of_another_dtype_are_computed_again_and_a_full_cache_needs_no_draft(config: Config, tmp_path: Path):
    halves = fill(config)
    floats = fill(with_heads(config, state_dtype="float32"))
    assert floats.keys() == halves.keys()
    assert all(len(floats[name]) > len(halves[name]) for name in floats if name.endswith("train-00000.safetensors"))
    absent = replace(config.pair.draft, path=str(tmp_path / "absent" / "draft"))
    elsewhere = with_heads(replace(config, pair=replace(config.pair, draft=absent)), state_dtype="float32")
    assert fill(elsewhere) == floats
    with pytest.raises(FileNotFoundError, match="absent/draft"):
        fill(with_heads(elsewhere, state_dtype="bfloat16"))


def test_a_draft_of_the_same_name_with_other_weights_is_refused(config: Config, tmp_path: Path):
    save_toy(tmp_path / "draft", hidden_size=8, seed=3)
    other = replace(config.pair, draft=replace(config.pair.draft, path=str(tmp_path / "draft")))
    with pytest.raises(ValueError, match="made with draft weights"):
        fill(replace(config, pair=other))


def test_data_of_an_earlier_version_is_read_and_its_hidden_states_are_not(config: Config, capsys):
    once = fill(config)
    path = Path(config.data.dir, "manifest.json")
    earlier = json.loads(path.read_text()) | {"features": ["drawn"], "feature_dtype": "bfloat16", "mixes": 1}
    path.write_text(json.dumps(earlier))
    Path(config.data.dir, "states").rename(Path(config.data.dir, "features"))
    make(config)
    assert fill(config) == once
    assert f"nothing reads {config.data.dir}/features" in capsys.readouterr().out


def test_states_of_data_that_grew_are_computed_for_the_rows_that_changed(config: Config):
    once = fill(config)
    grown = replace(config, data=replace(config.data, num_train=10))
    make(grown)
    more = fill(grown)
    changed = {Path(name).name for name in more if more[name] != once.get(name)}
    assert {name for name in changed if name.endswith("safetensors")} == {
        "train-00002.safetensors",
        "train-00003.safetensors",
    }


def test_memory_that_runs_out_halves_the_batch(config: Config, monkeypatch: pytest.MonkeyPatch):
    once = fill(config)
    shutil.rmtree(Path(config.data.dir, "states"))
    sizes, of_texts = list[int](), DraftStates.__call__

    def poor(self, texts, timing):
        sizes.append(len(texts))
        if len(texts) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return of_texts(self, texts, timing)

    monkeypatch.setattr(DraftStates, "__call__", poor)
    assert {Path(name).name for name in fill(config)} == {Path(name).name for name in once}
    assert set(sizes) == {1, 2}


def test_states_of_a_batch_are_on_the_draft_s_device(config: Config):
    torch.manual_seed(0)
    draft = LlamaForCausalLM(llama(vocab_size=300, intermediate_size=24, num_hidden_layers=1)).eval()
    module = FeatureData(config.data, with_heads(config, states="online").heads, pair=config.pair)
    states = module._states
    states.__dict__["source"] = DraftStates(draft)
    shard = module._shards["train"][0]
    expected = states.of_rows(shard.read(0, 2))
    with FakeDevices():
        put(draft, "cuda:0")
        batch = states.of_rows(shard.read(0, 2))
        for timing, features in batch.items():
            assert device_of(features.hidden) == torch.device("cuda:0")
            assert torch.equal(features.hidden.cpu(), expected[timing].hidden)


def test_no_row_is_a_batch_of_no_token(config: Config):
    module = FeatureData(config.data, with_heads(config, states="online").heads, pair=config.pair)
    module.setup()
    rows = {
        timing: [of_timing[0].without_tokens()] for timing, of_timing in module._shards["train"][0].read(0, 1).items()
    }
    for features in module._states.of_rows(rows).values():
        assert (features.hidden.shape, len(features.token), features.row_lengths.tolist()) == ((0, 8), 0, [0] * 0)
