"""What x and y may be: arrays, views, frames, files, labels, and the series of each rank."""

from fluxutils_py.inputs.inputs import as_series

__all__ = ["as_series"]
