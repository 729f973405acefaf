"""Recording a trace: once, so that everything else can replay it (law 4.10).

Per shard the target answers its prompts in one batch (`data_gen`), then each response becomes a row of the trace. All
randomness comes from seeds of (run seed, dataset, split, shard index, draw), so an interrupted run resumes to the same
trace. `decode.draws_per_prompt` decodes every prompt several times, each time with another response and other coins.

Raising it, `decode.num_dev` or `decode.num_test` records what is new: full shards stay as they are, and a short last
shard is recorded again, longer. A run with fewer prompts or draws reads the first ones.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from configs.hints import say_next
from configs.load import accepts_yaml
from configs.schema import Config
from data_gen.pipeline.stages import cut_shards
from data_gen.prompts.prompt import row_id
from data_gen.prompts.sets import Split
from data_gen.responses.exchange import Exchange, ShardSpec, ask, turns_of
from data_gen.store.manifest import Manifest, read_manifest, refuse_different, settle
from decode.experiment import Experiment
from evaluation.gain import Splits
from evaluation.traces.disk import ShardKey, read_trace, recorded_keys, without_hidden, write_trace
from evaluation.traces.prompts import FORMAT, has_old_format, lacks, numbers_of, refuse_other_digests, upgrade, upgraded
from evaluation.traces.trace import Trace, TraceRow, join_traces
from heads.model.head import AcceptanceHead
from lm import Sampling
from lm.draws import GENERATOR, seed_of, uniforms
from lm.rope import refuse_crossing
from store.lock import only_writer
from store.progress import Bar
from store.shards import broken_shards, clean_partial, forget_broken, read_sidecar, write_atomic

if TYPE_CHECKING:  # models take seconds to import, and a recorded trace needs none
    from evaluation.traces.coupling import Recorder

SPLITS: tuple[Split, ...] = ("dev", "test")
_DECIDING = ("max_draft_length", "max_new_tokens", "seed", "prompts_per_shard", "trace_hidden", "perfect_head")
"""Settings of `decode` that decide the trace, beside models, sampling and prompts."""


@dataclass(frozen=True, kw_only=True)
class TraceFolder:
    """A trace on disk, and what it is recorded from."""

    directory: Path
    experiment: Experiment
    shards: Mapping[ShardKey, ShardSpec]
    """Draw after draw, by dataset, dev first; without prompts if a recorded trace is read."""
    heads: Sequence[AcceptanceHead]
    """Scored while recording, if hidden states are not stored."""
    draft_sampling: Sampling | None = None
    """The sampling that the draft draws by, if it is not the target's."""

    def refuse_other(self) -> None:
        """Raise ValueError if the folder has a trace of other settings or prompts."""
        if self.experiment.decode.as_recorded or not (self.directory / "manifest.json").is_file():
            return
        on_disk = read_manifest(self.directory, command="trace", keys=["eos_ids"])
        current = upgraded(on_disk, self.shards, self.directory)
        refuse_different(current, self._manifest(on_disk["eos_ids"]), self.directory, setting="decode.dir")
        if not has_old_format(on_disk):
            refuse_other_digests(self.directory, self.shards)

    def complete(self, splits: Sequence[Split] = SPLITS) -> None:
        """Record the shards of these splits that are missing, corrupted or too short; no model is loaded if there are
        none. ValueError if the folder has a trace of other settings or prompts, or if texts may cross a model's change
        of rotary frequencies, since a trace reads each at once.
        """
        if self.experiment.decode.as_recorded:
            return
        self.refuse_other()
        keys = [key for key in self.shards if key.split in splits]
        present = [path for key in keys for path in key.whole(self.directory)]
        is_complete = not (self._has_old_format or self._lacking(keys) or self._lacks_splits)
        if is_complete and not any(True for _ in broken_shards(present, command="trace")):
            return
        with only_writer(self.directory, setting="decode.dir"):
            forget_broken(present)
            clean_partial(self.directory, "*/rows", "*/signals")
            if self._has_old_format:
                upgrade(self.directory, self.shards)
            if lacking := self._lacking(keys):
                self._record_all(lacking)
            elif self._lacks_splits:
                eos_ids = read_manifest(self.directory, command="trace")["eos_ids"]
                settle(self.directory, self._manifest(eos_ids), setting="decode.dir")
            self._write_errors()

    def load(self, dataset: str) -> Splits[Trace]:
        """Both splits of one dataset; errors as `load_split` has them."""
        return Splits(*(self.load_split(dataset, split) for split in SPLITS))

    def load_split(self, dataset: str, split: Split) -> Trace:
        """One split of one dataset; errors as `evaluation.traces.disk.read_trace` has them."""
        keys = [key for key in self.shards if key[:2] == (dataset, split)]
        if self.experiment.decode.as_recorded:
            return read_trace(self.directory, keys)
        prompts = [prompt for key in keys for prompt in self.shards[key].prompts]
        ids = {row_id(prompt, turn) for prompt in prompts for turn in range(len(prompt.turns))}
        return read_trace(self.directory, keys, ids=ids)

    @property
    def is_complete(self) -> bool:
        """Whether nothing has to be recorded."""
        return self.experiment.decode.as_recorded or not self._lacking(list(self.shards))

    @property
    def _has_old_format(self) -> bool:
        path = self.directory / "manifest.json"
        return path.is_file() and has_old_format(read_manifest(self.directory, command="trace"))

    @property
    def _lacks_splits(self) -> bool:
        """Whether an earlier version recorded the trace, which did not note how transfer sets are split."""
        known = read_manifest(self.directory, command="trace").get("split_by", {})
        return not self.experiment.transfer_sets.keys() <= known.keys()

    def _lacking(self, keys: Sequence[ShardKey]) -> list[ShardKey]:
        return [key for key in keys if lacks(self.directory, key, self.shards[key])]

    def _record_all(self, keys: Sequence[ShardKey]) -> None:
        from transformers import PreTrainedModel

        from evaluation.traces.coupling import Recorder

        total = sum(self.shards[key].num_requests for key in keys)
        with Bar(total=total, desc="trace: loading models", unit="prompts") as bar:
            pair = self.experiment.pair
            data = self.experiment.data
            decode = self.experiment.decode
            longest = data.max_prompt_tokens + decode.max_new_tokens + decode.max_draft_length
            subject = f"data.max_prompt_tokens + decode.max_new_tokens + decode.max_draft_length is {longest}"
            for model in (pair.target, pair.drafting):
                if isinstance(model, PreTrainedModel):
                    refuse_crossing(model, 0, longest, subject=subject, remedy="lower one of the three")
            settle(self.directory, self._manifest(sorted(pair.eos_ids)), setting="decode.dir")
            loop = pair.drafting, pair.target, self.experiment.sampling, pair.vocab_size, pair.eos_ids
            recorder = Recorder(
                *loop,
                decode.max_draft_length,
                has_target_branches=decode.perfect_head,
                chunk_mb=data.chunk_mb,
                draft_sampling=self.draft_sampling,
            )
            for key in keys:
                bar.set_description(f"trace: {key.dataset} {key.paths(self.directory)[0].stem}")
                self._record(key, recorder, bar.update)

    def _record(self, key: ShardKey, recorder: "Recorder", progress: Callable[[int], None]) -> None:
        from data_gen.responses.target import TargetInProcess

        decode = self.experiment.decode
        spec = self.shards[key]
        draw = ("draw", key.draw) if key.draw else ()
        seed = seed_of(decode.seed, "trace", *key[:3], *draw)
        data = replace(self.experiment.data, seed=seed, max_new_tokens=decode.max_new_tokens)
        source = TargetInProcess(
            recorder.target,
            recorder.sampling,
            vocab_size=recorder.vocab_size,
            eos_ids=recorder.eos_ids,
            max_new_tokens=decode.max_new_tokens,
            batch_size=decode.prompts_per_shard,
        )
        turns = turns_of(spec, tokenizer=self.experiment.pair.tokenizer, data=data, progress=lambda count: None)
        answers = ask(turns, source, lambda count: None)
        progress(spec.num_requests - len(answers.exchanges))
        trace = None
        if answers.exchanges:
            trace = record_trace(
                recorder,
                answers.exchanges,
                max_new_tokens=decode.max_new_tokens,
                seed=seed_of(seed, "outcomes"),
                categories={row_id(one, turn): one.category for one in spec.prompts for turn in range(len(one.turns))},
                progress=progress,
            )
            trace = trace if decode.trace_hidden else without_hidden(trace, self.heads)
        problems = [problem._asdict() for problem in answers.problems]
        write_trace(self.directory, key, trace, problems, prompts=spec.digests)

    def _write_errors(self) -> None:
        lines = []
        for key in (key for key in self.shards if key.is_done(self.directory)):
            draw = {"draw": key.draw} if key.draw else {}
            lines += [problem | draw for problem in read_sidecar(key.paths(self.directory)[0])["problems"]]
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        write_atomic(self.directory / "errors.jsonl", text.encode())

    def _manifest(self, eos_ids: Sequence[int]) -> Manifest:
        """The settings that decide the trace, and its numbers of prompts, which may grow."""
        experiment = self.experiment
        decode = self.experiment.decode
        splits = experiment.transfer_splits()
        return {
            "format": FORMAT,
            "target": experiment.described("target"),
            "draft": experiment.described("draft"),
            "sampling": experiment.sampling.as_dict(),
            **({"draft_sampling": self.draft_sampling.as_dict()} if self.draft_sampling else {}),
            "eos_ids": list(eos_ids),
            "split": numbers_of(self.shards),
            "template": experiment.data.template,
            "max_prompt_tokens": experiment.data.max_prompt_tokens,
            **{name: getattr(decode, name) for name in _DECIDING},
            "generator": GENERATOR,
            "heads": [] if decode.trace_hidden else list(decode.heads),
            **({"split_by": splits} if splits else {}),
        }


