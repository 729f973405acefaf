"""Builds the source of responses (the target in this process, a server, or a file), and checks `labels: server`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from configs.schema import DataConfig, ModelSource, PairConfig
from data_gen.responses.exchange import ResponseSource
from data_gen.responses.from_file import ResponseFile
from data_gen.responses.in_process import TargetInProcess
from data_gen.responses.spelling import Spelling
from data_gen.responses.top_logprobs import DistributionReader, num_logprobs_of
from lm import Sampling, eos_ids_of, load_config
from lm.features.released import released_layout_of

if TYPE_CHECKING:
    from data_gen.responses.server import CompletionsServer


def check_labels(pair: PairConfig, data: DataConfig) -> None:
    """Raise ValueError for settings under which a server cannot provide the target's distributions."""
    if data.labels == "target":
        return
    remedy = "or data.labels: target, which labels with the target in this process"
    num_logprobs_of(Sampling(**vars(pair.sampling)), data.server.num_logprobs)
    if data.source == "transformers":
        raise ValueError(
            "data.labels is server, but data.source is transformers, which runs the target in this process; set "
            f"data.source: server, {remedy}"
        )
    if data.server.kind != "vllm":
        raise ValueError(
            f"data.labels is server, but data.server.kind is {data.server.kind}, whose log-probabilities have no token "
            f"ids; set data.server.kind: vllm, {remedy}"
        )
    if released_layout_of(pair.draft):
        raise ValueError(
            "data.labels is server, but pair.draft is a feature draft, which reads the target's states; set "
            "data.labels: target"
        )


def make_server(
    pair: PairConfig, data: DataConfig, *, tokenizer: PreTrainedTokenizerBase
) -> "CompletionsServer | None":
    """The servers of a run that uses any, for responses or labels.

    Raises:
        ValueError: a server does not answer, or lacks an ability.
    """
    if "server" not in (data.source, data.labels):
        return None
    from data_gen.responses.server import CompletionsServer  # needs the extra `serving`

    sampling, spelling = Sampling(**vars(pair.sampling)), Spelling(tokenizer, _eos_ids(pair.target, tokenizer))
    reader = None
    if data.labels == "server":
        width = load_config(pair.target).get_text_config().vocab_size
        reader = DistributionReader(
            sampling=sampling,
            num_logprobs=num_logprobs_of(sampling, data.server.num_logprobs),
            num_ids=spelling.num_ids,
            is_padded=width > spelling.num_ids,
        )
    return CompletionsServer(
        data.server,
        spelling,
        model=data.server.model or pair.target.path,
        sampling=sampling,
        max_new_tokens=data.max_new_tokens,
        reader=reader,
    )


def make_source(
    pair: PairConfig,
    data: DataConfig,
    *,
    server: "CompletionsServer | None",
    models: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
) -> ResponseSource:
    """The source that `data.source` names.

    Args:
        pair: the section of the config with the target's name and the sampling.
        data: the section of the config.
        server: the servers, if the run uses any.
        models: the loaded models; with the draft among them, the target keeps its hidden states for the labels.
        tokenizer: the pair's.
        vocab_size: one more than the largest id that a response may hold.

    Raises:
        ValueError: a setting that the source needs or does not support.
    """
    sampling = Sampling(**vars(pair.sampling))
    spelling = Spelling(tokenizer, _eos_ids(pair.target, tokenizer))
    if data.source == "server":
        assert server is not None
        return server
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
