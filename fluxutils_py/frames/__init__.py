"""Data frames to series and back, and the times and gaps of their rows."""

from fluxutils_py.frames.frame_series import from_frame

__all__ = ["from_frame"]
