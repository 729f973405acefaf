"""Acceptance-prediction heads: the head itself, its loss and metrics, the training of a whole sweep at once, export and
import.
"""

from heads.model.head import AcceptanceHead
from heads.model.provenance import Provenance

__all__ = ["AcceptanceHead", "Provenance"]
