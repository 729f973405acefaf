"""A worker holds the models of one stage and makes shards: in this process (`engine: local`) or as an actor (`engine: ray`)."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from configs.schema import DataConfig, PairConfig
from data_gen.labels.labeller import Labeller
from data_gen.pipeline import stages
from data_gen.pipeline.stages import Stage
from data_gen.responses.conversation import ShardSpec, ask
from data_gen.responses.exchange import Answers, Progress
from data_gen.responses.kept import Kept
from data_gen.responses.source import make_source
from lm import Sampling, check_width, load_model, load_pair_tokenizer, vocab_size_of
from lm.forwards import check_output_layer

FEATURE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a worker has to know; picklable, so that it can be sent to an actor."""

    pair: PairConfig
    data: DataConfig
    stage: Stage
    keeps_responses: bool = False
    """The shards are there, with errors: only prompts without a row are asked again."""


class Worker:
    """Makes shards, one stage of each."""

    def __init__(self, job: Job) -> None:
        """Load the tokenizer and the models that the stage needs.

        Raises:
            ValueError: models that do not fit each other, the tokenizer, or the configured lengths.
        """
        logging.disable_progress_bar()
        pair, data = job.pair, job.data
        torch.set_num_threads(pair.num_threads or torch.get_num_threads())
        self.job, self.stage, self.data = job, job.stage, data
        self.tokenizer = load_pair_tokenizer(pair)
        names = {
            "together": ("draft", "target"),
            "respond": ("target",) if data.source == "transformers" else (),
            "draft": ("draft",),
            "target": ("target",),
        }[job.stage]
        models = {name: self._load(name) for name in names}
        vocab_size = vocab_size_of(self.tokenizer, models.get("target", models.get("draft")))
        for name, model in models.items():
            check_width(model, vocab_size, name)
            check_output_layer(model, vocab_size)
        has_source = job.stage in ("together", "respond")
        self.source = make_source(pair, data, models=models, tokenizer=self.tokenizer, vocab_size=vocab_size) if has_source else None
        self.labeller = Labeller(
            draft=models.get("draft"),
            target=models.get("target"),
            sampling=Sampling(**vars(pair.sampling)),
            vocab_size=vocab_size,
            batch_size=data.batch_size,
            chunk_mb=data.chunk_mb,
            feature_dtype=FEATURE_DTYPES[data.feature_dtype],
        )

    def make(self, spec: ShardSpec, progress: Progress) -> None:
        """Run the stage on one shard; `progress` is told of every request once per step (`steps_of`)."""
        answers = self._answers(spec, progress)
        if self.stage == "respond":
            stages.save_responses(spec, answers, self.data)
            return
        progress(len(answers.problems))  # they have no labels to wait for
        if self.stage == "target":
            columns = stages.add_target(spec, answers.exchanges, labeller=self.labeller, data=self.data, progress=progress)
        else:
            known_columns = {} if answers.states is None else {"target_states": answers.states}
            columns = stages.label_and_mix(
                spec, answers.exchanges, labeller=self.labeller, data=self.data, progress=progress, known_columns=known_columns
            )
        if self.stage == "draft":
            stages.save_drafted(spec, columns, self.data)
            return
        stages.write_files(spec, answers, columns=columns, data=self.data)
        stages.forget_stages(spec, self.data)

    def _answers(self, spec: ShardSpec, progress: Progress) -> Answers:
        """The shard's responses: from the source, or as the stage before saved them."""
        if self.source is not None:
            source = Kept(self.source, stages.kept_responses(spec, self.data)) if self.job.keeps_responses else self.source
            return ask(spec, source, tokenizer=self.tokenizer, data=self.data, progress=progress)
        return stages.load_responses(spec, self.data)

    def _load(self, name: str) -> PreTrainedModel:
        """One model, checked against the tokenizer and the lengths that it is to read."""
        source = getattr(self.job.pair, name)
        model = load_model(source, trust_remote_code=self.job.pair.trust_remote_code)
        limit = max_positions(model)
        longest = self.data.max_prompt_tokens + self.data.max_new_tokens
        if limit is not None and longest > limit:
            raise ValueError(
                f"data.max_prompt_tokens + data.max_new_tokens is {longest} and {name} {source.path} reads at most {limit} positions; "
                "lower one of the two"
            )
        return model


def max_positions(model: PreTrainedModel) -> int | None:
    """The longest sequence that the model reads; None if it sets no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def steps_of(stage: Stage) -> int:
    """How often `Worker.make` reports each request: `together` asks and then labels, every other stage does one of the two."""
    return 2 if stage == "together" else 1
