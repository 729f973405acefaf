"""Recording a trace: once, so that everything else can replay it (law 4.10).

Per shard the target answers its prompts in one batch (`data_gen`), then each response becomes a row of the trace. All
chance comes from seeds of (run seed, dataset, split, shard index, draw), so an interrupted run resumes to the same
trace. `decode.draws_per_prompt` decodes every prompt several times, each time with a response and coins of its own;
raising it keeps what is there.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from configs.schema import DataConfig, DecodeConfig
from data_gen.pipeline.growth import cut_shards
from data_gen.prompts.splits import Split
from data_gen.responses.conversation import ShardSpec, ask, row_id
from data_gen.responses.exchange import Exchange
from data_gen.responses.in_process import TargetInProcess
from data_gen.store.manifest import read_manifest, settle
from decode.experiment import Experiment
from evaluation.gain import Splits
from evaluation.traces import disk
from evaluation.traces.chains import ChainRecorder
from evaluation.traces.coupling import Recorder, trace_of
from evaluation.traces.trace import Trace, TraceRow, join_traces
from heads.model.head import AcceptanceHead
from lm import FeatureDraft, Pair, Sampling
from lm.frequencies import refuse_crossing
from lm.uniforms import GENERATOR, seed_of, uniforms
from store.lock import only_writer
from store.progress import Bar
from store.shards import clean_partial, forget_broken, is_whole, problems_of, read_sidecar, write_atomic

SPLITS: tuple[Split, ...] = ("dev", "test")
_DECIDING = ("max_draft_length", "max_new_tokens", "seed", "prompts_per_shard", "trace_hidden", "perfect_head")
"""Settings of `decode` that decide the trace, beside models, sampling and prompts."""
_NUM_SHARDS = "num_shards"
"""Entry of a manifest's `recorded`: shards of each split, by "dataset.split"."""


