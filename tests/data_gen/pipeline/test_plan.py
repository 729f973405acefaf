"""`plan`: what a run then takes; its arithmetic at the sizes of the papers' pairs, from config.json alone; and memory
that stages free.
"""

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.command import config_of, parser_for
from configs.schema import Config
from configs.shipped import NAMES
from data_gen.pipeline import checks, memory
from data_gen.pipeline import plan as planning
from data_gen.pipeline.command import make
from data_gen.pipeline.plan import plan
from data_gen.pipeline.worker import Worker
from data_gen.store.rows import read_rows
from evaluation.costs.init import head_weights
from evaluation.costs.init import plan as plan_all
from heads.grid import stacks
from heads.training.stack import HeadStack
from lm import load_model
from store.shards import read_sidecar, shard_path
from tests.data_gen.on_disk import hidden_states_of, with_data

GB, ROOT = 1e9, Path(__file__).parents[3]
NAMED = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
NAMED += ("intermediate_size", "vocab_size")
PUBLISHED = {
    "Llama-2-70b-chat-hf": ("llama", 8192, 80, 64, 8, 28672, 32000),
    "Llama-2-7b-chat-hf": ("llama", 4096, 32, 32, 32, 11008, 32000),
    "llama-68m": ("llama", 768, 2, 12, 12, 3072, 32000),
    "Meta-Llama-3-70B-Instruct": ("llama", 8192, 80, 64, 8, 28672, 128256),
    "Meta-Llama-3-8B-Instruct": ("llama", 4096, 32, 32, 8, 14336, 128256),
    "pythia-6.9b": ("gpt_neox", 4096, 32, 32, None, 16384, 50432),
    "pythia-160m": ("gpt_neox", 768, 12, 12, None, 3072, 50304),
    "Qwen2.5-14B-Instruct": ("qwen2", 5120, 48, 40, 8, 13824, 152064),
    "Qwen2.5-7B-Instruct": ("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5-0.5B-Instruct": ("qwen2", 896, 24, 14, 2, 4864, 151936),
    "Qwen2.5-Coder-1.5B-Instruct": ("qwen2", 1536, 28, 12, 2, 8960, 151936),
    "Qwen2.5-Coder-0.5B-Instruct": ("qwen2", 896, 24, 14, 2, 4864, 151936),
    "SmolLM2-1.7B-Instruct": ("llama", 2048, 24, 32, 32, 8192, 49152),
    "SmolLM2-135M-Instruct": ("llama", 576, 30, 9, 3, 1536, 49152),
}


def shipped(name: str, folder: Path) -> Config:
    """A shipped experiment, its models replaced by folders that hold a config.json and nothing else."""
    parser, models = parser_for(plan), {}
    config = config_of(parser, parser.parse_args(["--config", name]))
    for role in ("target", "draft", "micro"):
        source = getattr(config.pair, role)
        if source is not None and Path(source.path).name in PUBLISHED:
            path = folder / Path(source.path).name
            path.mkdir()
            values = {key: value for key, value in zip(NAMED, PUBLISHED[path.name], strict=True) if value is not None}
            values["tie_word_embeddings"] = any(name in path.name for name in ("SmolLM2", "0.5B", "Coder"))
            (path / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 4096}))
            models[role] = replace(source, path=str(path))
    return replace(config, pair=replace(config.pair, **models), data=replace(config.data, dir=str(folder / "data")))


def misfits(config: Config, gpus: str | None, num_gpus: int = 1) -> list[str]:
    """Each stage that does not fit the GPUs."""
    return [problem for need in memory.needs(config, num_gpus) if (problem := need.problem(memory.gpus_of(gpus)))]


@pytest.mark.parametrize("name", NAMES)
def test_each_shipped_experiment_fits_its_gpus_and_the_table_of_the_page_is_what_plan_calculates(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: (_ for _ in ()).throw(OSError("no look-up")))
    config = shipped(name, tmp_path)
    assert (config.pair.gpus is None) == (name in ("tiny", "smollm2"))
    assert misfits(config, config.pair.gpus) == []
    totals = plan(config, sample=0)
    num_gpus = int(config.pair.gpus.partition("x")[0]) if config.pair.gpus else 1
    needs = {
        stage.partition(",")[0]: size / (1 if stage.endswith("on each GPU") else num_gpus) / GB
        for stage, size in totals["memory_bytes"].items()
    }
    stage = max(needs, key=lambda stage: round(needs[stage], 1), default="")
    cells = (name, config.pair.gpus or "none", f"{totals['rows']:,}", f"{totals['response_tokens']:,}")
    memory_gb = f"{needs[stage]:,.1f}" if stage else "not estimated"
    sizes = [f"{totals[name] / GB:,.2f}" for name in ("disk_bytes", "state_bytes")]
    line = " | ".join((*cells, *sizes, stage, memory_gb))
    assert f"| {line} |\n" in (ROOT / "docs" / "large-models.md").read_text()


