"""Stories as training data: the trio's tokenizer, batches, and a target's predictions on them.

The tokenizer is a byte-level BPE with one token per digit, and this chat template:

    <|user|>\\n{prompt}\\n<|assistant|>\\n{answer}<|end|>

A space before a number is a separate token too, so it predicts that a number follows, but not which one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from random import Random
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data_gen.prompts.stories import Story, stories, story_stream
from store.progress import Bar

MAX_TOKENS = 1024  # context of the trio
NUM_DEPTHS = 5  # draft positions at which drafts are measured
PAD = "<|pad|>"
END = "<|end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}" + ASSISTANT + "\n{{ message.content }}" + END + "\n"
    "{% else %}" + USER + "\n{{ message.content }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "\n{% endif %}"
)
_STORY_SEED = 1 << 32  # added to the seed, so that heads of experiments (seeds 0, 1, …) are trained on other stories
_BATCHES_SORTED_TOGETHER = 16  # by length: enough for little padding, while the order of an epoch stays random


def train_tokenizer(texts: Iterable[Story], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer trained on prompts and answers, with at most `vocab_size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for story in texts for text in (story.prompt, story.answer)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=_CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def encode_story(story: Story, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """(token ids of the prompt in the chat template, the answer and the end token; index of the answer's first)"""
    chat = [{"role": "user", "content": story.prompt}]
    prompt_ids = tokenizer(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))["input_ids"]
    return [*prompt_ids, *tokenizer(story.answer)["input_ids"], tokenizer.eos_token_id], len(prompt_ids)


class StoryBatch(NamedTuple):
    """Stories, padded on the right, where a causal model cannot see the padding."""

    ids: Int[Tensor, "batch position"]
    is_learned: Bool[Tensor, "batch position-1"]
    """True at i if the token at i + 1 belongs to an answer, its end token included."""
    number: int = 0


def story_batches(
    texts: Iterable[Story], tokenizer: PreTrainedTokenizerBase, *, batch_size: int, seed: int
) -> Iterator[StoryBatch]:
    """Endless batches of stories of about one length, in an order that `seed` decides.

    An epoch has every story once, except for those that do not fill a chunk of 16 batches.
    """
    rows = [encode_story(story, tokenizer) for story in Bar(texts, desc="tokenize", unit="stories")]
    rng = Random(seed)
    order = list(range(len(rows)))
    numbers = count()
    chunk_size = min(len(rows), batch_size * _BATCHES_SORTED_TOGETHER)
    while True:
        rng.shuffle(order)
        for start in range(0, len(order) - chunk_size + 1, chunk_size):
            chunk = sorted((rows[row] for row in order[start : start + chunk_size]), key=lambda row: len(row[0]))
            parts = (chunk[at : at + batch_size] for at in range(0, chunk_size, batch_size))
            batches = [padded(part, tokenizer.pad_token_id) for part in parts]
            rng.shuffle(batches)
            yield from (batch._replace(number=next(numbers)) for batch in batches)


def padded(rows: Sequence[tuple[list[int], int]], pad_id: int) -> StoryBatch:
    """One batch. ([5, 6, 7], 1) and ([8, 9], 1) give ids [[5, 6, 7], [8, 9, pad]], is_learned [[T, T], [T, F]]."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids, _ in rows])
    following = torch.arange(1, width)
    starts, ends = torch.tensor([[start, len(row)] for row, start in rows]).unsqueeze(-1).unbind(1)
    return StoryBatch(ids, (following >= starts) & (following < ends))


def new_stories(seed: int, num_stories: int) -> list[Story]:
    """Stories that no experiment has."""
    stream = islice(story_stream("train", _STORY_SEED + seed), num_stories)
    return list(Bar(stream, desc="write stories", total=num_stories, unit="stories"))


def held_out(tokenizer: PreTrainedTokenizerBase, batch_size: int, seed: int) -> list[StoryBatch]:
    """Batches of the test split."""
    return list(islice(story_batches(stories("test", 256, seed=seed), tokenizer, batch_size=batch_size, seed=seed), 8))


class TargetReading(NamedTuple):
    """A batch, except for its last tokens, with the target's features, keys and predictions."""

    tokens: Int[Tensor, "batch position"]
    is_learned: Bool[Tensor, "batch position"]
    """True where the next token belongs to an answer and a draft of NUM_DEPTHS tokens fits before it."""
    states: Float[Tensor, "batch position hidden"]
    """After the final norm."""
    log_p: Float[Tensor, "learned vocab"]
    cache: Any

    @classmethod
    @torch.no_grad()
    def of(cls, target: PreTrainedModel, batch: StoryBatch) -> "TargetReading":
        """Run the target on a batch."""
        tokens = batch.ids[:, :-1]
        is_learned = batch.is_learned.clone()
        is_learned[:, :NUM_DEPTHS] = False
        output = target.base_model(input_ids=tokens, use_cache=True)
        log_p = target.get_output_embeddings()(output.last_hidden_state[is_learned]).log_softmax(-1)
        return cls(tokens, is_learned, output.last_hidden_state, log_p, output.past_key_values)

    def divergence(self, log_q: Float[Tensor, "learned vocab"]) -> Float[Tensor, ""]:
        """KL(p || q), in nats per token."""
        return functional.kl_div(log_q, self.log_p, log_target=True, reduction="batchmean")


@torch.no_grad()
def acceptance_rates(
    log_q_by_depth: Callable[[TargetReading], Iterable[Float[Tensor, "learned vocab"]]],
    target: PreTrainedModel,
    batches: Iterable[StoryBatch],
) -> Float[Tensor, "depth learned"]:
    """The acceptance_rate of a draft at every learned position of some batches, depth by depth."""
    rates = []
    for batch in batches:
        reading = TargetReading.of(target, batch)
        p = reading.log_p.exp()
        rates.append(torch.stack([torch.minimum(log_q.exp(), p).sum(-1) for log_q in log_q_by_depth(reading)]))
    return torch.cat(rates, -1)
