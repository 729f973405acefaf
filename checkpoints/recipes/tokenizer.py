"""The embedded trio's tokenizer: byte-level BPE, every digit a token of its own, a chat template.

    <|user|>\\n{prompt}\\n<|assistant|>\\n{answer}<|end|>

A space before a number is a token of its own too, so it says that a number follows and nothing about which.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data_gen.stories.stories import Story

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
MAX_TOKENS = 1024  # of the longest sequence that the trio is made for
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}" + ASSISTANT + "\n{{ message.content }}" + END + "\n"
    "{% else %}" + USER + "\n{{ message.content }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "\n{% endif %}"
)


def train_tokenizer(stories: Iterable[Story], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on prompts and answers, with at most `vocab_size` tokens."""
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
    tokenizer.train_from_iterator((text for story in stories for text in (story.prompt, story.answer)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
