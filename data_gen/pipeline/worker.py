"""A worker holds the models of one stage and makes shards, in this process (`engine: local`) or in an actor (`ray`)."""

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedConfig

from configs.schema import DataConfig, ModelSource, PairConfig
from data_gen.labels.chains import ChainLabeller
from data_gen.labels.labeller import Labeller
from data_gen.labels.layout import layout_of
from data_gen.pipeline import stages
from data_gen.pipeline.stages import Stage
from data_gen.responses.conversation import ShardSpec, ask
from data_gen.responses.exchange import Answers, LatestRows, Problem, Progress, ResponseSource
from data_gen.responses.in_process import TargetInProcess
from data_gen.responses.source import make_server, make_source
from data_gen.responses.top_logprobs import joined
from lm import (
    Pair,
    Sampling,
    check_width,
    feature_draft_of,
    load_config,
    load_model,
    load_pair_tokenizer,
    vocab_size_of,
)
from lm.features.released import max_positions_of, released_layout_of
from lm.forwards import check_numbers, check_output_layer
from lm.pair import is_out_of_memory, without_weights
from lm.parallel import sliced_models
from lm.rope import refuse_crossing

FEATURE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a worker needs; picklable, so that it can be sent to an actor."""

    pair: PairConfig
    data: DataConfig
    stage: Stage
    keeps_responses: bool = False
    """The shards exist, with errors: only prompts without a row are requested again."""
    writes: bool = True
    """False: only run the forwards; another process writes (`data_gen.pipeline.lockstep`)."""


def models_of(job: Job) -> tuple[str, ...]:
    """The models that a worker loads; a feature draft is loaded with its target."""
    both = ("draft",) if job.data.labels == "server" else ("draft", "target")
    return {
        "together": both if released_layout_of(job.pair.draft) is None else ("target",),
        "respond": ("target",) if job.data.source == "transformers" else (),
        "draft": ("draft",),
        "target": ("target",),
    }[job.stage]


def is_sliced(job: Job) -> bool:
    """Whether a worker loads a slice of a model."""
    return not set(models_of(job)).isdisjoint(sliced_models(job.pair))


class Worker:
    """Makes shards, one stage of each."""

    def __init__(self, job: Job) -> None:
        """Load the tokenizer and the models that the stage needs.

        Raises:
            ValueError: models that do not fit each other or the tokenizer, or a server that lacks an ability; lengths
                are checked by `check_lengths`.
        """
        pair, data = job.pair, job.data
        torch.set_num_threads(pair.num_threads or torch.get_num_threads())
        self.job, self.stage = job, job.stage
        self.tokenizer = load_pair_tokenizer(pair)
        needs_responses = job.stage in ("together", "respond")
        self._server = make_server(pair, data, tokenizer=self.tokenizer) if needs_responses else None
        models = {name: load_model(getattr(pair, name)) for name in models_of(job)}
        vocab_size = vocab_size_of(self.tokenizer, models.get("target", models.get("draft")))
        for name, model in models.items():
            check_width(model, vocab_size, name)
            check_numbers(model, vocab_size, name)
            check_output_layer(model, vocab_size)
        self._models, self._vocab_size = models, vocab_size
        self._latest = LatestRows(max_error_share=data.max_error_share)
        has_feature_draft = job.stage == "together" and "draft" not in models
        self._feature_draft = feature_draft_of(pair, models["target"]) if has_feature_draft else None
        self.resize(data)

    def resize(self, data: DataConfig) -> None:
        """Build the source and the labellers for the batch size and the limits of `data`."""
        self.data, pair, models, vocab_size = data, self.job.pair, self._models, self._vocab_size
        self.source: ResponseSource | None = None
        self.chains: ChainLabeller | None = None
        if self.stage in ("together", "respond"):
            self.source = make_source(
                pair, data, server=self._server, models=models, tokenizer=self.tokenizer, vocab_size=vocab_size
            )
        settings: dict[str, Any] = {
            "sampling": Sampling(**vars(pair.sampling)),
            "vocab_size": vocab_size,
            "chunk_mb": data.chunk_mb,
            "feature_dtype": FEATURE_DTYPES[data.feature_dtype],
        }
        draft, target = models.get("draft"), models.get("target")
        self.labeller = Labeller(draft=draft, target=target, batch_size=data.batch_size, **settings)
        if self._feature_draft is not None:
            target = models["target"]
            eos_ids = Pair(target, self._feature_draft, None, self.tokenizer).eos_ids
            settings |= {"eos_ids": eos_ids, "draft_length": data.draft_length, "draft_every": data.draft_every}
            self.chains = ChainLabeller(draft=self._feature_draft, target=target, **settings)

    def with_answers(
        self, specs: Sequence[ShardSpec], progress: Progress
    ) -> Iterator[tuple[ShardSpec, Answers | None]]:
        """Each shard, with its answers if they come from servers, which then work ahead on the next shards."""
        server, source = self._server, self.source
        if server is None or source is None:
            yield from ((spec, None) for spec in specs)
            return
        yield from server.servers.ahead(specs, lambda spec: server.ask(spec, source, **self._settings(spec, progress)))

    def make(self, spec: ShardSpec, progress: Progress, answers: Answers | None = None) -> None:
        """Run the stage on one shard.

        If memory runs out, the shard starts again with half the batch size, which this worker then keeps. Random
        numbers belong to the shard, not to its batches, so only rounding depends on the batch size.

        Args:
            spec: the shard.
            progress: called with the number of requests that a step has finished (`steps_of`).
            answers: what `with_answers` yielded with the shard; None: request them from the source.

        Raises:
            ValueError: a single sequence does not fit in memory.
        """
        while True:
            counts: list[int] = []

            def count_requests(count: int, counts: list[int] = counts) -> None:
                counts.append(count)
                progress(count)

            try:
                self._make(spec, count_requests, answers)
                return
            except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
                if not is_out_of_memory(error):
                    raise
            progress(-sum(counts))
            self._halve_batch(spec)  # outside the handler, whose error keeps the tensors of its frames alive

    def _halve_batch(self, spec: ShardSpec) -> None:
        data = self.data
        size = min(data.batch_size, spec.num_requests) // 2
        where = f"{self.stage}: out of memory at {spec.split}-{spec.index:05d}"
        if is_sliced(self.job):  # the other processes did not run out, and wait in a forward of the full batch
            raise ValueError(
                f"{where} with data.batch_size {data.batch_size}, in one process of a sliced model; set "
                f"data.batch_size to at most {max(1, size)} and run the same command again, which keeps the finished "
                "shards"
            )
        if size == 0:
            raise ValueError(
                f"{where} with one sequence at a time; lower data.chunk_mb ({data.chunk_mb}), data.max_new_tokens "
                f"({data.max_new_tokens}) or data.max_prompt_tokens ({data.max_prompt_tokens}), or set data.mode: "
                "sequential; finished shards are kept"
            )
        gc.collect()
        torch.cuda.empty_cache()
        # print above the progress bar
        tqdm.write(f"{where} with data.batch_size {data.batch_size}; continuing with {size}", file=sys.stderr)
        self.resize(replace(data, batch_size=size))

    def _make(self, spec: ShardSpec, progress: Progress, answers: Answers | None) -> None:
        drafted: dict[str, Tensor] = {}
        if answers is None:
            answers, drafted = self._answers(spec, progress)
        known = set() if isinstance(self.source, TargetInProcess) else {problem.id for problem in _errors(answers)}
        if self.stage == "respond":
            if self.job.writes:
                stages.save_responses(spec, answers, self.data)
        else:
            progress(len(answers.problems))  # they get no labels
            answers = self._label(spec, answers, drafted, progress)
        failed = [problem for problem in _errors(answers) if problem.id not in known]
        self._latest.add(
            [*failed, *[None] * len(answers.exchanges)],
            subject=f"rows of the stage {self.stage} ended in an error",
            remedy="finished shards are kept; run with --retry_errors to try these rows again",
        )

    def _label(self, spec: ShardSpec, answers: Answers, drafted: dict[str, Tensor], progress: Progress) -> Answers:
        if self.chains is not None:
            return stages.write_drafts(spec, answers, labeller=self.chains, data=self.data, progress=progress)
        if self.stage == "target":
            labelled = stages.add_target(
                spec, answers, drafted, labeller=self.labeller, data=self.data, progress=progress
            )
        else:
            known_columns = {} if answers.states is None else {"target_states": answers.states}
            if self.data.labels == "server":
                known_columns["p_ids"], known_columns["p_probs"] = joined(answers.distributions)
            labelled = stages.label_and_mix(
                spec,
                answers.exchanges,
                labeller=self.labeller,
                data=self.data,
                progress=progress,
                known_columns=known_columns,
            )
        answers, columns = stages.without_broken(spec, answers, labelled, mixes=self.data.mixes)
        if not self.job.writes:
            return answers
        if self.stage == "draft" and self.data.labels == "target":
            stages.save_drafted(spec, answers, columns, self.data)
            return answers
        layout = layout_of(answers.exchanges)
        stages.write_files(spec, answers, columns=columns, layout=layout, data=self.data)
        stages.forget_stages(spec, self.data)
        return answers

    def _answers(self, spec: ShardSpec, progress: Progress) -> tuple[Answers, dict[str, Tensor]]:
        """The shard's responses, from the source or the previous stage, and the columns that the stage `draft`
        saved.
        """
        data = self.data
        if self.source is not None:
            return self._ask(spec, progress), {}
        return stages.load_drafted(spec, data) if self.stage == "target" else (stages.load_responses(spec, data), {})

    def _ask(self, spec: ShardSpec, progress: Progress) -> Answers:
        assert self.source is not None
        settings = self._settings(spec, progress)
        if self._server is None:
            return ask(spec, self.source, **settings)
        return self._server.servers.start(self._server.ask(spec, self.source, **settings)).result()

    def _settings(self, spec: ShardSpec, progress: Progress) -> dict[str, Any]:
        kept = stages.kept_responses(spec, self.data) if self.job.keeps_responses else None
        return {"tokenizer": self.tokenizer, "data": self.data, "progress": progress, "kept": kept}


def check_lengths(pair: PairConfig, data: DataConfig, names: Sequence[str] = ("draft", "target")) -> None:
    """Raise ValueError if a model cannot read the longest text of the config; no weights are loaded."""
    longest = data.max_prompt_tokens + data.max_new_tokens
    subject = f"data.max_prompt_tokens + data.max_new_tokens is {longest}"
    for name in names:
        source, limit = getattr(pair, name), limit_of(pair, name)
        if limit is not None and longest > limit:
            raise ValueError(
                f"{subject} and {name} {source.path} reads at most {limit} positions; lower either setting"
            )
        if not _is_feature_draft(pair, name):
            remedy = f"lower either setting for {name} {source.path}"
            refuse_crossing(without_weights(source), 0, longest, subject=subject, remedy=remedy)


def limit_of(pair: PairConfig, name: str) -> int | None:
    """The longest sequence that target or draft reads, by its config; None if it sets no limit."""
    source: ModelSource = getattr(pair, name)
    return max_positions_of(source) if _is_feature_draft(pair, name) else max_positions(load_config(source))


def _is_feature_draft(pair: PairConfig, name: str) -> bool:
    return name == "draft" and released_layout_of(pair.draft) is not None


def _errors(answers: Answers) -> list[Problem]:
    return [problem for problem in answers.problems if problem.outcome == "error"]


def max_positions(config: PreTrainedConfig) -> int | None:
    """The longest sequence that a model reads; None if it sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def steps_of(stage: Stage) -> int:
    """How often `Worker.make` reports each request: `together` requests and labels, other stages do one of the two."""
    return 2 if stage == "together" else 1
