"""Fit an estimator: read the data, build model, optimizer and loop, then train."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from fluxutils_py.data.digest import shapes_and_digests
from fluxutils_py.errors import warn
from fluxutils_py.estimator.building import (
    make_generator,
    require_gradients,
)
from fluxutils_py.estimator.fit_data import (
    FitData,
    ReadData,
    Split,
    read_data,
    spec_of_call,
    total_batchsize,
)
from fluxutils_py.estimator.fit_loop import FitLoop, cut_for_model, publish
from fluxutils_py.estimator.fit_warnings import (
    warn_few_updates,
    warn_nothing_learnt,
    warn_one_class,
    warn_other_optimizer,
    warn_single_steps,
    warn_truncated_layers,
    watch_scales,
    watch_targets,
)
from fluxutils_py.estimator.fitted_parts import BaseSeriesEstimator, FittedParts, input_schema
from fluxutils_py.estimator.resuming import restore_newest, saved_minibatch_size, with_checkpoints
from fluxutils_py.estimator.same_fit import (
    collective_settings,
    require_same_fit,
    require_same_inputs,
)
from fluxutils_py.estimator.spec import Settings
from fluxutils_py.inputs.inputs import Schema
from fluxutils_py.inputs.sharded_data import sharded_reader
from fluxutils_py.inputs.targets import SeriesReader
from fluxutils_py.nn.copying import deep_copy
from fluxutils_py.nn.model_windows import (
    takes_gaps,
)
from fluxutils_py.nn.states import reset
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.rank_group import ranks_of_call
from fluxutils_py.reporting.progress import say_stage
from fluxutils_py.sklearn_callbacks import ATTRIBUTE, begin_fit, hooks_of
from fluxutils_py.training import Checkpointer
from fluxutils_py.training.hooks import as_callbacks
from fluxutils_py.training.minibatch import TensorBatches
from fluxutils_py.training.window_step import differentiate_windows, evaluate_windows

VALIDATION_FRACTION = 0.1  # that early stopping holds out


@dataclass(frozen=True)
class BegunFit:
    """A fit whose data have been read, and that can be trained.

    Attributes
    ----------
    est : Estimator
    settings : Settings
    data : ReadData
    ranks : RankGroup
    rng : numpy.random.Generator
        Source of all randomness, equal on all ranks.
    seed : int
        Of held-out validation data, equal on all ranks.
    saved : mapping or None
        The size of the minibatches of a checkpoint that the fit continues from.
    earlier : Estimator or None
        The estimator, if this fit continues its last one.
    epochs : int or None
        Of this call.
    is_first : bool
        Whether no later call is announced that would go on from it.
    task : callable or None
        Begins the task of scikit-learn's callbacks, and returns what ends it.
    """

    est: BaseSeriesEstimator
    settings: Settings
    data: ReadData
    ranks: RankGroup
    rng: np.random.Generator
    seed: int
    saved: Mapping[str, Any] | None
    earlier: BaseSeriesEstimator | None
    epochs: int | None
    is_first: bool
    task: Callable[..., Callable[[], None]] | None

    def cut(self, settings: Settings) -> FitData:
        """Cut the data into the windows of a fit, and of its validation, if there is any."""
        spec = spec_of_call(settings, self.epochs, self.data.is_fit)
        batchsize = total_batchsize(settings, self.ranks.size, self.saved)
        return self.data.cut(settings, spec, batchsize, self.early_stopping_split())

    def early_stopping_split(self) -> Split | None:
        """Return what early stopping holds out; None where it does not."""
        data = self.data
        if not (self.settings.early_stopping and data.is_fit and data.validation_data is None):
            return None
        return data.split(VALIDATION_FRACTION, self.seed)

    def train(self, loop: FitLoop) -> None:
        """Train, and keep the attributes of the estimator up to date: run the epochs that are left,
        after those of a checkpoint.

        The estimator does not change before training begins. A later error restores it if no update
        was made, or, unless it is an interrupt, if this fit replaces an earlier one.
        """
        est = self.est
        ranks = self.ranks
        # now, when a model exists that tells what it sees; the first fit has said it
        if ranks.rank == 0:
            _warn_about(loop, is_first=self.is_first)
        if not ranks.is_single:
            require_same_fit(loop)
        end_task = None
        if self.task is not None:
            fitted = partial(_fitted_now, est, alone=not ranks.is_single)
            end_task = self.task(n_epochs=loop.epochs, fitted=fitted)
        callbacks = as_callbacks(loop.data.settings.callbacks)
        if vars(est).get(ATTRIBUTE):
            callbacks = [*callbacks, *hooks_of(est)]
        has_checkpoints = has_checkpointers(callbacks)
        # a partial_fit may be of data unlike those before
        target_sums = watch_targets(loop) if self.data.is_fit else []
        with _restoring(est, loop):
            loop.estimator = est
            loop.shared_data = {
                "estimator": est,
                "model": loop.model,
                "optimizer": loop.optimizer,
            }
            if has_checkpoints:
                callbacks = with_checkpoints(callbacks, loop, est)
            for callback in callbacks:
                loop.hooks.attach(callback)
            begin_attributes(est, loop)
            with loop.surroundings():
                continues = loop.resume
                if has_checkpoints:
                    continues |= _restore(est, loop, callbacks)
                if not continues:
                    loop.prepare()
                loop.run_epochs(loop.passes, loop.epochs)
        if end_task is not None:
            end_task()
        warn_nothing_learnt(loop, target_sums)


@contextmanager
def begun_fit(
    est: BaseSeriesEstimator,
    x: object,
    y: object,
    sample_weight: object = None,
    lengths: object = None,
    starts: object = None,
    sharded: bool = False,
    *,
    validation_data: object = None,
    epochs: int | None = None,
    classes: object = None,
    resume: bool = False,
    is_fit: bool = False,
) -> Iterator[BegunFit]:
    """Read the data of a fit, alone or together with the ranks of the estimator's ``comm``.

    The estimator does not change. Parameters are those of ``Estimator.fit``, and:

    Parameters
    ----------
    classes : array-like, optional
        All labels, where ``y`` may lack some; see ``EstimatorClassifier.partial_fit``.
    resume : bool
        Whether to continue with the estimator's model and optimizer, if it has any.
    is_fit : bool
        Whether this is a call of ``fit``, whose length the user set: it holds out validation data
        if the settings ask for it, and warns of few updates.
    """
    settings = est.resolved_params()
    earlier = est if resume and hasattr(est, "model_") else None
    parts = None if earlier is None else earlier.fitted_parts_
    with ranks_of_call(settings.comm, "fit", sharded) as ranks:
        callbacks = as_callbacks(settings.callbacks)
        if not ranks.is_single:
            with_hooks = replace(settings, callbacks=callbacks)
            ranks.require_equal(collective_settings(with_hooks, earlier is not None, epochs))
        require_gradients("fit")
        rng, seed = _randomness(settings, parts, ranks)
        # before data are read, as it decides how they are cut
        saved = None
        if earlier is None and has_checkpointers(callbacks):
            saved = saved_minibatch_size(callbacks, ranks)
        spec_of_call(settings, epochs, is_fit)  # raises its errors before anything is read
        codec = None
        schema = Schema(type(est).__name__, settings.n_timesteps)
        if parts is not None:
            codec = parts.codec
            schema = input_schema(est, settings, parts)
        data = read_data(
            settings,
            schema,
            x,
            y,
            sample_weight,
            lengths,
            starts,
            reader=sharded_reader(ranks) if sharded else SeriesReader(),
            validation_data=validation_data,
            classes=classes,
            earlier=codec,
            is_fit=is_fit,
        )
        task = None
        if ranks.rank == 0:
            given = {"sample_weight": sample_weight, "lengths": lengths, "starts": starts}
            task = _task_of(est, x, y, given)
        is_first = is_fit and not resume
        yield BegunFit(
            est, settings, data, ranks, rng, seed, saved, earlier, epochs, is_first, task
        )


def _randomness(
    settings: Settings, parts: FittedParts | None, ranks: RankGroup
) -> tuple[np.random.Generator, int]:
    """Return the generator of a fit, that of an earlier one if there are ``parts`` of it, and the
    seed of held-out data, of rank 0 on all ranks.

    Generators are copied, so that the user's advances only once training has begun.
    """
    rng = make_generator(copy.deepcopy(settings.random_state))
    seed = int(make_generator(copy.deepcopy(settings.random_state)).integers(2**31))
    if parts is not None:
        rng = copy.deepcopy(parts.rng)
    of_first: tuple[np.random.Generator, int] = ranks.allgather((rng, seed))[0]
    return of_first


def _task_of(
    est: BaseSeriesEstimator, x: object, y: object, given: dict[str, object]
) -> Callable[..., Callable[[], None]] | None:
    """Return what begins the task of scikit-learn's callbacks; None without any."""
    if not vars(est).get(ATTRIBUTE):
        return None
    metadata = {name: value for name, value in given.items() if value is not None}
    return partial(begin_fit, est, x, y, metadata)


