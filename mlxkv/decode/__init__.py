"""How tokens are made: requests, the engine thread, prefill in segments, the decoding loop, sampling, text."""
