"""Whether an installed wheel works: the kernels are in it and agree with torch's layers, a fit learns,
its file predicts the same. It needs nothing but the package: ``python tests/smoke.py``.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch

import fluxutils_py
from fluxutils_py import SequenceRegressor
from fluxutils_py.nn import GRU, LSTM, MinLSTM
from fluxutils_py.nn.kernels.library import library_in_use, native_kernels


def main() -> None:
    fluxutils_py.show_versions()
    assert library_in_use() is not None, "the wheel has no kernels, or they cannot be loaded here"
    for layer in (LSTM(3, 20), GRU(3, 20), MinLSTM(3, 20)):
        x = torch.randn(17, 11, 3)
        outputs = []
        for enabled in (True, False):
            layer.reset()
            with native_kernels(enabled):
                outputs.append(layer(x).detach())
        torch.testing.assert_close(*outputs)

    x = np.random.default_rng(0).normal(size=(2, 30, 60)).astype("float32")  # (F, N, T)
    y = 0.5 * x[:1] + np.roll(x[1:], 1, axis=2)
    est = SequenceRegressor(8, cell="lstm", epochs=60, random_state=0).fit(x, y)
    assert est.score(x, y) > 0.5, est.score(x, y)
    with tempfile.TemporaryDirectory() as folder:
        est.save(path := Path(folder, "model.pt"))
        np.testing.assert_array_equal(fluxutils_py.load(path).predict(x), est.predict(x))
    print("works")


if __name__ == "__main__":
    main()
