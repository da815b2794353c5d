"""Run exported files, as their consumers do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fluxutils_py.exporting.export_files import SERIES, format_of, read_metadata, require
from fluxutils_py.exporting.graph import quiet_exporters


class ExportedModel:
    """An exported file of either format, run window by window.

    Parameters
    ----------
    path : str or path-like
    n_series : int

    Attributes
    ----------
    metadata : dict
    state : list of ndarray
        Of all series; at first the initial one.
    """

    def __init__(self, path: Any, n_series: int) -> None:
        self.metadata = read_metadata(path)
        self.state = [
            np.full([n_series if n == SERIES else n for n in s["shape"]], s["initial"], s["dtype"])
            for s in self.metadata["states"]
        ]
        self._session: Any = None
        if format_of(path) == "torch":
            # torch warns of paths that do not end in .pt2, and up to 2.12 of the memory that it reads into
            with open(path, "rb") as file, quiet_exporters():
                self._program = torch.export.load(file).module()
        else:
            runtime = require("onnxruntime")
            options = runtime.SessionOptions()
            options.intra_op_num_threads = 1
            self._session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(self, *xs: np.ndarray) -> list[np.ndarray]:
        """Return the outputs (S, B, G) for a window (S, B, F) of each input, and move the state on."""
        dtypes = [entry["dtype"] for entry in self.metadata["inputs"]]
        given = [np.ascontiguousarray(x, dtype) for x, dtype in zip(xs, dtypes, strict=True)] + self.state
        if self._session is not None:
            names = [entry["name"] for part in ("inputs", "states") for entry in self.metadata[part]]
            found = self._session.run(None, dict(zip(names, given, strict=True)))
        else:
            with torch.no_grad():
                found = [t.numpy() for t in self._program(*map(torch.from_numpy, given))]
        n = len(found) - len(self.state)
        self.state = list(found[n:])
        return list(found[:n])
