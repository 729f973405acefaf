"""Acceptance-prediction heads: model, loss, metrics, training, export and import.

head = train_heads(config)                       the best head for the data of an experiment (`data_gen.make_data`)
head = AcceptanceHead.from_pretrained(path)      an exported head, from a directory or from the hub
"""

from typing import TYPE_CHECKING

from store.lazy import lazily

if TYPE_CHECKING:
    from heads.from_config import train_heads
    from heads.model.head import AcceptanceHead
    from heads.model.provenance import Provenance
else:
    __getattr__ = lazily(__name__, __file__)

__all__ = ["AcceptanceHead", "Provenance", "train_heads"]
