"""A worker holds the models of one stage and makes shards: in this process (`engine: local`) or as an actor (`engine: ray`)."""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from configs.schema import Config
from data_gen.labels.labeller import Labeller
from data_gen.pipeline import stages
from data_gen.pipeline.stages import Stage
from data_gen.responses.conversation import ShardSpec, ask
from data_gen.responses.exchange import Exchange, Problem, Progress
from data_gen.responses.source import make_source
from lm import Sampling, check_width, load_model, load_pair_tokenizer
from lm.forwards import check_output_layer

FEATURE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Worker:
    """Makes shards, one stage of each."""

    def __init__(self, config: Config, stage: Stage) -> None:
        """Load the tokenizer and the models that the stage needs.

        Raises:
            ValueError: models that do not fit each other, the tokenizer, or the configured lengths.
        """
        logging.disable_progress_bar()
        torch.set_num_threads(config.pair.num_threads or torch.get_num_threads())
        self.config, self.stage, self.data = config, stage, config.data
        self.tokenizer = load_pair_tokenizer(config.pair)
        wants = {
            "together": ("draft", "target"),
            "respond": ("target",) if config.data.source == "transformers" else (),
            "draft": ("draft",),
            "target": ("target",),
        }[stage]
        models = {name: self._load(name) for name in wants}
        sampling = Sampling(**vars(config.pair.sampling))
        self.source = make_source(config, models, self.tokenizer, sampling) if stage in ("together", "respond") else None
        self.labeller = Labeller(
            draft=models.get("draft"),
            target=models.get("target"),
            sampling=sampling,
            vocab_size=len(self.tokenizer),
            batch_size=config.data.batch_size,
            chunk_mb=config.data.chunk_mb,
            feature_dtype=FEATURE_DTYPES[config.data.feature_dtype],
        )

    def make(self, spec: ShardSpec, progress: Progress) -> None:
        """Run the stage on one shard; `progress` is told num_requests once for responses and once for labels."""
        exchanges, problems, states = self._exchanges(spec, progress)
        if self.stage == "respond":
            stages.save_responses(exchanges, problems, spec, self.data)
            return
        progress(len(problems))
        if self.stage == "target":
            columns = stages.add_target(exchanges, spec, self.labeller, self.data, progress)
        else:
            known = {} if states is None else {"target_states": states}
            columns = stages.label_and_mix(exchanges, spec, self.labeller, self.data, progress, known)
        if self.stage == "draft":
            stages.save_drafted(columns, spec, self.data)
            return
        stages.write_files(exchanges, problems, columns, spec, self.data)
        stages.forget_stages(spec, self.data)

    def _exchanges(self, spec: ShardSpec, progress: Progress) -> tuple[list[Exchange], list[Problem], Tensor | None]:
        """The shard's responses: asked for here, or left by the stage before."""
        if self.source is not None:
            return ask(spec, self.source, self.tokenizer, self.data, progress)
        return *stages.load_responses(spec, self.data), None

    def _load(self, name: str) -> PreTrainedModel:
        """One model, checked against the tokenizer and the lengths that it is to read."""
        source = getattr(self.config.pair, name)
        model = load_model(source, trust_remote_code=self.config.pair.trust_remote_code)
        check_width(model, len(self.tokenizer), name)
        check_output_layer(model, len(self.tokenizer))
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        longest = self.data.max_prompt_tokens + self.data.max_new_tokens
        if limit is not None and longest > limit:
            raise ValueError(
                f"data.max_prompt_tokens + data.max_new_tokens is {longest} and {name} {source.path} reads at most {limit} positions; "
                "lower one of the two"
            )
        return model


def steps_of(stage: Stage) -> int:
    """How often `Worker.make` reports each request to its progress."""
    return 2 if stage == "together" else 1
