"""Judging and keeping what was trained."""

from fluxutils_py.evaluation.checkpoint import read_file, write_file
from fluxutils_py.evaluation.checkpointer import Checkpointer
from fluxutils_py.evaluation.selecting import bestmodelselector, initevalcby

__all__ = ["Checkpointer", "bestmodelselector", "initevalcby", "read_file", "write_file"]
