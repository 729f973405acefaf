"""A worker holds the models of one stage and makes shards, in this process (`engine: local`) or in an actor (`ray`).

Every random number of a shard comes from seeds of (run seed, stage, split, shard index). So a shard has the same bytes
on any engine, in any order, and after any interruption. Responses of the stage `respond` share a batch with those of
other shards, which changes them only through the rounding of forwards.
"""

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig

from configs.schema import DataConfig, ModelSource, PairConfig
from data_gen.labels.chains import ChainLabeller
from data_gen.labels.labeller import Labelled, Labeller
from data_gen.pipeline import stages
from data_gen.pipeline.stages import Stage
from data_gen.responses.exchange import (
    Answers,
    Exchange,
    LatestRows,
    Progress,
    ResponseSource,
    ShardSpec,
    Turns,
    ask,
    turns_of,
    without,
)
from data_gen.responses.settings import check_unsent
from data_gen.responses.target import TargetInProcess
from data_gen.responses.text import ResponseFile, Spelling
from data_gen.responses.top_logprobs import joined_distributions, num_logprobs_of
from data_gen.store.rows import Layout, layout_of
from lm import Pair, Sampling, feature_draft_of, load_model, load_pair_tokenizer, model_config
from lm.draws import seed_of, uniforms
from lm.features.released import max_positions_of, released_layout_of
from lm.forwards import check_outputs, eos_ids_of
from lm.pair import (
    check_width,
    free_memory,
    is_out_of_memory,
    load_generation_config,
    vocab_size_of,
    without_weights,
)
from lm.parallel import sliced_models
from lm.rope import refuse_crossing
from store.shards import shard_path


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a worker needs; picklable, so that it can be sent to an actor."""

    pair: PairConfig
    data: DataConfig
    stage: Stage
    keeps_responses: bool = False
    """The shards exist, with errors: only prompts without a row are requested again."""
    writes: bool = True
    """False: only run the forwards; another process writes (`data_gen.pipeline.share`)."""

    @property
    def models(self) -> tuple[str, ...]:
        """The models that a worker loads; a feature draft is loaded with its target."""
        both = ("draft",) if self.data.labels == "server" else ("draft", "target")
        return {
            "together": both if released_layout_of(self.pair.draft) is None else ("target",),
            "respond": ("target",) if self.data.source == "transformers" else (),
        }.get(self.stage, (self.stage,))

    @property
    def num_steps(self) -> int:
        """How often `Worker.make` reports each request: `together` requests and labels, other stages do one of both."""
        return 2 if self.stage == "together" else 1

    @property
    def is_sliced(self) -> bool:
        """Whether a worker loads a slice of a model."""
        return not set(self.models).isdisjoint(sliced_models(self.pair))


class Worker:
    """Makes shards, one stage of each."""

    def __init__(self, job: Job) -> None:
        """Load the tokenizer and the models that the stage needs.

        Raises:
            ValueError: models that do not fit each other or the tokenizer, or a server that lacks an ability; lengths
                are checked by `check_lengths`.
        """
        pair = job.pair
        data = job.data
        torch.set_num_threads(pair.num_threads or torch.get_num_threads())
        self.job = job
        self.tokenizer = load_pair_tokenizer(pair)
        self._sampling = Sampling(**vars(pair.sampling))
        self._spelling = Spelling(self.tokenizer, _eos_ids(pair.target, self.tokenizer))
        self._asks = job.stage in ("together", "respond")
        uses_server = self._asks and "server" in (data.source, data.labels)
        self._server: Any = self._first_requests() if uses_server else None
        models = {name: load_model(getattr(pair, name)) for name in job.models}
        emitting = models.get("target", models.get("draft"))
        vocab_size = vocab_size_of(self.tokenizer, None if emitting is None else emitting.config)
        for name, model in models.items():
            check_width(model.config, vocab_size, name)
            check_outputs(model, vocab_size, name)
        self._models = models
        self._vocab_size = vocab_size
        self._latest = LatestRows(max_error_share=data.max_error_share)
        has_feature_draft = job.stage == "together" and "draft" not in models
        self._feature_draft = feature_draft_of(pair.draft, models["target"]) if has_feature_draft else None
        self.resize(data)

    def _first_requests(self) -> Any:
        """The servers of a run that uses any; ValueError if one does not answer or lacks an ability."""
        from data_gen.responses.server import CompletionsServer  # needs the extra `serving`

        data = self.job.data
        sampling = self._sampling
        generation = load_generation_config(self.job.pair.target)
        check_unsent(data.server, sampling, generation.to_diff_dict() if generation else {})
        num = num_logprobs_of(sampling, data.server.num_logprobs) if data.labels == "server" else None
        settings: dict[str, Any] = {"model": data.server.model or self.job.pair.target.path, "num_logprobs": num}
        settings |= {"sampling": sampling, "max_new_tokens": data.max_new_tokens}
        return CompletionsServer(data.server, self._spelling, **settings)

    def resize(self, data: DataConfig) -> None:
        """Build the source and the labellers for the batch size and the limits of `data`."""
        self.data, models = data, self._models
        common: dict[str, Any] = {"sampling": self._sampling, "vocab_size": self._vocab_size}
        self.source: ResponseSource | None = None
        if self._asks and data.source == "server":
            self.source = self._server
        elif self._asks and data.source == "file":
            self.source = ResponseFile(
                str(data.responses),
                self._spelling,
                max_new_tokens=data.max_new_tokens,
                make_generator=self._target_in_process if self._may_generate else None,
            )
        elif self._asks:
            self.source = self._target_in_process()
        common |= {"target": models.get("target"), "chunk_mb": data.chunk_mb}
        self.labeller = Labeller(draft=models.get("draft"), batch_size=data.batch_size, **common)
        self.chains: ChainLabeller | None = None
        if self._feature_draft is not None:
            eos_ids = Pair(models["target"], self._feature_draft, None, self.tokenizer).eos_ids
            common |= {"eos_ids": eos_ids, "draft_length": data.draft_length, "draft_every": data.draft_every}
            self.chains = ChainLabeller(draft=self._feature_draft, **common)

    @property
    def _may_generate(self) -> bool:
        """Whether this process may load the target for prompts without a response in the file."""
        job = self.job
        return job.data.labels == "target" and ("target" in job.models or not sliced_models(job.pair))

    def _target_in_process(self) -> TargetInProcess:
        """The target as a source of responses, loaded now if the stage has needed none so far."""
        if "target" not in self._models:
            self._models["target"] = load_model(self.job.pair.target)
            self._vocab_size = vocab_size_of(self.tokenizer, self._models["target"].config)
            check_width(self._models["target"].config, self._vocab_size, "target")
            check_outputs(self._models["target"], self._vocab_size, "target")
        return TargetInProcess(
            self._models["target"],
            self._sampling,
            vocab_size=self._vocab_size,
            eos_ids=self._spelling.eos_ids,
            max_new_tokens=self.data.max_new_tokens,
            batch_size=self.data.batch_size,
            keeps_states="draft" in self._models,
        )

    def run(self, specs: Sequence[ShardSpec], progress: Progress, begins: Callable[[str], None] | None = None) -> None:
        """Run the stage on every shard; `begins` gets the name of each."""
        begins = begins or (lambda name: None)
        begins(specs[0].name)
        with closing(self._with_answers(specs, progress)) as shards:  # an error ends the requests to servers
            for spec, answers in shards:
                begins(spec.name)
                self.make(spec, progress, answers)

    def _with_answers(
        self, specs: Sequence[ShardSpec], progress: Progress
    ) -> Generator[tuple[ShardSpec, Answers | None], None, None]:
        """Each shard, with its answers if requests of several shards are answered together: by servers, or in one
        running batch of the stage `respond`. The stage `together` generates shard by shard, since it labels each shard
        from the states of the batch that generated it.
        """
        if self._server is not None:
            yield from self._server.servers.ahead(specs, lambda spec: self._ask(spec, progress))
        elif self.job.stage == "respond" and isinstance(self.source, TargetInProcess):
            yield from self._joined(specs, progress)
        else:
            yield from ((spec, None) for spec in specs)

    def _joined(
        self, specs: Sequence[ShardSpec], progress: Progress
    ) -> Generator[tuple[ShardSpec, Answers], None, None]:
        """Each shard with its answers, as soon as its last response is done, which need not be in order. If memory runs
        out, the unfinished shards start again with half the batch size.
        """
        unfinished = list(specs)
        while unfinished:
            assert isinstance(self.source, TargetInProcess)
            shards = ((spec, self._turns(spec, progress)) for spec in tuple(unfinished))
            try:
                for spec, answers in self.source.respond_joined(shards, progress):
                    yield spec, answers
                    unfinished.remove(spec)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            if unfinished:  # outside the handler, whose error keeps the tensors of its frames alive
                self._halve_batch(unfinished)

    def make(self, spec: ShardSpec, progress: Progress, answers: Answers | None = None) -> None:
        """Run the stage on one shard; `answers`, if there are any yet, are those to its requests.

        If memory runs out, the shard starts again with half the batch size, which this worker then keeps. Random
        numbers belong to the shard, not to its batches, so only rounding depends on the batch size. ValueError if a
        single sequence does not fit.
        """
        while True:
            try:
                self._make(spec, progress, answers)
                return
            except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
                if not is_out_of_memory(error):
                    raise
            self._halve_batch([spec])  # outside the handler, whose error keeps the tensors of its frames alive

    def _halve_batch(self, specs: Sequence[ShardSpec]) -> None:
        data = self.data
        size = min(data.batch_size, sum(spec.num_requests for spec in specs)) // 2
        where = f"{self.job.stage}: out of memory at {specs[0].name} with data.batch_size {data.batch_size}"
        if self.job.is_sliced or size == 0:  # other slices did not run out, and wait in a forward of the full batch
            remedies = f"data.chunk_mb ({data.chunk_mb}), data.max_new_tokens ({data.max_new_tokens}) or "
            remedies += f"data.max_prompt_tokens ({data.max_prompt_tokens}), or set data.mode: sequential"
            smaller = f"at most {size}" if size else "1"
            raise ValueError(
                f"{where}; set data.batch_size to {smaller}, or lower {remedies}; finished shards are kept"
            )
        free_memory()
        tqdm.write(f"{where}; continuing with {size}", file=sys.stderr)  # above the progress bar
        self.resize(replace(data, batch_size=size))

    def _make(self, spec: ShardSpec, progress: Progress, answers: Answers | None) -> None:
        stage = self.job.stage
        columns = dict[str, Tensor]()
        if self.source is None:
            path = stages.stage_path(spec, self.data, "draft" if stage == "target" else "respond")
            answers = stages.answers_in(path)
            columns = safetensors.torch.load_file(path)
        else:
            answers = self._ask(spec, progress) if answers is None else answers
            if self.data.labels == "server":
                known = joined_distributions([exchange.distributions for exchange in answers.exchanges])
                columns = {"p_ids": known.ids, "p_probs": known.probs}
        # all sources but this one count problems with answers themselves
        old = [] if isinstance(self.source, TargetInProcess) else answers.problems
        labelled = Labelled(columns, {})
        if stage != "respond":
            progress(len(answers.problems))  # they get no labels
            labelled = self._labelled(spec, answers.exchanges, columns, progress)
            answers = without(spec, answers, labelled.broken)
        if not self.job.writes:
            pass
        elif stage == "respond" or (stage == "draft" and self.data.labels == "target"):
            stages.save(spec, stage, answers, labelled.columns, self.data)
        else:
            stages.write_files(spec, answers, labelled, self.data)
        failed = [problem for problem in answers.problems if problem.outcome == "error" and problem not in old]
        self._latest.add(
            [*failed, *[None] * len(answers.exchanges)],
            subject=f"rows of the stage {stage} ended in an error",
            remedy="finished shards are kept; run with --retry_errors to try these rows again",
        )

    def _ask(self, spec: ShardSpec, progress: Progress) -> Answers:
        assert self.source is not None
        answers = ask(self._turns(spec, progress), self.source, progress)
        if self.data.labels == "server":
            answers = self._server.labelled(spec, answers)
        return answers

    def _turns(self, spec: ShardSpec, progress: Progress) -> Turns[Answers]:
        """The requests of a shard; with `keeps_responses` only those without a row."""
        kept: list[Exchange] = []
        if self.job.keeps_responses:
            kept = stages.answers_in(shard_path(self.data.dir, "rows", spec.split, spec.index)).exchanges
        return turns_of(spec, tokenizer=self.tokenizer, data=self.data, progress=progress, kept=kept)

    def _labelled(
        self, spec: ShardSpec, exchanges: Sequence[Exchange], columns: dict[str, Tensor], progress: Progress
    ) -> Labelled:
        """The labels of all rows but broken ones."""
        data = self.data
        if self.chains is not None:
            uniform = uniforms(self._seed(spec, "draft"), layout_of(exchanges).num_tokens, data.draft_length)
            return self.chains.label(exchanges, uniform, progress=progress)
        if self.job.stage == "target":
            inputs = {name: columns[name] for name in ("draft_ids", "log_q")}
            labelled = self.labeller.label(exchanges, inputs, progress=progress)
            labelled = labelled._replace(columns=columns | labelled.columns)
        else:
            states = [exchange.states for exchange in exchanges if exchange.states is not None]
            if states and len(states) == len(exchanges):  # responses of an earlier run have none
                columns["target_states"] = torch.cat(states)
            labelled = self.label_and_mix(spec, exchanges, columns, progress)
        return self._without_broken(labelled, layout_of(exchanges)) if labelled.broken else labelled

    def label_and_mix(
        self, spec: ShardSpec, exchanges: Sequence[Exchange], known: Mapping[str, Tensor], progress: Progress
    ) -> Labelled:
        """The labels of the loaded models, and the coins `from_target`. Broken rows are labelled too, so that the
        random numbers, batches and bytes of all other rows do not change. `known`: inputs of `Labeller.label` besides
        the uniforms.
        """
        num_tokens = layout_of(exchanges).num_tokens
        uniform = uniforms(self._seed(spec, "draft"), num_tokens)
        coins = uniforms(self._seed(spec, "mixing"), num_tokens)
        labelled = self.labeller.label(exchanges, {"uniform": uniform, **known}, progress=progress)
        labelled.columns["from_target"] = coins < self.data.mixing_ratio
        return labelled

    def _seed(self, spec: ShardSpec, stage: str) -> int:
        return seed_of(self.data.seed, stage, spec.split, spec.index)

    def _without_broken(self, labelled: Labelled, layout: Layout) -> Labelled:
        is_kept = torch.ones(layout.num_tokens, dtype=torch.bool)
        is_kept[layout.positions(list(labelled.broken))] = False
        return labelled._replace(columns={name: values[is_kept] for name, values in labelled.columns.items()})


def _eos_ids(target: ModelSource, tokenizer: Any) -> frozenset[int]:
    """The end-of-sequence ids of the target's generation config, or the tokenizer's."""
    ids = eos_ids_of(load_generation_config(target))
    return ids or eos_ids_of(GenerationConfig(eos_token_id=tokenizer.eos_token_id))


def check_lengths(pair: PairConfig, data: DataConfig, names: Sequence[str] = ("draft", "target")) -> None:
    """Raise ValueError if a model cannot read the longest text of the config; no weights are loaded."""
    longest = data.max_prompt_tokens + data.max_new_tokens
    subject = f"data.max_prompt_tokens + data.max_new_tokens is {longest}"
    for name in names:
        source: ModelSource = getattr(pair, name)
        limit = limit_of(source)
        if limit is not None and longest > limit:
            raise ValueError(
                f"{subject} and {name} {source.path} reads at most {limit} positions; lower either setting"
            )
        if released_layout_of(source) is None:
            remedy = f"lower either setting for {name} {source.path}"
            refuse_crossing(without_weights(source), 0, longest, subject=subject, remedy=remedy)


def limit_of(source: ModelSource) -> int | None:
    """The longest sequence that a model or a feature draft reads, by its config; None if it sets no limit."""
    if released_layout_of(source) is not None:
        return max_positions_of(source)
    return getattr(model_config(source).get_text_config(), "max_position_embeddings", None)
