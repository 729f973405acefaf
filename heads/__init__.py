"""Acceptance-prediction heads: the head itself, its loss and metrics, the training of a whole sweep at once, export and import."""

from heads.head import AcceptanceHead
from heads.provenance import Provenance

__all__ = ["AcceptanceHead", "Provenance"]
