"""The pair of these tests."""

import pytest
from transformers import PreTrainedTokenizerBase

from lm import Pair
from tests.toys.small_pair import VOCAB, model


class Words(PreTrainedTokenizerBase):
    """As many ids as the pair has logits."""

    def __len__(self) -> int:
        return VOCAB

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(VOCAB)}


@pytest.fixture
def pair() -> Pair:
    return Pair(model(1, 2), model(2), None, Words())
