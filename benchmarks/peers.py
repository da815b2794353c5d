"""The same work in the libraries that one would use instead: skorch, Lightning, Keras.

Each is given what it needs to be fast: whole windows in time-major memory from a Dataset (skorch,
Lightning), fused AdamW, no logger, no progress bar, no files. Each carries the state from window to
window, detached, as the hand-written loop does. Each returns the weights in the order of
``net2vec``.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from work import Shape, by_window, time_major

from fluxutils_py import net2vec


class Windows(Dataset):
    """The windows of an epoch in order, (S, B, F) and (S, B, 1), as items."""

    def __init__(self, x: np.ndarray, y: np.ndarray, shape: Shape) -> None:
        self.xs, self.ys = time_major(x, y)
        self.indices = shape.places

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        rows, steps = self.indices[i]
        return self.xs[steps, rows], self.ys[steps, rows]


class Carrying(nn.Module):
    """LSTM and head that keep their state from call to call, detached; ``None`` is zero."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.lstm, self.head = model[0].module, model[1]
        self.state: Any = None

    def forward(self, xs: Tensor) -> Tensor:
        out, state = by_window(self.lstm, self.head, xs, self.state)
        self.state = tuple(s.detach() for s in state)
        return out


def by_skorch(x: np.ndarray, y: np.ndarray, model: nn.Module, shape: Shape) -> Tensor:
    from skorch import NeuralNet

    starts = [steps.start == 0 for _, steps in shape.places]

    class Net(NeuralNet):
        n_batches = 0

        def train_step_single(self, batch: Any, **fit_params: Any) -> Any:
            if starts[self.n_batches % len(starts)]:
                self.module_.state = None
            self.n_batches += 1
            return super().train_step_single(batch, **fit_params)

    net = Net(
        Carrying(copy.deepcopy(model)),
        nn.MSELoss,
        optimizer=torch.optim.AdamW,
        optimizer__fused=True,
        lr=1e-3,
        max_epochs=shape.epochs,
        iterator_train__batch_size=None,  # an item is a window
        train_split=None,
        callbacks__print_log=None,
    )
    net.fit(Windows(x, y, shape))
    return net2vec(net.module_)


def by_lightning(x: np.ndarray, y: np.ndarray, model: nn.Module, shape: Shape) -> Tensor:
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    starts = [steps.start == 0 for _, steps in shape.places]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = Carrying(copy.deepcopy(model))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), fused=True)

        def training_step(self, batch: tuple[Tensor, Tensor], i: int) -> None:
            if starts[i]:
                self.net.state = None
            opt = self.optimizers()
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()

    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    module = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice: more loader processes, other hardware
        trainer = lightning.Trainer(
            max_epochs=shape.epochs,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[
                LightningEnvironment()
            ],  # else it looks for MPI, and starts it in this process
        )
        trainer.fit(module, DataLoader(Windows(x, y, shape), batch_size=None))
    return net2vec(module.net)


def by_keras(
    x: np.ndarray, y: np.ndarray, model: nn.Module, shape: Shape, stock: bool = False
) -> Tensor:
    """``LSTM(stateful=True)`` on the torch backend, with a copy of the initial state unless
    ``stock``.

    Keras has one bias where torch has two, each of which AdamW moves by a whole step: its result is
    not the same one. Needs shapes that batches and windows divide.
    """
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    class Copying(keras.layers.LSTM):
        def inner_loop(
            self, sequences: Any, initial_state: Any, mask: Any, training: bool = False
        ) -> Any:
            return super().inner_loop(
                sequences, [s.clone() for s in initial_state], mask, training=training
            )

    class Reset(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch % n_windows == 0:
                lstm.reset_state()

    b, s, h = shape.batchsize, shape.seqsize, shape.n_hidden
    n_windows = shape.n_steps // s
    lstm = (keras.layers.LSTM if stock else Copying)(h, return_sequences=True, stateful=True)
    net = keras.Sequential(
        [keras.Input(batch_shape=(b, s, shape.n_features)), lstm, keras.layers.Dense(1)]
    )
    w, u, b_ih, b_hh, v, d = (p.detach().numpy() for p in model.parameters())
    for variable, value in zip(
        net.trainable_variables, [w.T, u.T, b_ih + b_hh, v.T, d], strict=True
    ):
        variable.assign(value)  # gates are in the same order
    net.compile(keras.optimizers.AdamW(1e-3, weight_decay=1e-2, epsilon=1e-8), loss="mse")
    inputs, targets = (
        a.reshape(a.shape[0], -1, b, n_windows, s)
        .transpose(1, 3, 2, 4, 0)
        .reshape(-1, s, a.shape[0])
        for a in (x, y)
    )
    net.fit(
        inputs,
        targets,
        batch_size=b,
        epochs=shape.epochs,
        shuffle=False,
        verbose=0,
        callbacks=[Reset()],
    )
    w, u, bias, v, d = (variable.value.detach().clone() for variable in net.trainable_variables)
    return torch.cat([p.flatten() for p in (w.T, u.T, bias, torch.zeros_like(bias), v.T, d)])


PEERS: dict[str, tuple[str, Callable[..., Tensor]]] = {  # the package that each needs
    "skorch, state carried by a subclass": ("skorch", by_skorch),
    "Lightning, manual optimisation": ("lightning", by_lightning),
    "Keras stateful LSTM, torch backend, copying": ("keras", by_keras),
}
KERAS = list(PEERS)[-1]
stock_keras = functools.partial(by_keras, stock=True)
