"""Several sequences decoded together: batch forms of the state kinds, and what a batch of them can do."""

from .batch import Batch
from .form import BatchError, NoBatchForm, NotYet
from .obstacle import obstacle, obstacle_of_drafts

__all__ = ["Batch", "BatchError", "NoBatchForm", "NotYet", "obstacle", "obstacle_of_drafts"]
