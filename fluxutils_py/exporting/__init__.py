"""Models as files that run without this package: ONNX, and programs of torch.export."""

from fluxutils_py.exporting.export_files import ExportedModel, read_metadata, write_graph
from fluxutils_py.exporting.graph import Graph, initial_of
from fluxutils_py.exporting.steps import ContextWindow, InitialState, ModelStep

__all__ = [
    "ContextWindow",
    "ExportedModel",
    "Graph",
    "InitialState",
    "ModelStep",
    "initial_of",
    "read_metadata",
    "write_graph",
]
