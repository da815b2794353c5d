"""Training tasks: the loss of a batch is the user's, the step around it is made here."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.errors import LoadError
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.nn.states import evaluating, reset
from fluxutils_py.parallel import RankGroup, is_main_process
from fluxutils_py.reporting.publish import PublishTrainingProgress
from fluxutils_py.training.checkpointer import Checkpointer
from fluxutils_py.training.make_optimizer import make_optimizer
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.sharding import shard
from fluxutils_py.training.step_info import StepInfo
from fluxutils_py.training.task_step import Seed, TaskStep, draw, generator
from fluxutils_py.training.train_state import TrainState
from fluxutils_py.tree import named_leaves

Action = Callable[..., Any]


class BaseTrainTask:
    """What is to be learnt: a subclass says what the loss of a batch is.

    Notes
    -----
    Source: ``BaseTrainTask`` of bobbin. There, parameters and random keys go through the loss as arguments and results;
    here the model holds its parameters and buffers, and changes them in place.

    Examples
    --------
    >>> class Squares(BaseTrainTask):
    ...     def compute_loss(self, model, batch, *, step, rng):
    ...         x, y = batch
    ...         return (model(x) - y).square().mean()
    >>> model = nn.Linear(3, 1)
    >>> state = TrainState(0, model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> train_step = Squares().make_training_step_fn()
    >>> x = torch.randn(20, 3)
    >>> for _ in range(50):
    ...     state, info = train_step(state, (x, x.sum(1, keepdim=True)), 0)
    >>> state.step, info.loss < 0.01
    (50, True)
    """

    def compute_loss(self, model: nn.Module, batch: Any, *, step: int, rng: torch.Generator) -> Any:
        """The loss of a batch, a scalar tensor; or a pair of it and what else is to be known of the step.

        Parameters
        ----------
        model : nn.Module
            In training mode. Recurrent layers begin anew unless ``batch.first`` is false or the step is ``stateful``.
        batch : Any
            As the data give it.
        step : int
            Steps made before this one.
        rng : torch.Generator
            On the CPU, for random numbers of one's own. torch's global one, which dropout uses, is seeded from it.

        Returns
        -------
        loss : Tensor, or (Tensor, aux)
            ``aux`` is a mapping, which is ``StepInfo.metrics``, detached; or any other tree, its entry ``"aux"``; or
            None.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no compute_loss: define compute_loss(self, model, batch, *, step, rng)"
        )

    def batch_weight(self, batch: Any) -> float:
        """How many data the loss is a mean over, in means over several ranks; 0 for a batch of nothing.

        By default the number of elements of its first array or tensor; 1 if there is none.
        """
        return next((float(math.prod(v.shape)) for _, v in named_leaves(batch) if hasattr(v, "shape")), 1.0)

    def reduce_extra_vars(self, buffers: Mapping[str, Tensor], *, ranks: RankGroup, weight: float) -> None:
        """Make the model's buffers alike on all ranks, in place, after a step; called on every rank.

        By default floating ones, such as running means, become the mean weighted by ``weight``, how many data this
        rank's batch was of; integers become those of rank 0.
        """
        ranks.average(list(buffers.values()), weight)

    def write_trainer_log(
        self,
        state: Any,
        *,
        step_info: StepInfo,
        logger: logging.Logger | None = None,
        loglevel: int = logging.INFO,
    ) -> None:
        """Log how far training is, and the loss."""
        loss = math.nan if step_info.loss is None else step_info.loss
        (logger or logging.getLogger(__name__)).log(loglevel, "@step=%d, loss=%f", state.step, loss)

    # -- the step ------------------------------------------------------------------------------------

    def shard_batch(self, batch: Any, rank: int, size: int) -> Any:
        """A rank's share of a batch that all ranks were given; None if that is empty.

        By default all arrays of the batch are cut along their first axis; windows, by series.
        """
        return batch.shard(rank, size) if isinstance(batch, Minibatch) else shard(batch, rank, size)

    def make_training_step_fn(self, **settings: Any) -> TaskStep:
        """A function that takes one training step.

        Parameters
        ----------
        **settings
            ``comm``, ``batches``, ``clip``, ``accumulate``, ``stateful``, ``defer``: as for :class:`GradientStep`.

        Returns
        -------
        callable
            ``step_fn(state, batch, rng) -> (state, info)``. The state is the one given, changed. ``rng`` is the seed of
            the whole training, from which each step, and each rank, has numbers of its own that depend on nothing else;
            or a ``torch.Generator``, which is drawn from. ``info.batch_loss`` is None if there was nothing to
            learn from the batch. A rank that has no more batches may give None, or stop calling.

        Raises
        ------
        FloatingPointError
            In a step, if the loss or the gradient is NaN or infinite; on every rank. Parameters are then as before it.
        """
        return TaskStep(self, **settings)

    # -- actions -------------------------------------------------------------------------------------

    def make_log_writer(self, logger: logging.Logger | None = None, loglevel: int = logging.INFO) -> Action:
        """A hook that calls :meth:`write_trainer_log` on rank 0."""

        def write_log(loop: Any, step_info: StepInfo | None = None, **_: Any) -> None:
            if is_main_process(loop):
                self.write_trainer_log(loop, step_info=step_info or loop.step_info, logger=logger, loglevel=loglevel)

        return write_log

    def make_training_progress_publisher(self, writer: Any, summary_collections: Iterable[str] = ()) -> Action:
        """A hook that publishes the progress of training: :class:`PublishTrainingProgress`."""
        return PublishTrainingProgress(writer, summary_collections)

    def make_checkpoint_saver(self, path: Any, keep: int = 1) -> Action:
        """A hook that saves model, optimizer and step where :meth:`TrainTask.initialize_train_state` looks for them.

        To resume a loop exactly, use a :class:`Checkpointer` that tracks the loop and the data as well. Rank 0 writes.
        """

        def save_checkpoint(loop: Any, *_: Any, **__: Any) -> Any:
            return Checkpointer(path, keep).track(**getattr(loop, "state", loop).parts()).save(loop)

        save_checkpoint.collective = True  # type: ignore[attr-defined]  # functions have attributes
        return save_checkpoint