def _warn_about(loop: FitLoop, *, is_first: bool) -> None:
    """Warn about data that the model is likely to learn the wrong thing from, and of few updates,
    if the fit ``is_first``; of one that continues, about its optimizer alone.
    """
    if loop.resume:
        warn_other_optimizer(loop)
        return
    warn_single_steps(loop.data.inputs, loop.model)
    warn_one_class(loop.data.codec.classes)
    if not loop.makes_updates:
        return
    if loop.data.spec.gradient == "exact":
        warn_truncated_layers(loop.model)
    if not takes_gaps(loop.model):
        watch_scales(loop.windows, loop.model)
    if is_first:
        warn_few_updates(loop)


def has_checkpointers(callbacks: list[Any]) -> bool:
    """Return whether a fit may continue from a checkpoint."""
    return any(isinstance(callback, Checkpointer) for callback in callbacks)


# -- the estimator --------------------------------------------------------------------------------


def begin_attributes(est: BaseSeriesEstimator, loop: FitLoop) -> None:
    """Set the model, and the attributes that depend on the data."""
    data = loop.data
    inputs = data.inputs
    codec = data.codec
    layout = inputs.layout
    n_steps = 0
    longest = int(inputs.all_series().length.max())
    if loop.resume:
        layout = est.fitted_parts_.layout
        n_steps = est.fitted_parts_.n_steps
        longest = est.fitted_parts_.longest
    est.model_ = loop.model
    est.optimizer_ = loop.optimizer
    est.fitted_parts_ = FittedParts(
        layout,
        codec,
        loop.rng,
        # one that follows the length of the fit ends with it
        scheduler=None if data.spec.schedule_follows_length else loop.scheduler,
        n_steps=n_steps,
        choice=data.settings.choice,
        data=shapes_and_digests(data.windows, data.validation),
        longest=longest,
    )
    if loop.resume:
        return
    est.n_features_in_ = inputs.columns
    est.n_outputs_ = data.n_outputs
    est.__dict__.pop("feature_names_in_", None)  # of an earlier fit, on named features
    if inputs.names is not None:
        est.feature_names_in_ = inputs.names
    if codec.classes is not None:
        est.classes_ = codec.classes
    n_parameters = sum(p.numel() for p in est.model_.parameters())
    est.grad_ = torch.zeros(n_parameters, dtype=loop.windows.dtype)
    publish(est, [], 0)