def test_the_arithmetic_of_llama2_is_that_of_its_published_sizes_and_quantised_it_fits_one_gpu(tmp_path: Path):
    config = shipped("llama2-7b-70b", tmp_path)
    target, draft = memory.size_of(config.pair.target), memory.size_of(config.pair.draft)
    assert target.weights == pytest.approx(138 * GB, rel=0.01)
    assert draft.weights == pytest.approx(13.5 * GB, rel=0.01)
    assert 64 * 1024 * target.kv_per_position == pytest.approx(21.5 * GB, rel=0.01)
    quantised = replace(config.pair.target, quantization="4bit")
    assert memory.size_of(quantised).weights == pytest.approx((2 * 0.524 + 136.9 * (0.5 + 1 / 16) / 2) * GB, rel=0.01)
    assert misfits(replace(config, pair=replace(config.pair, target=quantised)), "1x80") == []


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_named_with_one_that_does(tmp_path: Path, capsys: pytest.CaptureFixture):
    too_large = with_data(shipped("llama2-7b-70b", tmp_path), mode="together", batch_size=64)
    [problem, *_] = misfits(too_large, "2x80")
    assert "responses takes 1" in problem
    fits = int(problem.rsplit(" ", 1)[1])
    assert 1 <= fits < 64
    assert not any(line.startswith("responses") for line in misfits(with_data(too_large, batch_size=fits), "2x80"))
    plan(too_large, sample=0)
    printed = capsys.readouterr().out
    assert "target weights 138.0" in printed
    assert f"warning: {problem}" in printed
    with pytest.raises(ValueError, match="responses takes"):
        plan(too_large)
    assert "use more or larger GPUs" in misfits(too_large, "1x80")[0]


def test_a_plan_says_what_bf16_saves_of_a_large_step_unless_the_run_has_it(tmp_path: Path, capsys):
    config = shipped("llama2-7b-70b", tmp_path)
    config = replace(config, data=replace(config.data, prompts="absent.jsonl", num_train=40000))
    for trainer, is_shown in (({}, True), ({"precision": "32-true"}, True), ({"precision": "bf16-mixed"}, False)):
        plan_all(replace(config, trainer=trainer), sample=0)
        shown = capsys.readouterr().out
        assert (
            "train: up to 66 TFLOP per step; on GPUs, --trainer.precision bf16-mixed would save" in shown
        ) == is_shown


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"rows_per_shard": 8, "batch_size": 8}, "data.mode: together"),
        ({"rows_per_shard": 8, "batch_size": 2}, None),
        ({"rows_per_shard": 12, "batch_size": 12}, None),  # all of one split
        ({"rows_per_shard": 8, "batch_size": 8, "source": "server"}, None),
        ({"rows_per_shard": 8, "batch_size": 8, "mode": "sequential"}, None),
        ({"rows_per_shard": 8, "batch_size": 8, "mode": "sequential", "engine": "ray"}, "data.engine: ray"),
    ],
)
def test_a_plan_notes_that_large_batches_drain_at_the_end_of_small_shards(
    settings, cause, toy_config, capsys, monkeypatch
):
    monkeypatch.setattr(checks, "_NEEDED", ())  # a plan runs no actor, so ray need not be installed
    plan(with_data(toy_config, num_train=12, num_dev=0, num_test=0, split_weights=(1, 0, 0), **settings), sample=0)
    note = f"note: with {cause} a batch drains at the end of each shard, so 8 sequences (data.batch_size) with 8 rows"
    shown = capsys.readouterr().out
    assert note in shown if cause else "drains" not in shown


def test_slices_add_up_on_each_gpu(tmp_path: Path):
    config = with_data(shipped("llama2-7b-70b", tmp_path), batch_size=256)
    sliced = replace(config.pair.target, device_map=None, tp_plan="auto")
    config = replace(config, pair=replace(config.pair, target=sliced))
    whole, part = memory.size_of(sliced), memory.size_of(sliced, 8)
    assert 8 * part.weights - 7 * 2 * whole.vocab_size * whole.hidden_size == pytest.approx(whole.weights)
    assert 8 * part.kv_per_position == whole.kv_per_position
    responses, *_, training, decoding = memory.needs(config, 8)
    assert (responses.stage, responses.is_per_gpu) == ("responses, on each GPU", True)
    assert (training.is_per_gpu, decoding.is_per_gpu) == (True, False)
    assert responses.total == pytest.approx(40.1 * GB, rel=0.01)
    assert (misfits(config, "8x80", 8), len(misfits(config, "8x80", 2))) == ([], 2)
    with pytest.raises(ValueError, match="num_attention_heads 64 is no multiple of 3"):
        memory.needs(config, 3)


