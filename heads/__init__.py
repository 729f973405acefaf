"""Acceptance-prediction heads: training, files, and the head itself, a torch module.

head = train_heads(config)                          the best head for an experiment (`data_gen.make_data`)
head = train_heads("data/mine", depths=(1, 2))      the same for a directory with data
head = AcceptanceHead.from_pretrained("owner/name") an exported head, from the hub or a directory
head.push_to_hub("owner/name")                      upload it with its model card
head.calibrated(head(hidden))                       acceptance probabilities of drafted tokens
head.provenance                                     a Provenance: the models, data and measures of a head
"""

from typing import TYPE_CHECKING

from store.lazy import lazy_exports

if TYPE_CHECKING:
    from heads.from_config import train_heads
    from heads.model.head import AcceptanceHead, Provenance
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "train_heads": "heads.from_config",
            "AcceptanceHead": "heads.model.head",
            "Provenance": "heads.model.head",
        },
    )

__all__ = ["AcceptanceHead", "Provenance", "train_heads"]
