"""Training tasks: you define the loss of a batch, the task makes the training step."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.bobbin.evaluation import raise_undefined
from fluxutils_py.bobbin.summaries import PublishTrainingProgress
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.nn.states import evaluating, reset
from fluxutils_py.parallel import RankGroup, is_main_process
from fluxutils_py.training.batch_step import BatchStep, shard_batch
from fluxutils_py.training.checkpointer import Checkpointer
from fluxutils_py.training.loop import Loop
from fluxutils_py.training.make_optimizer import make_optimizer
from fluxutils_py.training.step_info import StepInfo
from fluxutils_py.training.train_state import TrainState, set_vars
from fluxutils_py.tree import as_tensor, named_leaves, tree_map

Action = Callable[..., Any]
Seed = int | torch.Generator


class BaseTrainTask:
    """Base class of training tasks: a subclass defines the loss of a batch, ``compute_loss``.

    Notes
    -----
    Source: ``BaseTrainTask`` of bobbin. There the loss takes and returns parameters and random
    keys; here the model holds its parameters and buffers, and the step changes them in place.

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
        """Return the loss of a batch, a scalar tensor, or a pair of the loss and auxiliary outputs.

        Parameters
        ----------
        model : nn.Module
            In training mode. Recurrent layers are reset unless ``batch.first`` is false or the step
            is ``stateful``.
        batch : Any
            A batch of the data.
        step : int
            Number of steps completed before this one.
        rng : torch.Generator
            CPU generator for your random numbers. torch's global generator, which dropout uses, is
            seeded from it.

        Returns
        -------
        loss : Tensor, or (Tensor, aux)
            ``aux`` is a mapping, which becomes ``StepInfo.metrics``, detached; or another tree,
            which becomes its entry ``"aux"``; or None.
        """
        raise_undefined(self, "compute_loss(self, model, batch, *, step, rng)")

    def batch_weight(self, batch: Any) -> float:
        """Return the weight of the batch in means over ranks: the number of data in its loss; 0 if
        it is empty.

        By default the number of elements of the first array or tensor of the batch; 1 if there is
        none.
        """
        for _, leaf in named_leaves(batch):
            if hasattr(leaf, "shape"):
                return float(math.prod(leaf.shape))
        return 1.0

    def reduce_extra_vars(
        self, buffers: Mapping[str, Tensor], *, ranks: RankGroup, weight: float
    ) -> None:
        """Make the model's buffers equal on all ranks, in place. Every rank calls this after a
        step.

        By default floating-point buffers, such as running means, become their mean over ranks,
        weighted by ``weight``, the number of data in this rank's batch. Integer buffers become the
        values of rank 0.
        """
        ranks.average(list(buffers.values()), weight)

    def write_trainer_log(
        self,
        state: Loop | TrainState,
        *,
        step_info: StepInfo | None = None,
        logger: logging.Logger | None = None,
        loglevel: int = logging.INFO,
    ) -> None:
        """Log the step and the loss; the step alone without ``step_info``."""
        logger = logger or logging.getLogger(__name__)
        if step_info is None:
            logger.log(loglevel, "@step=%d", state.step)
            return
        # None if the batch had nothing to learn from; %f needs a number
        loss = math.nan if step_info.loss is None else step_info.loss
        logger.log(loglevel, "@step=%d, loss=%f", state.step, loss)

    # -- the step ----------------------------------------------------------------------------------

    def shard_batch(self, batch: Any, rank: int, size: int) -> Any:
        """Return a rank's part of a batch that all ranks have; None if the part is empty.

        By default, split all arrays of the batch along their first axis; split windows by series.
        """
        return shard_batch(batch, rank, size)

    def make_training_step_fn(
        self, **settings: Any
    ) -> Callable[[TrainState, Any, Seed], tuple[TrainState, StepInfo]]:
        """Return a function that takes one training step.

        Parameters
        ----------
        **settings
            ``comm``, ``batches``, ``clip``, ``accumulate``, ``precision``, ``stateful``, ``defer``:
            as for :class:`GradientStep`.

        Returns
        -------
        callable
            ``step_fn(state, batch, rng) -> (state, info)``. It changes ``state`` in place and
            returns it. ``rng`` is the seed of the training, from which alone each step and rank
            derives its random numbers, or a ``torch.Generator`` to draw from. ``info.batch_loss``
            is None if the batch has nothing to learn from. A rank without further batches passes
            None or stops calling.

        Raises
        ------
        FloatingPointError
            In a step, on every rank, if the loss or the gradient is NaN or infinite. The parameters
            do not change.
        """
        bound: list[TaskStep] = []

        def train_step(state: TrainState, batch: object, rng: Seed) -> tuple[TrainState, StepInfo]:
            # not bound again at each step, which would lose the gradients that wait for more
            if not bound or (bound[0].model, bound[0].optimizer) != (state.model, state.opt):
                bound[:] = [TaskStep(self, state, **settings)]
            bound[0].state = state
            bound[0].seed = rng
            return state, bound[0].train_step(batch) or StepInfo(None, 0)

        return train_step

    # -- actions -----------------------------------------------------------------------------------

    def make_log_writer(
        self, logger: logging.Logger | None = None, loglevel: int = logging.INFO
    ) -> Action:
        """Return a hook that calls :meth:`write_trainer_log` on rank 0."""

        def write_log(loop: Loop | TrainState, step_info: StepInfo | None = None, **_: Any) -> None:
            if is_main_process(loop):
                info = getattr(loop, "step_info", None) if step_info is None else step_info
                self.write_trainer_log(loop, step_info=info, logger=logger, loglevel=loglevel)

        return write_log

    def make_training_progress_publisher(
        self, writer: object, summary_collections: Iterable[str] = ()
    ) -> Action:
        """Return a hook that publishes the progress of training, a
        :class:`PublishTrainingProgress`.
        """
        return PublishTrainingProgress(writer, summary_collections)

    def make_checkpoint_saver(self, path: str | os.PathLike[str], keep: int = 1) -> Action:
        """Return a hook that saves model, optimizer and step for
        :meth:`TrainTask.initialize_train_state`.

        To resume a loop exactly, use a :class:`Checkpointer` that tracks the loop and the data as
        well. Rank 0 writes.
        """

        def save_checkpoint(loop: Any, *_: Any, **__: Any) -> object:
            state = getattr(loop, "state", loop)  # a custom loop passes the state itself
            return Checkpointer(path, keep).track(**state.parts()).save(loop)

        save_checkpoint.collective = True  # type: ignore[attr-defined]  # functions have attributes
        return save_checkpoint


