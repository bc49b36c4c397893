"""How a head's norms are stored, told by evidence in the files.

Qwen3.5 and Qwen3-Next publish norms as w − 1 and convolutions as [channels, 1, width]. Who converts a checkpoint moves
the axes to [channels, width, 1] and adds the 1 to the body's norms; whether he did so to the head's cannot be seen. So
a head is used where it lies in a checkpoint whose convolutions are in the published layout, or where its file says how
its norms are stored. Values (a mean near 0 or near 1) are no evidence: a trained norm may have either.
"""

from __future__ import annotations

from .layout import Misfit
from .tensors import File, Tensors


def shifted(tensors: Tensors, files: list[File]) -> bool:
    """Whether the norms of the head in ``files`` are stored as w − 1. Raises Misfit where nothing tells."""
    said = {file.norms for file in files if file.own}
    if said:
        if said == {"w-1"} or said == {"w"}:
            return said == {"w-1"}
        raise Misfit("its file does not say how its norms are stored")
    again = "`mlxkv convert` makes one that can be used from the original checkpoint"
    if not all(file.checkpoint for file in files):
        names = ", ".join(file.path.name for file in files if not file.checkpoint)
        raise Misfit(f"{names} does not say how its norms are stored, nor does the checkpoint's index name it; {again}")
    shapes = tensors.convolutions
    if not shapes:
        raise Misfit("the file does not show how its norms are stored")
    if any(shape[-1] == 1 for shape in shapes):
        raise Misfit(f"the checkpoint was converted; whether its head was too cannot be seen; {again}")
    return True