@dataclass(frozen=True, kw_only=True)
class TraceFolder:
    """A trace on disk, and what it is recorded from."""

    directory: Path
    shards: Mapping[str, Sequence[ShardSpec]]
    """Dataset -> its shards, dev first."""
    models: Mapping[str, Any]
    """target and draft, as `describe_model` describes them."""
    pair: Callable[[], Pair]
    """Called only where something is missing."""
    sampling: Sampling
    heads: Sequence[AcceptanceHead]
    """Scored while recording, where hidden states are not stored."""
    data: DataConfig
    decode: DecodeConfig
    draft_sampling: Sampling | None = None
    """The sampling that the draft draws by, where it is not the target's."""

    def refuse_other(self) -> None:
        """Raise ValueError where a trace of other settings lies here, before something is timed that takes minutes."""
        if not self.decode.as_recorded and (self.directory / "manifest.json").is_file():
            eos_ids = read_manifest(self.directory, command="trace", keys=["eos_ids"])["eos_ids"]
            settle(self.directory, self._manifest(eos_ids), setting="decode.dir")

    def complete(self, splits: Sequence[Split] = SPLITS) -> None:
        """Record the shards of these splits that are missing, or are not what was written; no model is loaded when
        there is none.

        Raises:
            ValueError: a trace of other settings lies there.
        """
        if self.decode.as_recorded:
            return
        asked = [(place, spec) for place, spec in self._every() if place.split in splits]
        present = [path for place, _ in asked for path in place.paths(self.directory) if is_whole(path)]
        is_broken = any(True for _ in problems_of(present, command="trace"))
        if not is_broken and all(place.is_done(self.directory) for place, _ in asked):
            settle(
                self.directory,
                self._manifest(read_manifest(self.directory, command="trace")["eos_ids"]),
                setting="decode.dir",
            )
            return
        with only_writer(self.directory, setting="decode.dir"):
            forget_broken(present)
            self._record_missing([(place, spec) for place, spec in asked if not place.is_done(self.directory)])
            self._write_errors()

    def load(self, dataset: str) -> Splits[Trace]:
        """Both splits of one dataset.

        Raises:
            FileNotFoundError: something was not recorded yet.
            ValueError: a shard is corrupted, or no prompt could be answered.
        """
        return Splits(*(self.load_split(dataset, split) for split in SPLITS))

    def load_split(self, dataset: str, split: Split) -> Trace:
        """One split of one dataset; it raises as `load` does."""
        num = sum(spec.split == split for spec in self.shards[dataset])
        return disk.read_trace(self.directory, dataset, split, num, num_draws=self.decode.draws_per_prompt)

    def _record_missing(self, missing: Sequence[tuple[disk.Place, ShardSpec]]) -> None:
        clean_partial(self.directory, "*/rows", "*/signals")
        total = sum(spec.num_requests for _, spec in missing)
        with Bar(total=total, desc="trace: loading models", unit="prompts") as bar:
            pair = self.pair()
            self._check_frequencies(pair)
            settle(self.directory, self._manifest(sorted(pair.eos_ids)), setting="decode.dir")
            for place, spec in missing:
                bar.set_description(f"trace: {place.dataset} {place.paths(self.directory)[0].stem}")
                self._record(place, spec, pair, bar.update)

    def _check_frequencies(self, pair: Pair) -> None:
        """Raise ValueError where texts of the configured lengths cross a model's change of frequencies: a trace reads
        each text at once.
        """
        data, decode = self.data, self.decode
        longest = data.max_prompt_tokens + decode.max_new_tokens + decode.max_draft_length
        subject = f"data.max_prompt_tokens + decode.max_new_tokens + decode.max_draft_length is {longest}"
        for model in (pair.target, pair.drafting):
            if isinstance(model, PreTrainedModel):
                refuse_crossing(model, 0, longest, subject=subject, remedy="lower one of the three")

    def _every(self) -> Iterator[tuple[disk.Place, ShardSpec]]:
        for draw in range(self.decode.draws_per_prompt):
            for dataset, specs in self.shards.items():
                yield from ((disk.Place(dataset, spec.split, spec.index, draw), spec) for spec in specs)

    def _record(self, place: disk.Place, spec: ShardSpec, pair: Pair, progress: Callable[[int], None]) -> None:
        decode = self.decode
        draw = ("draw", place.draw) if place.draw else ()
        seed = seed_of(decode.seed, "trace", place.dataset, spec.split, spec.index, *draw)
        data = replace(self.data, seed=seed, max_new_tokens=decode.max_new_tokens)
        limits: dict[str, Any] = {"max_new_tokens": decode.max_new_tokens, "batch_size": decode.prompts_per_shard}
        source = TargetInProcess(pair.target, self.sampling, vocab_size=pair.vocab_size, eos_ids=pair.eos_ids, **limits)
        answers = ask(spec, source, tokenizer=pair.tokenizer, data=data, progress=lambda count: None)
        exchanges, problems = answers.exchanges, answers.problems
        progress(spec.num_requests - len(exchanges))
        categories = {
            row_id(prompt, turn): prompt.category for prompt in spec.prompts for turn in range(len(prompt.turns))
        }
        trace = None
        if exchanges:
            trace = record_trace(
                self._recorder(pair),
                exchanges,
                max_new_tokens=decode.max_new_tokens,
                seed=seed_of(seed, "outcomes"),
                categories=[categories[exchange.id] for exchange in exchanges],
                progress=progress,
            )
        if trace is not None and not decode.trace_hidden:
            for head in self.heads:
                trace.logit(head)  # leaves its scores in the trace, which outlive the hidden states
            trace = replace(trace, inputs=None)
        disk.write_trace(self.directory, place, trace=trace, problems=[problem._asdict() for problem in problems])

    def _recorder(self, pair: Pair) -> Recorder:
        decode = self.decode
        models = (pair.drafting, pair.target, self.sampling, pair.vocab_size, pair.eos_ids)
        kind = ChainRecorder if isinstance(pair.drafting, FeatureDraft) else Recorder
        return kind(*models, decode.max_draft_length, decode.perfect_head, self.data.chunk_mb, self.draft_sampling)

    def _write_errors(self) -> None:
        """errors.jsonl: the prompts that have no row, with the reason."""
        lines = []
        for place, _ in self._every():
            if not place.is_done(self.directory):
                continue
            rows_path, _ = place.paths(self.directory)
            draw = {"draw": place.draw} if place.draw else {}
            lines += [problem | draw for problem in read_sidecar(rows_path)["problems"]]
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        write_atomic(self.directory / "errors.jsonl", text.encode())

    def _manifest(self, eos_ids: Sequence[int]) -> dict[str, object]:
        """Settings that decide the trace; a run that resumes it must agree."""
        prompts: dict[str, str] = {}
        for dataset, spec in ((dataset, spec) for dataset, specs in self.shards.items() for spec in specs):
            key = f"{dataset}.{spec.split}"
            # a chain over the shards
            prompts[key] = sha256((prompts.get(key, "") + repr(spec.prompts)).encode()).hexdigest()
        return {
            "format": 1,
            **self.models,
            "sampling": self.sampling.as_dict(),
            **({"draft_sampling": self.draft_sampling.as_dict()} if self.draft_sampling else {}),
            "eos_ids": list(eos_ids),
            "prompts": prompts,
            "template": self.data.template,
            "max_prompt_tokens": self.data.max_prompt_tokens,
            **{name: getattr(self.decode, name) for name in _DECIDING},
            "generator": GENERATOR,
            "heads": [] if self.decode.trace_hidden else list(self.decode.heads),
            # what a record is to be made of; no run is compared with it
            "recorded": {
                _NUM_SHARDS: Counter(
                    f"{dataset}.{spec.split}" for dataset, specs in self.shards.items() for spec in specs
                )
            },
        }