class TrainTask(BaseTrainTask):
    """Training task with a model, which can create the initial training state.

    Parameters
    ----------
    model : nn.Module, class or callable
        A module is copied for each training, with its weights. A class or callable makes a new
        module, with weights drawn from the seed.
    example_args, example_kwargs : tuple, mapping
        Arguments of one call before training, so that lazy layers infer their sizes; it changes
        nothing else. NumPy arrays become tensors.
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
        self.model = model  # training changes state.model instead
        self.example_args = tuple(example_args)
        self.example_kwargs = dict(example_kwargs or {})
        self.required_rngs = tuple(required_rngs)

    def get_rng_dict(self, rng: Seed, extra_keys: Iterable[str] = ()) -> dict[str, torch.Generator]:
        """Return a generator for each name in ``required_rngs`` and ``extra_keys``.

        The generators are independent. A seed gives the same generators every time; a
        ``torch.Generator`` advances.
        """
        names = (*self.required_rngs, *extra_keys)
        # spawned, not counted up from the seed: neighbouring seeds must not share numbers
        seeds = np.random.SeedSequence(draw(rng)).spawn(len(names))
        return {name: generator(seed) for name, seed in zip(names, seeds, strict=True)}

    def initialize_train_state(
        self, seed: Seed, opt: Any, checkpoint_path: str | os.PathLike[str] | None = None
    ) -> TrainState:
        """Return a new model and optimizer, or restore them from the newest checkpoint.

        Parameters
        ----------
        seed : int or torch.Generator
            Seed of the initial weights.
        opt : optimizer class, functools.partial or callable
            Makes the optimizer from the parameters that require gradients.
        checkpoint_path : path-like, optional
            Folder of a :class:`Checkpointer` that tracks ``**state.parts()``; ignored if it holds
            no checkpoint.

        Raises
        ------
        LoadError
            If the checkpoint does not fit the model and the optimizer.
        TypeError
            If ``opt`` does not make an optimizer.
        ValueError
            If lazy layers have no sizes, or no parameter requires gradients.
        """
        given: Any = self.model
        with seeded(draw(seed)):
            # copied, so that each training begins with the same weights
            model = copy.deepcopy(given) if isinstance(given, nn.Module) else given()
            if self.example_args or self.example_kwargs:
                with evaluating(model):  # keep the running means of batch normalisation
                    reset(model)  # a given module may have a state for another batch size
                    example = self.example_args, self.example_kwargs
                    args, kwargs = tree_map(
                        lambda v: as_tensor(v) if isinstance(v, np.ndarray) else v, example
                    )
                    model(*args, **kwargs)
        # the optimizer would get parameters without values
        if any(map(nn.parameter.is_lazy, model.parameters())):
            raise ValueError("parameters of the model have no sizes: give the task example_args")
        if isinstance(opt, torch.optim.Optimizer):
            raise TypeError(
                "opt must be an optimizer class such as torch.optim.AdamW, or a function of the "
                f"parameters, which are made here; got {opt!r}"
            )
        trainable = [p for p in model.parameters() if p.requires_grad]
        state = TrainState(0, model, make_optimizer(opt, trainable))
        if checkpoint_path is not None:
            saves = Checkpointer(checkpoint_path).track(**state.parts())
            if saves.restore(comm=None):
                state.step = saves.latest_step()
        return state


def initialize_train_state(
    apply_fn: nn.Module,
    init_model_vars: Mapping[str, Any],
    tx: Any,
    checkpoint_path: str | os.PathLike[str] | None = None,
) -> TrainState:
    """Return the training state of a copy of a module with these parameters and buffers, or restore
    it from the newest checkpoint.

    Parameters
    ----------
    apply_fn : nn.Module
    init_model_vars : mapping of str to tensor or array
        By the names of :attr:`TrainState.model_vars`; those left out keep the module's values.
    tx : optimizer class, functools.partial or callable
    checkpoint_path : path-like, optional
        See :meth:`TrainTask.initialize_train_state`, also for the errors.
    """
    model = copy.deepcopy(apply_fn)
    set_vars(model, init_model_vars)
    return TrainTask(lambda: model).initialize_train_state(0, tx, checkpoint_path)


# -- the training step -----------------------------------------------------------------------------


class TaskStep(BatchStep):
    """Training step of a task, for a :class:`Loop`, which counts steps from ``state.step``.

    Parameters
    ----------
    task : BaseTrainTask
    state : TrainState
        Trained in place.
    seed : int or torch.Generator
        Seed, step number and rank determine the random numbers of a step, so resuming needs no
        saved generator.
    **settings
        ``comm``, ``batches``, ``clip``, ``accumulate``, ``precision``, ``stateful``, ``defer``: see
        :class:`GradientStep`. Several ranks divide a batch with :meth:`BaseTrainTask.shard_batch`,
        and :meth:`BaseTrainTask.batch_weight` weights the parts.

    Notes
    -----
    To resume exactly in another process, call ``Checkpointer(dir).track(**state.parts(), loop=loop,
    data=data)``, and ``restore()`` before the run. The loop's part of the checkpoint includes
    recurrent states.
    """

    name = "task"

    def __init__(self, task: Any, state: TrainState, seed: Seed = 0, **settings: Any) -> None:
        self.task = task
        self.state = state
        self.seed = seed
        super().__init__(
            self._loss_and_aux,
            state.model,
            state.opt,
            weigh=task.batch_weight,
            shard=task.shard_batch,
            **settings,
        )

    @property
    def step(self) -> int:
        """Step number of the state."""
        return self.state.step

    def train_step(self, batch: object) -> StepInfo | None:
        state = self.state
        # asked first: train() goes through all modules
        if not state.model.training:
            state.model.train()
        # a rank whose batches are used up takes part in the steps of the others without one
        with self.ranks.step(lambda: self.train_step(None)):
            info = super().train_step(batch)
            has_trained = info is not None and info.batch_loss is not None
            if has_trained and not self.ranks.is_single and state.extra_vars:
                self.task.reduce_extra_vars(state.extra_vars, ranks=self.ranks, weight=self.weight)
        if info is not None:
            state.step += 1
        return info

    def _loss_and_aux(self, model: Any, batch: object) -> tuple[Any, Mapping[str, Any]]:
        """Return the loss of a batch and other values, with the random numbers of this step and
        rank.
        """
        rng = self.seed
        if not isinstance(rng, torch.Generator):
            place = (self.state.step, self.ranks.rank)
            rng = generator(np.random.SeedSequence(rng, spawn_key=place))
        # dropout draws from torch's own; reading that of another GPU would start a context there
        with seeded(draw(rng), [p.device for p in self.params[:1] if p.is_cuda]):
            result = self.task.compute_loss(model, batch, step=self.state.step, rng=rng)
        loss, aux = result if isinstance(result, tuple) else (result, None)
        if aux is None:
            return loss, {}
        return loss, aux if isinstance(aux, Mapping) else {"aux": aux}

    def on_start(self, loop: Loop) -> None:
        """Begin a run, perhaps from a restored checkpoint."""
        self.state.step = loop.step


def draw(rng: Seed) -> int:
    """Return the given seed, or draw one from the given generator."""
    if not isinstance(rng, torch.Generator):
        return int(rng)
    return int(torch.randint(2**63 - 1, (), generator=rng))


def generator(seed: np.random.SeedSequence) -> torch.Generator:
    """Return a torch generator seeded from a NumPy seed sequence."""
    number = seed.generate_state(1, np.uint64)[0] >> np.uint64(1)  # torch's seeds are signed
    return torch.Generator().manual_seed(int(number))
