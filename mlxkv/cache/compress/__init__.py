"""When a layer with compressed attention makes an entry, of which rows, and what of them its ring must keep.

``geometry``: the numbers of a ring. ``plan``: the rules as a loop over tokens. ``arrays``: the same as MLX operations
of fixed shapes. ``check``: what a ring cannot serve is refused when an engine is opened. Nothing here holds state: that
is ``cache/compressed.py``.
"""
