"""A worker holds the models of one stage and makes shards, in this process (`engine: local`) or in an actor (`ray`).

Every random number of a shard comes from seeds of (run seed, stage, split, shard index). So a shard has the same
bytes on any engine, in any order, and after any interruption. Responses of the stage `respond` share a batch
with those of other shards, which changes them only through the rounding of forwards.
"""

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from configs.schema import DataConfig, PairConfig
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
from lm import Pair, Sampling, feature_draft_of, load_model, load_pair_tokenizer
from lm.draws import seed_of, uniforms
from lm.features.released import released_layout_of
from lm.forwards import check_outputs, eos_ids_of
from lm.pair import (
    check_width,
    free_memory,
    is_out_of_memory,
    load_generation_config,
    vocab_size_of,
)
from lm.parallel import sliced_models
from store.shards import shard_path

if TYPE_CHECKING:
    from data_gen.responses.server import CompletionsServer


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
        eos_ids = eos_ids_of(load_generation_config(pair.target)) or eos_ids_of(self.tokenizer)
        self._spelling = Spelling(self.tokenizer, eos_ids)
        self._asks = job.stage in ("together", "respond")
        self._server = self._first_requests() if self._asks and "server" in (data.source, data.labels) else None
        self._models: dict[str, PreTrainedModel] = {}
        self._load(*job.models)
        self._latest = LatestRows(max_error_share=data.max_error_share)
        has_feature_draft = job.stage == "together" and "draft" not in job.models
        self._feature_draft = feature_draft_of(pair.draft, self._models["target"]) if has_feature_draft else None
        self.resize(data)

    def _load(self, *names: str) -> None:
        """Load further models of the pair, and check that they fit the tokenizer."""
        self._models |= {name: load_model(getattr(self.job.pair, name)) for name in names}
        emitting = self._models.get("target", self._models.get("draft"))
        self._vocab_size = vocab_size_of(self.tokenizer, None if emitting is None else emitting.config)
        for name in names:
            check_width(self._models[name].config, self._vocab_size, name)
            check_outputs(self._models[name], self._vocab_size, name)

    def _first_requests(self) -> "CompletionsServer":
        """The servers of a run that uses any; ValueError if one does not answer or lacks an ability."""
        from data_gen.responses.server import CompletionsServer  # needs the extra `serving`

        data = self.job.data
        sampling = self._sampling
        generation = load_generation_config(self.job.pair.target)
        check_unsent(data.server, sampling, generation.to_diff_dict() if generation else {})
        return CompletionsServer(
            data.server,
            self._spelling,
            model=data.server.model or self.job.pair.target.path,
            sampling=sampling,
            max_new_tokens=data.max_new_tokens,
            num_logprobs=num_logprobs_of(sampling, data.server.num_logprobs) if data.labels == "server" else None,
        )

    def resize(self, data: DataConfig) -> None:
        """Build the source and the labellers for the batch size and the limits of `data`."""
        self.data = data
        self.source = self._source() if self._asks else None
        self.labeller = Labeller(
            draft=self._models.get("draft"),
            target=self._models.get("target"),
            sampling=self._sampling,
            vocab_size=self._vocab_size,
            batch_size=data.batch_size,
            chunk_mb=data.chunk_mb,
        )
        self.chains: ChainLabeller | None = None
        if self._feature_draft is not None:
            self.chains = ChainLabeller(
                draft=self._feature_draft,
                target=self._models["target"],
                sampling=self._sampling,
                vocab_size=self._vocab_size,
                eos_ids=Pair(self._models["target"], self._feature_draft, None, self.tokenizer).eos_ids,
                draft_length=data.draft_length,
                draft_every=data.draft_every,
                chunk_mb=data.chunk_mb,
            )

    def _source(self) -> ResponseSource:
        job = self.job
        if self.data.source == "file":
            # the target generates the responses that the file lacks
            may_generate = self.data.labels == "target" and ("target" in job.models or not sliced_models(job.pair))
            return ResponseFile(
                str(self.data.responses),
                self._spelling,
                max_new_tokens=self.data.max_new_tokens,
                make_generator=self._target_in_process if may_generate else None,
            )
        if self.data.source == "server" and self._server is not None:
            return self._server
        return self._target_in_process()

    def _target_in_process(self) -> TargetInProcess:
        """The target as a source of responses, loaded now if the stage has needed none so far."""
        if "target" not in self._models:
            self._load("target")
        return TargetInProcess(
            self._models["target"],
            self._sampling,
            vocab_size=self._vocab_size,
            eos_ids=self._spelling.eos_ids,
            max_new_tokens=self.data.max_new_tokens,
            batch_size=self.data.batch_size,
            keeps_states="draft" in self._models,
        )

    def run(self, specs: Sequence[ShardSpec], progress: Progress, begins: Callable[[str], None]) -> None:
        """Run the stage on every shard; `begins` gets the name of each."""
        begins(specs[0].name)
        with closing(self._with_answers(specs, progress)) as shards:  # an error ends the requests to servers
            for spec, answers in shards:
                begins(spec.name)
                self.make(spec, progress, answers)

    def _with_answers(
        self, specs: Sequence[ShardSpec], progress: Progress
    ) -> Generator[tuple[ShardSpec, Answers | None], None, None]:
        """Each shard, with its answers if requests of several shards are answered together: by servers, or in
        one running batch of the stage `respond`. The stage `together` generates shard by shard, since it labels
        each shard from the states of the batch that generated it.
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
        """Each shard with its answers, as soon as its last response is done, which need not be in order. If
        memory runs out, the unfinished shards start again with half the batch size.
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
        numbers belong to the shard, not to its batches, so only rounding depends on the batch size. ValueError
        if a single sequence does not fit.
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
            raise ValueError(
                f"{where}; set data.batch_size to {f'at most {size}' if size else '1'}, or lower data.chunk_mb "
                f"({data.chunk_mb}), data.max_new_tokens ({data.max_new_tokens}) or data.max_prompt_tokens "
                f"({data.max_prompt_tokens}), or set data.mode: sequential; finished shards are kept"
            )
        free_memory()
        tqdm.write(f"{where}; continuing with {size}", file=sys.stderr)  # above the progress bar
        self.resize(replace(data, batch_size=size))

    def _make(self, spec: ShardSpec, progress: Progress, answers: Answers | None) -> None:
        """Read what the stage needs, label it and write the result; stages differ in the models that label."""
        stage = self.job.stage
        if self.source is None:
            path = stages.stage_path(spec, self.data, str(stages.stage_before(stage, self.data)))
            answers = stages.answers_in(path)
            columns = safetensors.torch.load_file(path)
        else:
            answers = self._ask(spec, progress) if answers is None else answers
            columns = self._given_labels(answers)
        if stage == "respond":
            self._finish(spec, answers, Labelled(columns, {}))
            return
        progress(len(answers.problems))  # they get no labels
        label = {"together": self._label_together, "draft": self.label_and_mix, "target": self._label_drafted}[stage]
        labelled = label(spec, answers.exchanges, columns, progress)
        if labelled.broken and self.chains is None:
            labelled = self._without_broken(labelled, layout_of(answers.exchanges))
        self._finish(spec, answers, labelled)

    def _finish(self, spec: ShardSpec, answers: Answers, labelled: Labelled) -> None:
        """Write the rows that are not broken; ValueError if nearly all of the latest rows ended in an error."""
        stage = self.job.stage
        # all sources but this one count problems with answers themselves
        old = [] if isinstance(self.source, TargetInProcess) else answers.problems
        answers = without(spec, answers, labelled.broken)
        if self.job.writes and stage == stages.stages_of(self.data)[-1]:
            stages.write_files(spec, answers, labelled, self.data)
        elif self.job.writes:
            stages.save(spec, stage, answers, labelled.columns, self.data)
        failed = [problem for problem in answers.problems if problem.outcome == "error" and problem not in old]
        self._latest.add(
            [*failed, *[None] * len(answers.exchanges)],
            subject=f"rows of the stage {stage} ended in an error",
            remedy="finished shards are kept; run with --retry_errors to try these rows again",
        )

    def _ask(self, spec: ShardSpec, progress: Progress) -> Answers:
        assert self.source is not None
        answers = ask(self._turns(spec, progress), self.source, progress)
        if self.data.labels == "server" and self._server is not None:
            answers = self._server.labelled(spec, answers)
        return answers

    def _given_labels(self, answers: Answers) -> dict[str, Tensor]:
        """The target's distributions that came with the answers; with `labels: target` none do."""
        if self.data.labels == "target":
            return {}
        known = joined_distributions([exchange.distributions for exchange in answers.exchanges])
        return {"p_ids": known.ids, "p_probs": known.probs}

    def _turns(self, spec: ShardSpec, progress: Progress) -> Turns[Answers]:
        """The requests of a shard; with `keeps_responses` only those without a row."""
        kept: list[Exchange] = []
        if self.job.keeps_responses:
            kept = stages.answers_in(shard_path(self.data.dir, "rows", spec.split, spec.index)).exchanges
        return turns_of(spec, tokenizer=self.tokenizer, data=self.data, progress=progress, kept=kept)

    def _label_together(
        self, spec: ShardSpec, exchanges: Sequence[Exchange], known: Mapping[str, Tensor], progress: Progress
    ) -> Labelled:
        if self.chains is not None:
            uniform = uniforms(self._seed(spec, "draft"), layout_of(exchanges).num_tokens, self.data.draft_length)
            return self.chains.label(exchanges, uniform, progress=progress)
        states = [exchange.states for exchange in exchanges if exchange.states is not None]
        if states and len(states) == len(exchanges):  # responses of an earlier run have none
            known = {**known, "target_states": torch.cat(states)}
        return self.label_and_mix(spec, exchanges, known, progress)

    def _label_drafted(
        self, spec: ShardSpec, exchanges: Sequence[Exchange], known: Mapping[str, Tensor], progress: Progress
    ) -> Labelled:
        """The target's labels of what the stage `draft` drafted, beside the columns of that stage."""
        inputs = {name: known[name] for name in ("draft_ids", "log_q")}
        labelled = self.labeller.label(exchanges, inputs, progress=progress)
        return labelled._replace(columns={**known, **labelled.columns})

    def label_and_mix(
        self, spec: ShardSpec, exchanges: Sequence[Exchange], known: Mapping[str, Tensor], progress: Progress
    ) -> Labelled:
        """The labels of the loaded models, and the coins `from_target`. Broken rows are labelled too, so that
        the random numbers, batches and bytes of all other rows do not change. `known`: inputs of
        `Labeller.label` besides the uniforms.
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