def trace_folder(experiment: Experiment, *, draft_sampling: Sampling | None = None) -> TraceFolder:
    """The trace of an experiment; ValueError for a setting that is out of range.

    The draft draws by `draft_sampling`, as in some engines: at temperature 0 its likeliest token, whatever the target's
    sampling. Such a trace has a separate folder and the same responses. None, or the target's: the ordinary trace.
    """
    decode = experiment.decode
    sampling = experiment.sampling
    name = "trace"
    for count in ("num_dev", "num_test", "max_draft_length"):
        if getattr(decode, count) < 1:
            raise ValueError(f"decode.{count} is {getattr(decode, count)}; it must be at least 1")
    if decode.draws_per_prompt > 1 and (sampling.temperature == 0 or sampling.top_k == 1):
        raise ValueError(
            f"decode.draws_per_prompt is {decode.draws_per_prompt}, but with greedy sampling ({sampling}) all draws of "
            "a prompt would be equal; set it to 1"
        )
    if draft_sampling == sampling or (draft_sampling and draft_sampling.is_greedy and sampling.is_greedy):
        draft_sampling = None
    if draft_sampling is not None:
        numbers = (f"{name}{value:g}" for name, value in draft_sampling.as_dict().items() if value is not None)
        name = f"trace-{'likeliest' if draft_sampling.is_greedy else '-'.join(numbers)}"
    if decode.as_recorded:
        keys = recorded_keys(experiment.directory / "trace")
        shards = {key: ShardSpec(key.split, key.shard, ()) for key in keys}
    else:
        shards = {
            ShardKey(dataset, split, spec.index): spec
            for dataset in experiment.datasets
            for split in SPLITS
            for spec in cut_shards(split, experiment.prompts(dataset, split), decode.prompts_per_shard)
        }
    return TraceFolder(
        directory=experiment.directory / name,
        experiment=experiment,
        shards={key._replace(draw=draw): shards[key] for draw in range(decode.draws_per_prompt) for key in shards},
        heads=list(experiment.heads.values()) if decode.heads and not decode.trace_hidden else [],
        draft_sampling=draft_sampling,
    )


