"""Which source of responses a run has: the target in this process, a server, or a file."""

from collections.abc import Mapping

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from configs.schema import DataConfig, ModelSource, PairConfig
from data_gen.responses.exchange import ResponseSource
from data_gen.responses.from_file import ResponseFile
from data_gen.responses.in_process import TargetInProcess
from data_gen.responses.spelling import Spelling
from lm import Sampling, eos_ids_of


def make_source(
    pair: PairConfig,
    data: DataConfig,
    *,
    models: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
) -> ResponseSource:
    """The source that `data.source` names.

    Args:
        pair: the section of the config with the target's name and the sampling.
        data: the section of the config.
        models: the loaded models; with the draft among them, the target keeps its hidden states for the labels.
        tokenizer: the pair's.
        vocab_size: one more than the largest id that a response may hold.

    Raises:
        ValueError: a setting that the source needs or cannot honour.
    """
    sampling = Sampling(**vars(pair.sampling))
    spelling = Spelling(tokenizer, _eos_ids(pair.target, tokenizer))
    if data.source == "server":
        from data_gen.responses.server import CompletionsServer  # needs the extra `serving`

        model = data.server.model or pair.target.path
        return CompletionsServer(
            data.server, spelling, model=model, sampling=sampling, max_new_tokens=data.max_new_tokens
        )
    if data.source == "file":
        return ResponseFile(str(data.responses), spelling, max_new_tokens=data.max_new_tokens)
    return TargetInProcess(
        models["target"],
        sampling,
        vocab_size=vocab_size,
        eos_ids=spelling.eos_ids,
        max_new_tokens=data.max_new_tokens,
        batch_size=data.batch_size,
        keeps_states="draft" in models,
    )


def _eos_ids(target: ModelSource, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The end-of-sequence ids of the target's generation config, read without loading the model; or the tokenizer's."""
    try:
        config = GenerationConfig.from_pretrained(target.path, revision=target.revision or "main")
    except OSError:
        config = None
    return eos_ids_of(config) or eos_ids_of(GenerationConfig(eos_token_id=tokenizer.eos_token_id))