class TrainTask(BaseTrainTask):
    """A task that knows its model, and can begin.

    Parameters
    ----------
    model : nn.Module, class or callable
        A module is copied for each training, with its weights; a class or callable makes one, with weights that the
        seed decides.
    example_args, example_kwargs : tuple, mapping
        With these the model is called once, without a trace, before training: lazy layers learn their sizes.
    required_rngs : iterable of str
        Names of the generators that :meth:`get_rng_dict` returns.

    Notes
    -----
    Source: ``TrainTask`` of bobbin.

    Examples
    --------
    >>> class Squares(TrainTask):
    ...     def compute_loss(self, model, batch, *, step, rng):
    ...         noise = torch.randn(batch.shape, generator=self.get_rng_dict(rng)["noise"])
    ...         return model(batch + 0.1 * noise).square().mean()
    >>> task = Squares(lambda: nn.LazyLinear(1), (torch.zeros(1, 3),), required_rngs=["noise"])
    >>> state = task.initialize_train_state(0, torch.optim.Adam)
    >>> {name: tuple(p.shape) for name, p in state.params.items()}
    {'weight': (1, 3), 'bias': (1,)}
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        example_args: Sequence[Any] = (),
        example_kwargs: Mapping[str, Any] | None = None,
        required_rngs: Iterable[str] = (),
    ) -> None:
        if not callable(model):
            raise TypeError(f"model must be a torch module, or a class or function that makes one; got {model!r}")
        self._model = model
        self.example_args, self.example_kwargs = tuple(example_args), dict(example_kwargs or {})
        self.required_rngs = tuple(required_rngs)

    @property
    def model(self) -> Any:
        """The model as it was given; training works on another one, ``state.model``."""
        return self._model

    def get_rng_dict(self, rng: Seed, extra_keys: Iterable[str] = ()) -> dict[str, torch.Generator]:
        """A generator for each of ``required_rngs``, and for further names.

        What one draws has no influence on the others. A seed gives the same ones every time; a generator is drawn from.
        """
        names = (*self.required_rngs, *extra_keys)
        if twice := {n for n in names if names.count(n) > 1}:
            raise ValueError(f"names of generators must differ, {', '.join(sorted(twice))} is there twice")
        seeds = np.random.SeedSequence(draw(rng)).spawn(len(names))
        return {name: generator(seed) for name, seed in zip(names, seeds, strict=True)}

    def initialize_train_state(self, seed: Seed, opt: Any, checkpoint_path: Any = None) -> TrainState:
        """A model and its optimizer, new, or from the newest checkpoint.

        Parameters
        ----------
        seed : int or torch.Generator
            For weights that are made here.
        opt : optimizer class, functools.partial or callable
            Makes the optimizer of the parameters that require gradients.
        checkpoint_path : path-like, optional
            Of the folder of a :class:`Checkpointer` that tracks ``**state.parts()``; as if None where it holds none.

        Raises
        ------
        LoadError
            If the checkpoint is of something else.
        TypeError
            If the model or the optimizer is not made as said.
        ValueError
            If lazy layers are left without sizes, or there is nothing to train.
        """
        with seeded(draw(seed)):
            model = copy.deepcopy(self._model) if isinstance(self._model, nn.Module) else self._model()
            if not isinstance(model, nn.Module):
                raise TypeError(f"model={self._model!r} must make a torch module, it made {type(model).__name__}")
            if self.example_args or self.example_kwargs:
                self._call_once(model)
        lazy = [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]
        if lazy:
            raise ValueError(f"{', '.join(lazy)} of the model are without sizes: give the task example_args")
        if isinstance(opt, torch.optim.Optimizer):
            raise TypeError(
                "opt must be an optimizer class such as torch.optim.AdamW, a functools.partial of one, or a function "
                f"of the parameters, which are made here; got {opt!r}"
            )
        state = TrainState(0, model, make_optimizer(opt, [p for p in model.parameters() if p.requires_grad]))
        if checkpoint_path is not None:
            self._restore(state, Checkpointer(checkpoint_path))
        return state

    def _call_once(self, model: nn.Module) -> None:
        with evaluating(model):  # running means of batch normalisation stay
            reset(model)
            model(*self.example_args, **self.example_kwargs)

    def _restore(self, state: TrainState, checkpoints: Checkpointer) -> None:
        path = checkpoints.latest()
        if path is None:
            return
        found = checkpoints.read(path) or {}
        if missing := [name for name in state.parts() if name not in found]:
            raise LoadError(
                f"{path} has no {' and no '.join(missing)}, it is of {sorted(found)}; save with "
                "make_checkpoint_saver, or a Checkpointer that tracks **state.parts()"
            )
        for name, part in state.parts().items():
            try:
                part.load_state_dict(found[name])
            except Exception as error:  # there is no telling what torch raises
                raise LoadError(f"{path} does not fit, its {name}: {error}") from error
        state.step = checkpoints.latest_step()