def test_a_sample_of_a_slow_pair_is_cut_to_its_seconds(toy_config, monkeypatch, capsys):
    """A clock on which each token of a response takes a second; 32 prompts of 10 tokens would take five minutes."""
    clock, made = SimpleNamespace(now_s=0.0), Worker.make

    def timed(worker, spec, progress):
        made(worker, spec, progress)
        rows = read_rows(shard_path(worker.data.dir, "rows", spec.split, spec.index)).to_pylist()
        clock.now_s += sum(len(row["response_ids"]) for row in rows)

    monkeypatch.setattr(Worker, "make", timed)
    clocks = dict.fromkeys(("perf_counter", "monotonic"), lambda: clock.now_s)
    monkeypatch.setattr(planning, "time", SimpleNamespace(**clocks))
    totals = planning.plan(with_data(toy_config, rows_per_shard=256), sample=8)
    assert clock.now_s < 3 * planning._BUDGET_S
    assert totals["is_cut"]
    assert totals["time_s"] == pytest.approx(totals["response_tokens"], rel=0.01)
    assert "estimated from 4 sample prompts" in capsys.readouterr().out
    assert planning.shard_size(toy_config.data, {"time_s": 1200 * 12, "rows": 12}) == 1
    assert planning.shard_size(replace(toy_config.data, rows_per_shard=256), {"time_s": 1e5, "rows": 1000}) == 4
    assert planning.shard_size(toy_config.data, {"time_s": 5.0, "rows": 12}) is None


def test_weights_of_heads_are_those_that_train(toy_config):
    heads = replace(toy_config.heads, normalised=(False, True), depths=(0, 2))
    trained = [HeadStack(shape, heads.reject_weights, rate, hidden_size=8, seed=0) for shape, rate in stacks(heads)]
    num_weights = sum(parameter.numel() for stack in trained for parameter in stack.parameters())
    assert head_weights(replace(toy_config, heads=heads)) == num_weights


@pytest.mark.parametrize("mode", ["together", "sequential"])
def test_no_stage_holds_the_models_of_the_one_before(toy_config, monkeypatch: pytest.MonkeyPatch, mode: str):
    seen, start = list[list[weakref.ref]](), Worker.__init__

    def remember(source, **settings):
        assert all(model() is None for earlier in seen if earlier is not seen[-1] for model in earlier)
        model = load_model(source, **settings)
        seen[-1].append(weakref.ref(model))
        return model

    def fresh(self: Worker, job) -> None:
        seen.append([])
        start(self, job)

    monkeypatch.setattr(Worker, "__init__", fresh)
    monkeypatch.setattr("data_gen.pipeline.worker.load_model", remember)
    config = with_data(toy_config, mode=mode, num_test=0)
    gc.disable()  # what goes, goes because the stage lets it go
    try:
        plan(config, sample=4)
        make(config)
        assert all(model() is None for models in seen for model in models)
    finally:
        gc.enable()


def test_a_plan_on_every_prompt_is_what_the_run_then_takes(toy_config):
    config = with_data(toy_config, num_test=0, rows_per_shard=8)
    expected = plan(config, sample=8)
    make(config)
    facts = read_sidecar(shard_path(config.data.dir, "rows", "train", 0))
    assert expected["rows"] == facts["rows"] == 8
    assert expected["response_tokens"] == pytest.approx(facts["tokens"], rel=0.25)  # other seeds, so other lengths
    real = sum(path.stat().st_size for path in Path(config.data.dir).rglob("train-*") if path.suffix != ".json")
    assert expected["disk_bytes"] == pytest.approx(real, rel=0.1)
    assert (
        expected["draft_sequence_forwards"] == expected["target_sequence_forwards"] == expected["state_forwards"] == 8
    )
    assert expected["state_target_forwards"] == 0
    hidden = sum(states.nbytes for states in hidden_states_of(config, "train", "drawn"))
    assert expected["state_bytes"] == pytest.approx(hidden, rel=0.25)
    assert expected["time_s"] > 0
    assert plan(config, sample=8) == {"rows": 0}


def test_a_plan_without_a_sample_bounds_the_disk_warns_when_it_is_too_small_and_says_whose_gpus_it_reckons_with(
    toy_config, capsys, monkeypatch
):
    config = with_data(toy_config, num_test=0)
    bound, shown = plan(config, sample=0), capsys.readouterr().out
    assert (bound["time_s"], bound["response_tokens"]) == (None, 80)
    assert "warning" not in shown
    assert "memory, compared with the GPUs of this machine:\n" in shown
    monkeypatch.setattr("data_gen.pipeline.plan.shutil.disk_usage", lambda folder: SimpleNamespace(free=10))
    plan(replace(config, pair=replace(config.pair, gpus="2x80")), sample=0)
    shown = capsys.readouterr().out
    assert "warning: not enough free disk space" in shown
    assert "memory, compared with pair.gpus 2x80 (null: the GPUs of this machine):\n" in shown
    for written in ("2 of 80", "0x80", "2x1", "x80"):
        with pytest.raises(ValueError, match=r"pair\.gpus is"):
            memory.gpus_of(written)
