"""Requests of the next shards join the running batch: files keep their bytes, no shard is claimed before a row is free
for it, and the batch stays full.
"""

import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedModel

from configs.schema import Config, ModelSource
from data_gen.pipeline.command import make
from data_gen.responses import target as sources
from data_gen.responses.exchange import Exchange, Problem, Request, Turns, ask
from data_gen.responses.target import TargetInProcess
from lm import Sampling
from lm.draws import uniforms
from tests.data_gen.on_disk import files_of, with_data, with_prompts
from tests.data_gen.pipeline.test_resume import make_and_die
from tests.data_gen.processes import at_once
from tests.toys.small_pair import SIZES

MODELS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "sliding": Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=4),
}
LENGTHS = ((2, 3, 2, 3), (30, 2, 9), (4, 4), (17, 3, 3), (40,))
"""Prompt lengths by shard. Those of later shards are longer than everything that runs."""
Answers = list[Exchange | Problem]


@pytest.fixture
def staged(toy_config: Config, tmp_path) -> Config:
    """The toy run in sequential mode with two conversations, of a target that ends responses after 1 to 10 tokens."""
    shutil.copytree(toy_config.pair.target.path, tmp_path / "target")
    ends = {"eos_token_id": list(range(1, 60)), "pad_token_id": 0}
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(ends))
    pair = replace(toy_config.pair, target=ModelSource(path=str(tmp_path / "target")))
    config = with_data(replace(toy_config, pair=pair), mode="sequential")
    records = [{"question_id": i, "turns": [f"{'word ' * (i % 4)}{i}"] * (1 + i % 5 // 4)} for i in range(14)]
    return with_prompts(config, tmp_path / "turns.jsonl", records, num_train=14)


def by_shard(config: Config) -> Config:
    """The same data from runs that own one shard each, so that no requests of two shards meet."""
    apart = with_data(config, dir=config.data.dir + "-apart")
    num_shards = -(-config.data.num_train // config.data.rows_per_shard)
    for rank in range(num_shards):
        make(apart, rank=rank, world_size=num_shards)
    return apart


@pytest.mark.parametrize(("batch_size", "rows_per_shard"), [(8, 3), (2, 3), (64, 4), (1, 5), (5, 1)])
def test_files_have_the_bytes_of_runs_whose_shards_do_not_join(staged, batch_size, rows_per_shard):
    config = with_data(staged, batch_size=batch_size, rows_per_shard=rows_per_shard)
    make(config)
    assert files_of(config.data.dir) == files_of(by_shard(config).data.dir)


def test_a_run_needs_fewer_steps_than_its_shards_one_by_one(staged, monkeypatch):
    """Three requests per shard and eight rows: the stage `respond` fills them from three shards."""
    step, num_steps = sources._Batch.step, []

    def counted(self, *, is_last: bool):
        num_steps.append(1)
        return step(self, is_last=is_last)

    monkeypatch.setattr(sources._Batch, "step", counted)
    config = with_data(staged, batch_size=8)
    make(config, stages="respond")
    num_joined = len(num_steps)
    by_shard(config)
    assert num_joined < 0.75 * (len(num_steps) - num_joined)


def test_a_run_that_is_killed_while_shards_are_open_loses_those_alone(staged):
    config = with_data(staged, batch_size=8)
    for write in (3, 5, 4):  # the first writes of a run: manifest, stage file, its sidecar
        assert at_once(lambda write=write: make_and_die(config, write, stages="respond")) == [-signal.SIGKILL]
    make(config)
    assert files_of(config.data.dir) == files_of(by_shard(config).data.dir)


def test_out_of_memory_starts_the_open_shards_again_with_half_the_batch(staged, monkeypatch, capsys):
    def draw_or_fail(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        if len(probs) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return draw(probs, uniform)

    draw = sources.draw
    config = with_data(staged, batch_size=8)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "draw", draw_or_fail)
        make(config, stages="respond")
    said = capsys.readouterr().err
    for size in (8, 4):
        assert f"respond: out of memory at train-00000 with data.batch_size {size}; continuing with" in said
    make(config)
    assert files_of(config.data.dir) == files_of(by_shard(config).data.dir)


def silent(count: int) -> None:
    pass


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MODELS[name]).eval()


def source_of(model: PreTrainedModel, **changes: object) -> TargetInProcess:
    settings = {"vocab_size": 20, "eos_ids": frozenset({1, 2}), "max_new_tokens": 12, "batch_size": 4} | changes
    return TargetInProcess(model, Sampling(), **settings)


def one_turn(seed: int, lengths: tuple[int, ...]) -> Turns[Answers]:
    requests = [Request(f"{seed}-{i}", "", [3 + (i + j) % 17 for j in range(n)]) for i, n in enumerate(lengths)]
    return (yield requests, seed)


@pytest.mark.parametrize("batch_size", [2, 4, 8, 64])
@pytest.mark.parametrize("name", MODELS)
def test_a_longer_prompt_joins_a_batch_and_every_response_is_as_if_alone(name, batch_size):
    model = model_of(name)
    source = source_of(model, batch_size=batch_size)
    joined = dict(source.respond_joined([(i, one_turn(i, lengths)) for i, lengths in enumerate(LENGTHS)], silent))
    assert sorted(joined) == list(range(len(LENGTHS)))
    for index, lengths in enumerate(LENGTHS):
        alone = ask(one_turn(index, lengths), source_of(model, batch_size=1), silent)
        assert joined[index] == alone


def test_the_next_shard_is_claimed_only_when_a_row_is_free_for_it():
    """Each of 30 shards has four requests, and a batch has eight rows."""
    claimed: list[int] = []

    def shards() -> Iterator[tuple[int, Turns[Answers]]]:
        for index in range(30):
            claimed.append(index)
            yield index, one_turn(index, (3, 3, 3, 3))

    source = source_of(model_of("llama"), batch_size=8, eos_ids=frozenset())
    for num_done, (index, _) in enumerate(source.respond_joined(shards(), silent)):
        assert index == num_done
        assert len(claimed) <= num_done + 3


def rows_in_flight(size: int, lengths: range, *, num_shards: int, is_joined: bool) -> float:
    """Mean number of sequences per forward of a batch of `size`, for shards of `size` responses of these lengths."""

    def scripted(seed: int, *shape: int) -> torch.Tensor:
        """Uniforms that draw token 10 until the end, then end-of-sequence 1, from 20 equal probabilities."""
        order = uniforms(seed, shape[0])
        ends = lengths.start + (order * len(lengths)).long()
        tokens = torch.where(torch.arange(1, shape[1] + 1) == ends[:, None], 1, 10)
        num_tokens.append(int(ends.sum()))
        return (tokens.double() + 0.5) / 20

    num_tokens: list[int] = []
    num_steps: list[int] = []
    model = model_of("llama")
    model.model.embed_tokens.register_forward_hook(lambda module, ids, output: num_steps.append(ids[0].shape[1] == 1))
    limit = lengths.stop - 1
    source = source_of(model, eos_ids=frozenset({1}), max_new_tokens=limit, batch_size=size)
    source = replace(source, sampling=Sampling(temperature=1e9))
    shards = [(index, one_turn(index, (2,) * size)) for index in range(num_shards)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "uniforms", scripted)
        if is_joined:
            done = list(source.respond_joined(shards, silent))
        else:
            done = [(index, ask(turns, source, silent)) for index, turns in shards]
    assert len(done) == num_shards
    num_first = num_shards * size  # drawn with the forward that reads the prompt
    return (sum(num_tokens) - num_first) / sum(num_steps)


@pytest.mark.parametrize(
    ("size", "lengths"), [(32, range(2, 33)), pytest.param(256, range(16, 257), marks=pytest.mark.slow)]
)
def test_a_large_batch_stays_full_at_the_end_of_a_shard(size, lengths):
    apart = rows_in_flight(size, lengths, num_shards=8, is_joined=False)
    joined = rows_in_flight(size, lengths, num_shards=8, is_joined=True)
    print(f"batch {size}, lengths {lengths}: {apart:.0f} rows in flight shard by shard, {joined:.0f} joined")
    assert apart < 0.6 * size
    assert joined > 0.8 * size  # 8 shards: the end of the last one counts
