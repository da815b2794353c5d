"""The face of ``csrc/``: load the native kernels, and compute layers with them."""

__all__: list[str] = []
