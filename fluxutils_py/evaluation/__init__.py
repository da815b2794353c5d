"""Judging and keeping what was trained."""

from fluxutils_py.evaluation.checkpoint import read_file, write_file

__all__ = ["read_file", "write_file"]
