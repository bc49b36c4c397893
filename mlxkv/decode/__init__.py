"""How tokens are made: requests, the engine thread, prefill in segments, the decoding loop, sampling, text."""

from .. import numerics

numerics.prepare()  # the BLAS is chosen before anything in here imports MLX
