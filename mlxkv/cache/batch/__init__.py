"""Several sequences decoded together: batch forms of the state kinds, and what a batch of them can do."""

from .batch import Batch
from .form import BatchError, NoBatchForm, NotYet
from .obstacle import obstacle

__all__ = ["Batch", "BatchError", "NoBatchForm", "NotYet", "obstacle"]