def join_splits(parts: Iterable[Splits[Trace]]) -> Splits[Trace]:
    """Both splits of several datasets together."""
    return Splits(*map(join_traces, zip(*parts, strict=True)))


def record_trace(
    recorder: "Recorder",
    exchanges: Sequence[Exchange],
    *,
    max_new_tokens: int,
    seed: int = 0,
    categories: Mapping[str, str] | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Trace:
    """The trace of responses that the recorder's target drew under its sampling and the length limit `max_new_tokens`;
    ValueError without any. `seed` is that of outcomes and branches, `categories` has the category of each exchange's
    prompt by id, and `progress` is called with 1 after each response.
    """
    traces = []
    width = max((len(exchange.response_ids) for exchange in exchanges), default=0)
    draws = uniforms(seed, len(exchanges), width, recorder.num_uniforms)
    for exchange, numbers in zip(exchanges, draws, strict=True):
        # a response that EOS did not end was cut at a limit, its length
        limit = max_new_tokens if exchange.finish_reason == "stop" else len(exchange.response_ids)
        texts = tuple(exchange.prompt_ids), tuple(exchange.response_ids)
        category = (categories or {}).get(exchange.id, "")
        traces.append(recorder.record(TraceRow(exchange.id, category, *texts, limit), numbers))
        progress(1)
    return join_traces(traces)


@accepts_yaml
def trace(config: Config) -> None:
    """Run `acceptance-heads trace`; `configs.measuring` documents its flags."""
    folder = trace_folder(Experiment(config))
    folder.complete()
    for dataset in folder.experiment.datasets:
        for split, part in vars(folder.load(dataset)).items():
            print(
                f"{folder.directory / dataset}: {split} {len(part.rows):,} responses, {part.num_positions:,} tokens, "
                f"{1 - part.is_first_accepted.mean():.3f} rejected, {len(part.token) - part.num_positions:,} tokens "
                "in branches"
            )
    say_next(config, "evaluate", ", which replays every policy on it")