def _restore(est: BaseSeriesEstimator, loop: FitLoop, callbacks: list[Any]) -> bool:
    """Restore the newest checkpoint, if there is one, and say where the fit goes on."""
    if loop.resume or not restore_newest(callbacks, loop.ranks):
        return False
    publish(est, loop.history, loop.step - loop.epoch_step)
    epochs = loop.epochs
    n_done = loop.epoch - loop.start_epoch
    if n_done < epochs:
        line = f"a checkpoint: continues at step {loop.step}, in epoch {loop.epoch + 1}"
        say_stage(loop.data.settings.verbose, loop.ranks, line)
    if n_done > epochs:
        warn(
            f"the checkpoint is of {n_done} epochs, more than epochs={epochs}: this is the "
            "model after all of them; give the Checkpointer another folder to train a "
            "shorter time"
        )
    return True


@contextmanager
def _restoring(est: BaseSeriesEstimator, loop: FitLoop) -> Iterator[None]:
    """Restore the estimator after an error if there was no update, or, unless it is an interrupt,
    if this fit replaces another.

    Parameters need no copy: without an update they are as before, and the model of a fit that
    replaces another is a new one.
    """
    attributes = dict(vars(est))
    buffers = [b.clone() for b in loop.model.buffers()]
    step = loop.trainer
    ranks = loop.ranks
    try:
        yield
    except BaseException as error:
        step.discard()
        # an error may have left one rank half updated
        step.n_updates = ranks.resynchronize(loop.model, loop.optimizer, step.n_updates)
        replaces = "model_" in attributes and not loop.resume
        if step.n_updates == 0 or (replaces and not ranks.is_interrupt(error)):
            est.__dict__.clear()
            est.__dict__.update(attributes)
            for buffer, value in zip(loop.model.buffers(), buffers, strict=True):
                buffer.copy_(value)
            groups = loop.optimizer.param_groups
            for group, values in zip(groups, loop.groups, strict=True):
                group.clear()
                group.update(values)
        raise
    finally:
        # also after an interrupt, so that predict begins with the zero state
        reset(loop.model)
        loop.model.eval()
        parts = vars(est).get("fitted_parts_")
        if parts is not None and parts.rng is loop.rng and not loop.resume:
            # loop used a copy: the user's own generator advances like it
            make_generator(loop.data.settings.random_state)


