"""Fit a ready-made estimator: choose its model and calibrate its intervals by fits on a part of the
data, and fit what has a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fluxutils_py.auto.calibrating import HeldOut
from fluxutils_py.auto.choice_of_model import DataSize
from fluxutils_py.auto.closed_form import ClosedFormHead
from fluxutils_py.auto.closed_form_fit import (
    ClosedFormTask,
    fit_closed_form_parts,
    in_long_windows,
)
from fluxutils_py.auto.intervals import calibrate
from fluxutils_py.auto.last_targets import steps_to_learn_from
from fluxutils_py.auto.trials import GAINS, choice_after_trials, errors_by_block
from fluxutils_py.data import SeriesArray
from fluxutils_py.data.blocks import block_slices
from fluxutils_py.errors import DataError, ShapeError, SpecError, warn
from fluxutils_py.estimator.fit_data import FitData, Split, spec_of_call, total_batchsize
from fluxutils_py.estimator.fit_loop import FitLoop
from fluxutils_py.estimator.fitting import BegunFit, begun_fit
from fluxutils_py.estimator.same_fit import require_same_fit
from fluxutils_py.estimator.spec import Settings
from fluxutils_py.estimator.streams.conformal import read_levels
from fluxutils_py.inputs.inputs import Inputs
from fluxutils_py.nn.closed_form_model import ClosedFormModel, closed_form_parts, is_closed_form
from fluxutils_py.nn.copying import deep_copy
from fluxutils_py.nn.model_windows import takes_gaps
from fluxutils_py.nn.ready_made import LinearPlusNetwork, WithIntervals
from fluxutils_py.nn.states import reset
from fluxutils_py.parallel import RankGroup
from fluxutils_py.reporting.progress import say_stage, show_stage
from fluxutils_py.training.minibatch import TensorBatches
from fluxutils_py.training.step_info import StepInfo

TRIAL_FRACTION = 0.2
MOST_HELD_OUT = 100_000  # steps of a trial
MAX_IN_TIME = 9  # of which a trial holds out the ends, not whole ones
MOST_KEPT = 1 << 26  # numbers that do not learn, of all steps
LEAST_UPDATES = 60  # of a trial
QUIET: dict[str, Any] = {"callbacks": None, "verbose": False}
WARM_UP = 256  # steps before a part that is held out, for the state


def run_auto_fit(est: Any, *series: Any, groups: object = None, **call: Any) -> None:
    """Fit a ready-made estimator; the arguments are those of :func:`begun_fit`."""
    is_fit = call.get("is_fit", False)
    continues = call["resume"] and hasattr(est, "model_")
    _require_whole_fit(est, is_fit and not continues, sharded=series[-1])
    if continues and not is_fit and is_closed_form(est.model_):
        call["resume"] = continues = _begin_anew(est)
    with begun_fit(est, *series, **call) as begun:
        data = begun.data
        counted = steps_to_learn_from(data.inputs, data.targets, data.weight, data.reader)
        groups = read_groups(groups, data.inputs)
        begun = replace(begun, data=replace(data, counted=counted, groups=groups))
        try:
            _run_begun(begun, continues, has_gaps=False)
        except DataError:
            if continues or not _has_gaps(begun):
                raise
            line = "filling gaps in the inputs with the last values; further inputs mark the gaps"
            say_stage(begun.settings.verbose, begun.ranks, line)
            _run_begun(begun, continues, has_gaps=True)


def _run_begun(begun: BegunFit, continues: bool, *, has_gaps: bool) -> None:
    settings = begun.settings
    trials: list[ReadyMadeLoop] = []
    if not continues:
        settings, trials = choose(begun, has_gaps)
    part = _part_for_intervals(settings, begun, trials)
    loop = ReadyMadeLoop(begun, begun.cut(settings), trials=trials)
    if not (loop.makes_updates or begun.data.is_fit):
        raise _no_partial_fit(begun.est)
    begun.train(loop)
    if settings.level is not None:
        part = part or (begun.early_stopping_split(), loop.data, loop)
        _add_intervals(begun, *part)


def _has_gaps(begun: BegunFit) -> bool:
    """Return whether inputs lack values, in a fit on one process of a model that can fill them."""
    (x, *others) = begun.data.inputs.series
    if others or x.kind != "float" or not begun.ranks.is_single:
        return False
    size = DataSize.of(begun.data)
    if begun.est.choose(size, begun.data.is_fit).cell == "kernels":
        return False
    rows = begun.data.inputs.local_series()
    for series, steps in block_slices(len(rows), rows.max_length):
        if np.isnan(x.read(rows[series], steps.start, steps.stop)).any():
            return True
    return False


def _require_whole_fit(est: Any, is_whole: bool, *, sharded: bool) -> None:
    """Raise SpecError if intervals are asked for that no held-out data can calibrate."""
    if est.level is None:
        return
    if not is_whole:
        raise SpecError(
            "intervals are calibrated on held-out data, but a fit that continues has seen all "
            "data; set level=None, and give calibration=(x, y) to stream"
        )
    if sharded:
        raise SpecError("sharded=True allows no level: set level=None, or give ranks all series")


def _begin_anew(est: Any) -> bool:
    """Warn that a ``partial_fit`` cannot continue a closed form, and return False.

    Raises
    ------
    SpecError
        If the user has chosen the closed form.
    """
    chosen = est.fitted_parts_.choice
    if est.cell != "auto" or chosen is None:
        raise _no_partial_fit(est)
    warn(
        f"partial_fit begins anew, with a network: the fitted model, "
        f"cell_={chosen.cell!r}, learns only from all data at once; set cell='lstm' before fit to "
        "continue it"
    )
    return False


def _no_partial_fit(est: Any) -> SpecError:
    return SpecError(
        f"partial_fit: a {type(est).__name__} with cell={est.cell!r} is fitted in closed form, on "
        "all data at once; call fit, or choose another cell"
    )


class ReadyMadeLoop(FitLoop):
    """The loop of a ready-made model: what is in closed form is fitted first, or alone.

    Parameters
    ----------
    begun : BegunFit
    data : FitData
    rng : numpy.random.Generator, optional
        Instead of that of the fit.
    trials : sequence of ReadyMadeLoop
        Done, with whose models this one begins. A closed form is taken from the last.
    like : ClosedFormHead, optional
        What a closed form of its own is fitted like; see :class:`ClosedFormTask`.
    """

    def __init__(
        self,
        begun: BegunFit,
        data: FitData,
        rng: np.random.Generator | None = None,
        trials: Sequence[ReadyMadeLoop] = (),
        like: ClosedFormHead | None = None,
    ) -> None:
        self._groups = begun.data.groups
        self._trials = trials
        self._like = like
        self._verbose = begun.settings.verbose
        self.head: ClosedFormHead | None = None
        if rng is None:
            super().__init__(data, begun.ranks, begun.rng, begun.earlier)
        else:
            super().__init__(data, begun.ranks, rng)
        self.makes_updates = not is_closed_form(self.model)
        if not self.makes_updates:
            self.step_fn = self._solve
            self.passes = [self.windows]
            self.epochs = 1

    def new_step(self, ranks: RankGroup) -> Any:
        of_whole_series = any(part.is_of_whole_series for part in closed_form_parts(self.model))
        if of_whole_series and not self.data.codec.per_series:
            raise SpecError(
                "cell='kernels' describes whole series, but y has a target at each step; use "
                "another cell, such as 'lstm' or 'linear'"
            )
        classes = self.data.codec.classes
        n_classes = None if classes is None else len(classes)
        self.task = ClosedFormTask(n_classes, self.data.codec.per_series, self._groups, self._like)
        return super().new_step(ranks)

    def _solve(self, windows: TensorBatches | None) -> StepInfo | None:
        """Fit a model in closed form, which is its one step; the loss is that of rows that were
        left out.
        """
        if windows is None:  # a rank that has taken the step waits for others
            return None
        reset(self.model)
        self._fit_closed_form()
        head = self.head
        assert head is not None
        self.trainer.n_updates += 1
        loss = head.squared_error if self.task.n_classes is None else head.log_loss
        # to seven digits, as linear algebra rounds by the number of threads
        loss = float(np.float32(loss))
        return StepInfo(loss, len(head.left_out), {"alpha": float(head.alpha.mean())})

    def _attach_progress(self, progress: Any) -> None:
        super()._attach_progress(progress)
        if not self.resume:
            chosen = self.data.settings.choice.describe(self.n_updates)
            self.hooks.add("start", lambda loop: progress.say(chosen), name="choice")

    def prepare(self) -> None:
        verbose = self.data.settings.verbose
        ranks = self.ranks
        if not self.makes_updates:  # its step does all
            say_stage(verbose, ranks, "fitting in closed form")
            return
        if any(closed_form_parts(self.model)):
            say_stage(verbose, ranks, "fitting the linear model, then the network")
        self._fit_closed_form()

    def _fit_closed_form(self) -> None:
        for trial in self._trials:
            for kind in (LinearPlusNetwork, ClosedFormModel):
                mine, theirs = (
                    [part for part in loop.model.modules() if isinstance(part, kind)]
                    for loop in (self, trial)
                )
                for part, done in zip(mine, theirs, strict=False):  # a trial may lack networks
                    part.load_state_dict(done.state_dict())
        if self._trials and self._like is None:
            self.head = self._trials[-1].head
        elif takes_gaps(self.model):
            self.head = fit_closed_form_parts(self.model, self.windows, self.ranks, self.task)

    def run_alone(self, stage: str) -> None:
        """Fit the model for a stage of the fit: no estimator changes."""
        require_same_fit(self)
        show_stage(self._verbose, self, stage)
        with self.surroundings():
            self.prepare()
            self.run_epochs(self.passes, self.epochs)
        reset(self.model).eval()

    def _run_begins(self) -> None:
        self._keep_fixed_part()
        super()._run_begins()

    def _keep_fixed_part(self) -> None:
        """Compute what does not learn for all training data, once and not for each update, where it
        fits into memory: the model gets it in place of the inputs.
        """
        kinds = (LinearPlusNetwork, WithIntervals)
        networks = [m for m in self.model.modules() if isinstance(m, kinds)]
        if not networks:
            return
        network = networks[0]  # all have the same, or are inside
        windows = self.data.windows
        x = windows.x[0]
        shape = (x.T, x.N, network.n_fixed)
        if math.prod(shape) > MOST_KEPT:
            return
        is_long = self.windows.dtype == torch.float64
        kept = np.zeros(shape, np.float64 if is_long else np.float32)
        batches = in_long_windows(self.windows)
        if windows.shards is None:  # a shuffled window may give a rank any of the series
            batches.rank, batches.size = 0, 1
        for batch in batches:
            if not batch.inputs:
                continue
            if batch.first:
                reset(network)
            with torch.no_grad():
                out = network.compute_fixed(batch.inputs[0]).cpu().numpy()
            assert batch.index is not None
            rows, first = batch.index.segments, batch.index.start
            ends = np.minimum(rows.length, first + len(out))
            for i, series in enumerate(rows.series):
                of_row = out[: max(ends[i] - first, 0), i]
                start = rows.start[i] + first
                kept[start : start + len(of_row), series] = of_row
        array = SeriesArray(kept.transpose(2, 1, 0), "what does not learn")
        self.windows.windows = windows.changed(x=(array,))


def read_groups(groups: object, inputs: Inputs) -> np.ndarray | None:
    """Return a number from 0 for each series: that of its group; None if they are all of one.

    Raises
    ------
    ShapeError, DataError
        If there is not one group for each series.
    """
    if groups is None:
        return None
    given = np.asarray(groups)
    if given.shape != (inputs.N,):
        raise ShapeError(
            f"groups must have one entry for each of the {inputs.N} series, got the shape "
            f"{given.shape}"
        )
    if inputs.shards is not None:
        raise DataError("sharded=True allows no groups: a rank knows the groups of its series only")
    numbers = np.unique(given, return_inverse=True)[1].astype(np.int64)
    return numbers if numbers.any() else None


# -- trials ----------------------------------------------------------------------------------------


def choose(begun: BegunFit, has_gaps: bool = False) -> tuple[Settings, list[ReadyMadeLoop]]:
    """Return the settings of the model that is chosen for the data, and the trials that its fit
    goes on from, if there were any.

    Of few series, one trial learns from the first three fifths and holds out the fourth, another
    goes on with four fifths and holds out the last; of many, one trial holds out a fifth of them.
    Of more than half a million steps, one holds out the last, or some series, a hundred thousand.
    The closed form has been fitted to all before.
    """
    est: Any = begun.est
    data = begun.data
    size = DataSize.of(data)
    choice = replace(est.choose(size, data.is_fit), has_gaps=has_gaps)
    settings: Settings = est.settings_of(choice)
    if not choice.needs_trial:
        return settings, []
    fraction = min(TRIAL_FRACTION, MOST_HELD_OUT / size.n_steps)
    splits = [data.split(fraction, begun.seed, MAX_IN_TIME)]
    in_time = bool(splits[0].training.length.all())
    if in_time and fraction == TRIAL_FRACTION:
        before = replace(data, counted=splits[0].training)
        fraction = TRIAL_FRACTION / (1 - TRIAL_FRACTION)
        splits.insert(0, before.split(fraction, begun.seed, MAX_IN_TIME))
    n_updates = max(choice.max_updates // (1 + len(splits)), LEAST_UPDATES)
    choice = replace(choice, max_updates=n_updates)
    n_stages = 2 + len(splits) + (settings.level is not None)

    def say(stage: int, line: str) -> None:
        say_stage(settings.verbose, begun.ranks, f"{stage} of {n_stages}: {line}")

    say(1, "fitting the linear model")
    of_linear = replace(est.settings_of(replace(choice, cell="linear")), **QUIET)
    linear = ReadyMadeLoop(begun, begun.cut(of_linear), np.random.default_rng(begun.seed))
    linear.run_alone("linear model")
    trials: list[ReadyMadeLoop] = []
    errors = [np.empty((0, len(GAINS)))]
    for i, split in enumerate(splits):
        say(2 + i, f"trying the network, {n_updates} updates, on data that are held out")
        try:
            held_out, trial = fit_of_part(
                begun,
                est.settings_of(choice),
                split,
                f"trial {i + 1} of {len(splits)}",
                trials,
                linear.head,
            )
        except ValueError:  # too few steps or targets in this part; all together are enough
            continue
        trials = [trial]
        assert held_out.validation is not None
        held = held_out.validation.segments
        begins = data.inputs.all_series().start[held.series]
        warm_up = np.minimum(WARM_UP, held.start - begins)
        whole = replace(held, start=held.start - warm_up, length=held.length + warm_up)
        part = HeldOut(held_out.validation, whole, held_out.codec, held_out.spec)
        errors.append(errors_by_block(part, trial.model, 1 if in_time else 0, begun.ranks))
    choice = choice_after_trials(choice, np.concatenate(errors), in_time)
    settings = est.settings_of(choice)
    return settings, [*trials, linear]


def _part_for_intervals(
    settings: Settings, begun: BegunFit, trials: Sequence[ReadyMadeLoop]
) -> tuple[Split | None, FitData, ReadyMadeLoop] | None:
    """Fit a model on a part of the data; return the split, the rest as the ``validation`` of its
    data, and the loop. None without intervals, or where the fit holds data out itself.

    It goes on from the trials, as the fit does: the last of them has not seen this part either.
    """
    holds_out = begun.data.validation_data is not None or settings.early_stopping
    if settings.level is None or holds_out:
        return None
    line = "fitting on a part, to calibrate intervals on the rest"
    say_stage(settings.verbose, begun.ranks, line)
    max_in_time = MAX_IN_TIME
    if begun.data.targets.per_series:
        max_in_time = 0  # the end of a series has its target: whole series are held out
        if begun.data.inputs.N < 2:
            raise DataError(
                "level: one series with one target cannot be held out; give more series, or "
                "validation_data"
            )
    split = begun.data.split(TRIAL_FRACTION, begun.seed, max_in_time)
    like = trials[-1].head if trials else None
    return split, *fit_of_part(begun, settings, split, "calibration", trials[:-1], like)


def _add_intervals(
    begun: BegunFit, split: Split | None, held_out: FitData, loop: ReadyMadeLoop
) -> None:
    """Give an estimator, which is fitted, what intervals need: from a model that was fitted on a
    part of the data, the network of their ends, and the errors on the rest.
    """
    est: Any = begun.est
    levels = read_levels(est.level)
    intervals: Any = None
    if held_out.codec.scale is not None and not held_out.codec.per_series:
        center = deep_copy(loop.model).requires_grad_(False)
        settings = est.interval_settings(held_out.settings.choice, center, levels)
        held_out, of_intervals = fit_of_part(begun, settings, split, "intervals", trials=[loop])
        intervals = of_intervals.model
    assert held_out.validation is not None
    whole = held_out.inputs.segments()
    if begun.data.validation_data is not None:
        whole = held_out.validation.segments
    held = HeldOut(held_out.validation, whole, held_out.codec, held_out.spec)
    if intervals is None:
        calibration = held.calibration(loop.model)
    else:
        in_time = split is None or bool(split.training.length.all())
        calibration = calibrate(intervals, held, in_time=in_time)
        if len(calibration.errors) == intervals.n_out:  # too few errors: infinite
            intervals = None
        else:
            intervals.center = est.model_
    parts = est.fitted_parts_
    est.fitted_parts_ = replace(parts, calibration=calibration, intervals=intervals)


def fit_of_part(
    begun: BegunFit,
    settings: Settings,
    split: Split | None,
    stage: str,
    trials: Sequence[ReadyMadeLoop] = (),
    like: ClosedFormHead | None = None,
) -> tuple[FitData, ReadyMadeLoop]:
    """Fit a model on the training part of a split; see :class:`ReadyMadeLoop`. Without a split, all
    is training, and validation data are those of the user. A bar shows the name of the stage.

    Return the data, whose ``validation`` is the rest, and the loop, done. The estimator and
    its generator stay as they are.
    """
    trial = replace(settings, **QUIET)
    spec = replace(spec_of_call(trial, begun.epochs, begun.data.is_fit), patience=None)
    batchsize = total_batchsize(trial, begun.ranks.size, begun.saved)
    held_out = begun.data.cut(trial, spec, batchsize, split)
    fitted = replace(held_out, validation=None)
    rng = np.random.default_rng(begun.seed)
    loop = ReadyMadeLoop(begun, fitted, rng, trials, like)
    loop.run_alone(stage)
    return held_out, loop
