"""``mlxkv convert``: a model folder in MLX's format, quantised, with its prediction head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import AsJson, Flags, command, warn


@command()
def convert(
    flags: Flags,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder or Hugging Face id.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to make.")],
    quantise: Annotated[bool, typer.Option("--quantise/--no-quantise", help="Quantise its matrices.")] = True,
    bits: Annotated[int | None, typer.Option("--bits", metavar="N", help="Bits of a number (default 4).")] = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", metavar="N", help="Numbers that share a scale (default 64).")
    ] = None,
    mode: Annotated[str, typer.Option("--mode", help="affine, mxfp4, nvfp4 or mxfp8.")] = "affine",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="bf16, fp16 or fp32, of what is not quantised.", show_default=False),
    ] = None,
    plain_head: Annotated[
        bool, typer.Option("--plain-head", help="Leave the prediction head unquantised: larger, better drafts.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint through mlx-lm, and keep its multi-token-prediction head."""
    from ..errors import ConfigError
    from .start import quiet_libraries

    flags.settings()
    if not quantise and (bits is not None or group_size is not None):
        raise ConfigError("--no-quantise goes with neither --bits nor --group-size.", "Leave one of them away.")
    quiet_libraries()
    from ..models.convert import Quantisation
    from ..models.convert import convert as carry_out
    from .cache_text import size
    from .render import print_json

    how = Quantisation(mode, bits, group_size) if quantise else None
    done = carry_out(model, folder, quantisation=how, dtype=dtype, plain_head=plain_head)
    reason = done.head.reason or ("" if done.head.names else "there is none")
    if as_json:
        head = {"kept": done.head_kept, "family": done.head.family, "reason": reason}
        print_json({"path": str(done.path), "bytes": done.nbytes, "head": head})
        return
    kept = f"with its head ({done.head.family})" if done.head_kept else "without a head"
    typer.echo(f"{done.path}: {size(done.nbytes)}, {kept}")
    if done.head.names and not done.head_kept:
        warn(f"the head was not kept: {reason}.")