def _fitted_now(est: BaseSeriesEstimator, alone: bool) -> dict[str, Any]:
    """Return copies of what a fit goes on to change; ``alone`` for a copy that predicts on its rank
    alone.
    """
    model = deep_copy(est.model_)
    pairs = zip(est.model_.parameters(), model.parameters(), strict=True)
    # the optimizer of the copy has the parameters of the copy
    optimizer = copy.deepcopy(est.optimizer_, {id(p): twin for p, twin in pairs})
    parts = est.fitted_parts_
    attributes = {
        "model_": reset(model).eval(),
        "optimizer_": optimizer,
        "fitted_parts_": replace(parts, rng=copy.deepcopy(parts.rng), scheduler=None),
    }
    return attributes | {"comm": None} if alone else attributes


# -- a pass without updates -----------------------------------------------------------------------


def run_evaluate(
    est: BaseSeriesEstimator,
    x: object,
    y: object,
    sample_weight: object,
    lengths: object,
    starts: object,
    sharded: bool,
    *,
    gradient: bool = False,
    whole: bool = False,
) -> float | tuple[float, Tensor]:
    """Run an epoch without updates; return its loss, and its mean gradient if asked for.

    It walks whole series, as ``predict`` does; ``whole``: without burn-in.
    """
    settings = est.resolved_params()
    with ranks_of_call(settings.comm, "evaluate", sharded) as ranks:
        told: dict[str, object] = {"gradient": bool(gradient)}
        if not sharded:  # with shards, the pool of series compares the weights
            told["sample_weight"] = "none" if sample_weight is None else "given"
        ranks.require_equal(told)
        if gradient:
            require_gradients("evaluate(gradient=True)")
        check_is_fitted(est, "model_")
        spec = replace(spec_of_call(settings, None, False), rebatch=False)
        if whole:
            spec = replace(spec, burn_in=0)
        parts = est.fitted_parts_
        read = read_data(
            settings,
            input_schema(est, settings, parts),
            x,
            y,
            sample_weight,
            lengths,
            starts,
            reader=sharded_reader(ranks) if sharded else SeriesReader(),
            earlier=parts.codec,
        )
        data = read.cut(settings, spec, total_batchsize(settings, ranks.size))
        if not (sharded or ranks.is_single):
            require_same_inputs(ranks, data.inputs)
        data = cut_for_model(data, est.model_)
        parameter = next(est.model_.parameters())
        batches = TensorBatches(
            data.windows, parameter.dtype, parameter.device, rank=ranks.rank, size=ranks.size
        )
        arguments = (est.model_, data.loss, batches, ranks, data.spec.precision)
        if not gradient:
            return evaluate_windows(*arguments)
        # cuDNN computes no gradients in evaluation mode
        with torch.backends.cudnn.flags(enabled=False):
            return differentiate_windows(*arguments, data.spec.gradient)