def trace_folder(experiment: Experiment, *, draft_sampling: Sampling | None = None) -> TraceFolder:
    """The trace of an experiment.

    Args:
        experiment: models, sampling, prompts and settings.
        draft_sampling: the sampling that the draft draws by, as some engines have it: at temperature 0 its likeliest
            token, whatever the target's sampling. Such a trace lies beside the ordinary one, of the same responses.
            None, or what comes to the target's own: the ordinary one.

    Raises:
        ValueError: a setting that is out of range.
    """
    data, decode = experiment.data, experiment.decode
    for name in ("num_dev", "num_test", "max_draft_length", "max_new_tokens", "prompts_per_shard", "draws_per_prompt"):
        if getattr(decode, name) < 1:
            raise ValueError(f"decode.{name} is {getattr(decode, name)}; it must be at least 1")

    if decode.draws_per_prompt > 1 and (experiment.sampling.temperature == 0 or experiment.sampling.top_k == 1):
        raise ValueError(
            f"decode.draws_per_prompt is {decode.draws_per_prompt}, and greedy sampling ({experiment.sampling}) "
            "leaves nothing to chance: "
            "all draws of a prompt would be equal; set it to 1"
        )

    greedy = experiment.sampling.is_greedy and (draft_sampling is None or draft_sampling.is_greedy)
    other = None if greedy or draft_sampling == experiment.sampling else draft_sampling
    return TraceFolder(
        directory=experiment.directory / ("trace" if other is None else f"trace-{_name_of(other)}"),
        draft_sampling=other,
        shards={dataset: _shards_of(experiment, dataset) for dataset in experiment.datasets},
        models={"target": experiment.described("target"), "draft": experiment.described("draft")},
        pair=lambda: experiment.pair,
        sampling=experiment.sampling,
        heads=list(experiment.heads.values()) if decode.heads and not decode.trace_hidden else [],
        data=data,
        decode=decode,
    )


def _shards_of(experiment: Experiment, dataset: str) -> list[ShardSpec]:
    """The shards of one dataset, dev first; those of a record without their prompts."""
    decode = experiment.decode
    if decode.as_recorded:
        return [spec for split in SPLITS for spec in _recorded_shards(experiment.directory / "trace", dataset, split)]
    return [
        spec
        for split in SPLITS
        for spec in cut_shards(split, experiment.prompts(dataset, split), decode.prompts_per_shard)
    ]


def _recorded_shards(directory: Path, dataset: str, split: Split) -> list[ShardSpec]:
    """The shards of one split of a record, without their prompts.

    Raises:
        FileNotFoundError: not all that were recorded are there; a record from before their number was kept has no way
            to tell.
    """
    places = disk.places_in(directory, dataset, split)
    manifest = read_manifest(directory, command="trace")
    num = manifest.get("recorded", {}).get(_NUM_SHARDS, {}).get(f"{dataset}.{split}", len(places))
    if len(places) != num:
        raise FileNotFoundError(
            f"{directory} has {len(places)} of the {num} shards of {dataset}'s {split} split that were recorded; copy "
            "the rest beside them, its rows and its signals"
        )
    return [ShardSpec(place.split, place.shard, ()) for place in places]


def _name_of(sampling: Sampling) -> str:
    if sampling.is_greedy:
        return "likeliest"
    return "-".join(f"{name}{value:g}" for name, value in sampling.as_dict().items() if value is not None)


def record_trace(
    recorder: Recorder,
    exchanges: Sequence[Exchange],
    *,
    max_new_tokens: int,
    seed: int = 0,
    categories: Sequence[str] = (),
    progress: Callable[[int], None] = lambda count: None,
) -> Trace:
    """The trace of some responses of the target.

    Args:
        recorder: the models, the sampling and the longest draft.
        exchanges: prompts with responses that were drawn from the target under the recorder's sampling.
        max_new_tokens: the length limit that the responses were generated with.
        seed: the seed of outcomes and branches.
        categories: the category of each prompt; empty: none.
        progress: a function that is called with 1 after each response.

    Raises:
        ValueError: no exchanges.
    """
    traces = []
    width = max((len(exchange.response_ids) for exchange in exchanges), default=0)
    chance = uniforms(seed, len(exchanges), width, recorder.num_uniforms)
    for index, exchange in enumerate(exchanges):
        # A response that EOS did not end was cut at a limit, its own length.
        limit = max_new_tokens if exchange.finish_reason == "stop" else len(exchange.response_ids)
        category = categories[index] if categories else ""
        row = TraceRow(exchange.id, category, tuple(exchange.prompt_ids), tuple(exchange.response_ids), limit)
        recorded = recorder.record(exchange.prompt_ids, exchange.response_ids, limit, chance[index])
        traces.append(trace_of(row, recorded, recorder))
        progress(1)
    return join_traces(traces)
