"""The longest texts that models read, by their configs."""

from collections.abc import Sequence

from configs.schema import DataConfig, ModelSource, PairConfig
from lm import model_config
from lm.features.released import max_positions_of, released_layout_of
from lm.pair import without_weights
from lm.rope import refuse_crossing


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
