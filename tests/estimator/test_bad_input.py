"""Bad input raises an error that names the thing and the way out, and nothing is changed."""

import copy
import random
import warnings
from collections import namedtuple
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.exceptions import NotFittedError
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from fluxutils_py import Estimator, SequenceClassifier, Spec, net2vec, samples, seqloss
from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.nn import GRU, LSTM
from fluxutils_py.nn.model_windows import run_window
from fluxutils_py.optim import Clip

# torch imports sympy with the first optimizer of a process, which adds a filter of warnings
SGD([torch.zeros(1)], 0.1)

N, T = 5, 12
PLAIN = {"epochs": 2, "batchsize": 3, "seqsize": 5, "shuffle": True}


class Net(nn.Module):
    """Has everything that a failed fit could change: weights, a buffer, a state, dropout."""

    def __init__(self, n_in=2, n_out=1):
        super().__init__()
        self.rnn, self.drop, self.head = LSTM(n_in, 4), nn.Dropout(0.1), nn.Linear(4, n_out)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.head(self.drop(self.rnn(x)))


def series(n_features=2, n_series=N, n_steps=T, at=None, value=np.nan, dtype="float32"):
    """(F, N, T), with a bad value somewhere."""
    a = np.random.default_rng(n_features).normal(size=(n_features, n_series, n_steps)).astype(dtype)
    if at is not None:
        a[at] = value
    return a


X, Y = series(2), series(1)


# -- what "nothing is changed" means --------------------------------------------------------------------


def picture(value: Any) -> Any:
    """A value as plain data that can be compared: everything in it, bit for bit."""
    if isinstance(value, torch.Tensor):
        grad = picture(value.grad) if value.is_leaf and value.grad is not None else None
        return (
            "tensor",
            str(value.dtype),
            tuple(value.shape),
            value.requires_grad,
            grad,
            value.tolist().__repr__(),
        )
    if isinstance(value, np.ndarray):
        return (
            "array",
            value.dtype.str,
            value.shape,
            value.strides,
            value.flags.writeable,
            value.tolist().__repr__(),
        )
    if isinstance(value, h5py.Dataset):
        return "dataset", picture(value[()]) if value else "closed"
    if isinstance(value, nn.Module):
        return (
            type(value).__name__,
            [
                (name, m.training, picture(getattr(m, "state", None)))
                for name, m in value.named_modules()
            ],
            [(name, picture(p)) for name, p in value.named_parameters()],
            [(name, picture(b)) for name, b in value.named_buffers()],
        )
    if isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        return type(value).__name__, picture(value.state_dict())
    if isinstance(value, np.random.Generator):
        return picture(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return picture(value.get_state(legacy=False))
    if isinstance(value, Mapping):
        return {key: picture(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [picture(v) for v in value]
    if isinstance(value, partial):
        return "partial", id(value.func), picture(value.args), picture(value.keywords)
    if is_dataclass(value) or isinstance(value, SimpleNamespace):
        return type(value).__name__, picture(vars(value)) if not isinstance(value, type) else id(
            value
        )
    return (
        (type(value).__name__, repr(value)) if isinstance(value, int | float | str) else id(value)
    )


@contextmanager
def nothing_changes(est: Estimator, *objects: Any):
    """Whatever happens inside, the estimator, the user's objects and the global generators are as
    before.
    """

    def look():
        return {
            "attributes": {name: (id(v), picture(v)) for name, v in vars(est).items()},
            "params": {name: id(v) for name, v in est.get_params(deep=False).items()},
            "objects": [picture(o) for o in objects],
            "torch": torch.get_rng_state().tolist(),
            "numpy": picture(np.random.get_state(legacy=False)),  # noqa: NPY002  the one that must not move
            "random": random.getstate(),
            "grad mode": torch.is_grad_enabled(),
            "warnings": len(warnings.filters),
        }

    before = look()
    yield
    after = look()
    assert before.keys() == after.keys()
    for what in before:
        assert before[what] == after[what], f"{what} changed"


@pytest.mark.slow
def test_the_picture_sees_what_it_should():
    est = Estimator(Net(), None, None, PLAIN, random_state=0).fit(X, Y)
    for change in (
        lambda: est.model_.head.weight.data.add_(1e-7),
        lambda: est.model_.seen.add_(1),
        lambda: est.model_.train(),
        lambda: est.model_.rnn(torch.zeros(1, 2)),
        lambda: est.optimizer_.param_groups[0].update(lr=0.5),
        lambda: next(iter(est.optimizer_.state.values()))["exp_avg"].mul_(2),
        lambda: est.fitted_parts_.rng.random(),
        lambda: est.history_.append({}),
        lambda: vars(est).update(extra=1),
        lambda: torch.rand(1),
        lambda: np.random.rand(),  # noqa: NPY002  the check must see the legacy generator move
        lambda: PLAIN.update(more=1),
    ):
        with pytest.raises(AssertionError), nothing_changes(est):
            change()
    del PLAIN["more"]


# -- the tables -----------------------------------------------------------------------------------------


@dataclass
class Case:
    """A bad call: what is wrong with it, the error, and the telling parts of its message."""

    name: str
    error: type[BaseException]
    telling: str | tuple[str, ...]
    arguments: Callable[[], dict[str, Any]] = dict  # of fit, or of predict or score
    settings: Callable[[], dict[str, Any]] = dict  # of the constructor
    # whether it shows in the first window only; else no hook has run
    loops: bool = field(default=False)


def table(*cases):
    return pytest.mark.parametrize("case", cases, ids=[c.name for c in cases])


def at(*stages):
    """``at(*stages)(*cases)``: each case at one of the stages, in turn."""

    def cases_at_stages(*cases):
        rows = [(case, stages[i % len(stages)]) for i, case in enumerate(cases)]
        names = [f"{case.name}-{stage}" for case, stage in rows]
        return pytest.mark.parametrize(("case", "stage"), rows, ids=names)

    return cases_at_stages


def assert_tells(info, case):
    assert info.type is case.error
    for part in (case.telling,) if isinstance(case.telling, str) else case.telling:
        assert part in str(info.value)


def with_spec(**fields):
    return lambda: {"spec": {**PLAIN, **fields}}


def given(**fields):
    return lambda: fields


def data(x=X, y=Y, **others):
    return lambda: {"x": x, "y": y, **others}


@cache
def fitted():
    """Fitted once, for copies."""
    return Estimator(Net(), spec=PLAIN, random_state=0, verbose=False).fit(X, Y)


def bad_fit(case, stage):
    """Fit an estimator that was never fitted, was fitted, or goes on from its last fit."""
    steps, starts = [], []
    watcher = SimpleNamespace(on_start=starts.append, on_step=steps.append)
    settings = {
        "model": Net(),
        "spec": dict(PLAIN),
        "random_state": 0,
        "verbose": False,
        "callbacks": watcher,
    }
    bad = case.settings()
    if stage == "fresh":
        est = Estimator(**{**settings, **bad})
    else:
        est = copy.deepcopy(fitted()).set_params(**settings)
        est.set_params(**bad, warm_start=stage == "warm")
    arguments = {"x": X, "y": Y, **case.arguments()}
    with nothing_changes(est, arguments, bad, X, Y), pytest.raises(case.error) as info:
        est.fit(**arguments)
    assert_tells(info, case)
    assert steps == []
    assert case.loops or starts == []
    if stage == "fresh":
        assert not hasattr(est, "model_")
    else:  # and it still works
        est.set_params(**{**dict.fromkeys(bad), **settings}).predict(X)


staged = at("fresh", "refit", "warm")


@staged(
    Case("1-D", ShapeError,
         "x has one axis, of 12 values. Reshape your data: x[None, None] if they are one feature "
         "of one series (F, N, "
         "T), x.reshape(-1, 1) if a matrix of one feature, x.reshape(1, -1) if one of a single sample", data(X[0, 0])),
    Case("2-D", ShapeError, ("x", "is of one series or of one feature, add the missing axis: x[:, None] or x[None]"),
         data(X[0])),
    Case("4-D", ShapeError, ("got shape (1, 2, 5, 12)", "x.reshape(-1, N, T)"), data(X[None])),
    *(
        Case(f"{value} as x", DataError, "x must be an array (F, N, T), samples(x) or timesteps(x) of one, or a matrix "
             f"with one row per sample; got {got}", data(value))
        for value, got in ((3.0, "3.0"), (None, "None"), ("x.npy", "'x.npy'"), ({"x": X[0, 0, :2]}, "dict"))
    ),
    *(
        Case(f"{value} as y", DataError, "y must be an array (G, N, T), samples(y) or timesteps(y) of one, or a vector "
             f"or matrix with the rows of x; got {got}", data(y=value))
        for value, got in ((3.0, "3.0"), (np.float32(3), "np.float32(3.0)"), ("y", "'y'"), ({"x": 1}, "dict"))
    ),
    Case("ragged lists", ShapeError, "x must be an array of shape (F, N, T)", data([[[1.0, 2.0], [3.0]]])),
    Case("2-D y", ShapeError,
         "y has shape (5, 12) = (N, T) and x has shape (F, N, T): if it is a target for each step, "
         "add the missing axis, "
         "y[None], or set target='step'; if it is 12 targets for each series, set target='series'", data(y=Y[0])),
    Case("1-D y of other series", ValueError,
         "Found input variables with inconsistent numbers of samples: [5, 4]", data(y=Y[0, :4, 0])),
    Case("no y", ValueError, "This Estimator estimator requires y to be passed, but the target y is None.",
         data(y=None)),
    Case("empty tuple", ShapeError, ("x is an empty tuple", "at least one array"), data(())),
    Case("bad one of a tuple", ShapeError, "x[1] must have three axes", data((X, X[0]))),
    Case("unequal N", ShapeError, ("x has 5 series and y has 4", "equal N and T"), data(y=Y[:, :4])),
    Case("unequal T", ShapeError, ("x has 12 time steps and y has 11", "equal N and T"), data(y=Y[:, :, :11])),
    Case("unequal N in a tuple", ShapeError, "x[0] has 5 series and x[1] has 4", data((X, X[:, :4]))),
    Case("unequal T in a tuple", ShapeError, "y[0] has 12 time steps and y[1] has 6", data(y=(Y, Y[:, :, ::2]))),
    Case("swapped axes", ShapeError, "x has 12 series and y has 5", data(X.transpose(0, 2, 1))),
    Case("no features", ShapeError, "x has no features: shape (0, 5, 12)", data(X[:0])),
    Case("no series", ShapeError, "x has no series: shape (2, 0, 12)", data(X[:, :0])),
    Case("no steps", ShapeError, "x has no time steps: shape (2, 5, 0)", data(X[:, :, :0])),
    Case("no targets", ShapeError, "y has no features: shape (0, 5, 12)", data(y=Y[:0])),
    Case("strings", DataError, ("x must hold real numbers, got dtype <U", "astype"), data(X.astype(str))),
    Case("bytes", DataError, "x must hold real numbers, got dtype |S", data(X.astype(bytes))),
    Case("objects", DataError, "x must hold real numbers, got dtype object", data(X.astype(object))),
    Case("complex", DataError, "x must hold real numbers, got dtype complex64", data(X.astype("complex64"))),
    Case("dates", DataError, "x must hold real numbers, got dtype datetime64", data(X.astype("M8[s]"))),
    Case("lists of strings", DataError, "x must hold real numbers", data([[["a"] * T] * N] * 2)),
    Case("string y", DataError, ("y must hold real numbers", "labels are for Seq"), data(y=Y.astype(str))),
    Case("complex y", DataError, "y must hold real numbers, got dtype complex128", data(y=Y.astype(complex))),
    Case("NaN in x", DataError, ("x is nan at feature 1, series 2, step 3", "fill it in"), data(series(at=(1, 2, 3)))),
    Case("Inf in x", DataError, ("x is inf at feature 0, series 4, step 11", "fill it in"),
         data(series(at=(0, 4, 11), value=np.inf))),
    Case("-Inf in x", DataError, "x is -inf at feature 0, series 0, step 0",
         data(series(at=(0, 0, 0), value=-np.inf))),
    Case("NaN in float64", DataError, "x is nan", data(series(at=(1, 2, 3), dtype="float64"))),
    Case("NaN in float16", DataError, "x is nan", data(series(at=(1, 2, 3), dtype="float16"))),
    Case("Inf in y", DataError, ("y is inf at feature 0, series 1, step 2", "NaN in the target"),
         data(y=series(1, at=(0, 1, 2), value=np.inf))),
)  # fmt: skip
def test_arrays(case, stage):
    bad_fit(case, stage)


@pytest.mark.parametrize(
    ("y", "telling"),
    [
        (
            Y.transpose(1, 2, 0),
            r"if x is \(N, T, F\) and y \(N, T, F\): x.transpose\(2, 0, 1\) and y.tr",
        ),
        (Y, r"if x is \(N, T, F\) and y \(F, N, T\): x.transpose\(2, 0, 1\)$"),
        (
            Y[0],
            r"y has 5 rows.* x of shape \(F, N, T\) = \(5, 12, 2\) .*12 series: arrays \(N, T, F\) "
            r"become so by a.transpose\(2, 0, 1\), datasets",
        ),
    ],
)
def test_the_way_from_batch_first_arrays_is_told(y, telling):
    with pytest.raises(ShapeError, match=telling):
        Estimator(spec=PLAIN).fit(X.transpose(1, 2, 0), y)


@pytest.mark.parametrize(
    "labels", [np.zeros((5, 12), int), np.zeros((5, 12, 1), int).transpose(0, 2, 1)]
)
def test_the_way_from_the_layout_of_aeon_is_told_for_labels_and_validation_data(labels):
    x = np.zeros((5, 2, 12))  # (N, F, T)
    with pytest.raises(ShapeError, match=r"\(N, F, T\).*transpose\(1, 0, 2\)"):
        SequenceClassifier().fit(x, labels)
    with pytest.raises(
        ShapeError,
        match=r"validation x .*x\.transpose\(1",
    ):
        Estimator().fit(
            np.zeros((2, 5, 12)), np.zeros((1, 5, 12)), validation_data=(x, np.zeros((1, 5, 12)))
        )


@pytest.mark.parametrize("fitted", [False, True])
def test_a_matrix_of_targets_is_one_row_per_series_and_may_not_fit_the_model(fitted):
    """It shows at the last step, the only one with targets: nothing was learnt by then."""
    est = Estimator(Net(), spec={**PLAIN, "shuffle": False}, warm_start=True, random_state=0)
    if fitted:
        est.fit(X, Y)
    with nothing_changes(est, X, Y), pytest.raises(ShapeError, match=(
        r"\(2, 3, 1\).*\(2, 3, 4\): seqloss\(mse"
    )):  # fmt: skip
        est.fit(X, Y[0, :, :4])


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = GRU(4, 3), nn.Linear(3, 1)

    def forward(self, a, b):
        return self.head(self.rnn(torch.cat([a, b], -1)))


def without(name):
    return {k: v for k, v in PLAIN.items() if k != name}


class Slots:
    __slots__ = ("depth",)

    def __init__(self):
        self.depth = 1


@pytest.mark.few
@staged(
    Case("empty", SpecError, ("spec has none of the fields epochs, batchsize, seqsize", "(found: none)"),
         settings=given(spec={})),
    Case("none that is known", SpecError, ("spec has none of the fields", "(found: depth, width)"),
         settings=given(spec={"depth": 3, "width": 4})),
    Case("misspelt batchsize", SpecError, "'batch_size' is not used; did you mean 'batchsize'?",
         settings=given(spec={**without("batchsize"), "batch_size": 3})),
    Case("misspelt seqsize", SpecError, "'seq_size' is not used; did you mean 'seqsize'?",
         settings=given(spec={**without("seqsize"), "seq_size": 3})),
    Case("misspelt epochs", SpecError, "'epoch' is not used; did you mean 'epochs'?",
         settings=given(spec={**without("epochs"), "epoch": 3})),
    Case("namedtuple", SpecError, "'batch_size' is not used; did you mean 'batchsize'?",
         settings=given(spec=namedtuple("Sizes", "epochs batch_size")(1, 2))),
    Case("optional", SpecError, "'over_lap' is not used; did you mean 'overlap'?",
         settings=with_spec(over_lap=3)),
    Case("object", SpecError, "'n_epochs' is not used; did you mean 'epochs'?",
         settings=given(spec=SimpleNamespace(n_epochs=1, batchsize=4, seqsize=3))),
    Case("slots", SpecError, "spec has none of the fields", settings=given(spec=Slots())),
    Case("class", SpecError, "spec must be a Spec, dict, namedtuple", settings=given(spec=Spec)),
    Case("number", SpecError, ("with epochs, batchsize and seqsize", "got 10"), settings=given(spec=10)),
    Case("list", SpecError, "got [1, 2, 3]", settings=given(spec=[1, 2, 3])),
    Case("string", SpecError, "got 'fast'", settings=given(spec="fast")),
    *(
        Case(f"{name}={value!r}", SpecError, (f"spec.{name} must be a positive integer", f"got {value!r}"),
             settings=with_spec(**{name: value}))
        for name in ("epochs", "batchsize", "seqsize", "accumulate", "patience", "max_updates")
        for value in (0, -1, True, 2.0, "3", np.True_)
    ),
    *(
        Case(f"{name}=None", SpecError, f"spec.{name} must be a positive integer, got None",
             settings=with_spec(**{name: None}))
        for name in ("batchsize", "accumulate")
    ),
    *(
        Case(f"{name}={value!r}", SpecError, f"spec.{name} must be an integer of at least 0, got {value!r}",
             settings=with_spec(**{name: value}))
        for name in ("overlap", "burn_in")
        for value in (-1, True, 1.0, None)
    ),
    *(
        Case(f"clip={value!r}", SpecError, f"spec.clip must be a positive number or None, got {value!r}",
             settings=with_spec(clip=value))
        for value in (0, -1.0, float("nan"), True, "1")
    ),
    *(
        Case(f"{name}={value!r}", SpecError, f"spec.{name} must be {choice}True or False, got {value!r}",
             settings=with_spec(**{name: value}))
        for name, choice in (("shuffle", ""), ("rebatch", "'auto', "))
        for value in (1, "yes", None)
    ),
    Case("in a Spec", SpecError, "spec.epochs must be a positive integer or None, got 0", settings=given(spec=Spec(epochs=0))),
    Case("scheduler", SpecError, ("spec.lr_schedule must be", "a function of the optimizer", "functools.partial(", "got 3"),
         settings=with_spec(lr_schedule=3)),
    Case("old names", SpecError, ("scheduler", "given as lr_schedule=f, or ('step', f)"),
         settings=lambda: {"spec": {**PLAIN, "scheduler": StepLR}}),
    Case("schedule by a word", SpecError, ("spec.lr_schedule must be", "('step', function)", "got ('batch', "),
         settings=lambda: with_spec(lr_schedule=("batch", StepLR))()),
    Case("scheduler instance", SpecError, ("spec.lr_schedule must be", "a function of the optimizer", "functools.partial("),
         settings=lambda: with_spec(lr_schedule=StepLR(SGD(nn.Linear(1, 1).parameters(), 0.1), 1))()),
    Case("scheduler makes none", TypeError, "must make a torch learning-rate scheduler, it made 3",
         settings=with_spec(lr_schedule=lambda optimizer: 3)),
    Case("plateau per step", SpecError, ("ReduceLROnPlateau", "without 'step'"),
         settings=with_spec(lr_schedule=("step", ReduceLROnPlateau))),
    Case("burn_in too long", ValueError, "burn_in of 12 leaves nothing of series of 12 steps",
         settings=with_spec(burn_in=12)),
    Case("burn_in too long after folding", ValueError,
         ("burn_in of 3 leaves nothing of series of 3 steps", "rebatch=True"),
         settings=with_spec(burn_in=3, batchsize=20, rebatch=True)),
    Case("epochs=0 of fit", SpecError, "epochs must be a positive integer, got 0", given(epochs=0)),
    Case("epochs=True of fit", SpecError, "epochs must be a positive integer, got True", given(epochs=True)),
    Case("epochs=1.5 of fit", SpecError, "epochs must be a positive integer, got 1.5", given(epochs=1.5)),
)  # fmt: skip
def test_spec(case, stage):
    bad_fit(case, stage)


class Both(nn.Module):
    """Means something else by a window than by its steps."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 1)

    def forward(self, x):
        return self.head(x) * x.dim()


class NoTensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 1)

    def forward(self, x):
        return {"y": self.head(x)}


@at("fresh", "refit")(
    Case("number", TypeError, ("model must be a torch module, a class or function that makes one", "got 3"),
         settings=given(model=3)),
    Case("string", TypeError, "model must be a torch module", settings=given(model="lstm")),
    Case("function of other arguments", TypeError,
         ("required arguments that are not supplied: a, b", "n_in and n_out", "functools.partial"),
         settings=given(model=lambda a, n_in, b: 3)),
    Case("class of other arguments", TypeError, "not supplied: in_features, out_features",
         settings=given(model=nn.Linear)),
    Case("function of none", TypeError, "must make a torch module, it made int", settings=given(model=lambda: 3)),
    Case("class of none", TypeError, "must make a torch module, it made dict", settings=given(model=dict)),
    Case("no parameters", ValueError, "no trainable parameters: set requires_grad",
         settings=given(model=nn.Sequential(nn.Tanh()))),
    Case("frozen", ValueError, "no trainable parameters: set requires_grad",
         settings=lambda: {"model": nn.Linear(2, 1).requires_grad_(False)}),
    Case("other features", ShapeError, ("runs neither on a window (S, B, F) = (3, 4, 2)", "nor on its steps (B, F)"),
         settings=lambda: {"model": nn.Sequential(LSTM(7, 3), nn.Linear(3, 1))}),
    Case("window or steps", ShapeError, ("other results for a window (S, B, F) than for its steps", "takes_windows"),
         settings=lambda: {"model": Both()}),
    Case("bare recurrent layer", ShapeError, ("'rnn' sits outside Recur", "Recur(...)"),
         settings=lambda: {"model": Bare()}),
    Case("bidirectional", TypeError, "bidirectional=False",
         settings=lambda: {"model": nn.Sequential(nn.LSTM(2, 3, bidirectional=True), nn.Linear(6, 1))}),
    Case("batch first", TypeError, "batch_first=False",
         settings=lambda: {"model": nn.Sequential(nn.GRU(2, 3, batch_first=True), nn.Linear(3, 1))}),
    Case("no tensor", ShapeError, "must return a tensor or a tuple of tensors, got dict",
         settings=lambda: {"model": NoTensor()}),
    Case("NaN in a tuple", DataError, "x[1] is nan at feature 1", data((X, series(at=(1, 2, 3)))),
         settings=given(model=TwoInputs)),
    Case("default for several", DataError, "model=None is for one input and one output", data((X, X)),
         settings=given(model=None)),
    Case("other outputs", ShapeError, "the model gives (5, 3, 2) for targets of shape (5, 3, 1)", loops=True,
         settings=lambda: {"model": Net(2, 2)}),
    Case("number of outputs", ShapeError, "the model gives 1 outputs for 2 targets", data(y=(Y, Y)), loops=True),
    Case("device", ValueError, "device='abacus' is no device of torch; give", settings=given(device="abacus")),
    Case("device of another machine", ValueError, "device='cuda:77'", settings=given(device="cuda:77")),
    Case("device that is a number", ValueError, "device=2.5 is no device of torch", settings=given(device=2.5)),
    Case("device without memory", ValueError, "device='meta' cannot be used", settings=given(device="meta")),
    # optimizers
    Case("optimizer name", TypeError, ("opt must be an optimizer class such as torch.optim.AdamW", "got 'adam'"),
         settings=given(opt="adam")),
    Case("transform", TypeError, ("opt=Clip(thresh=0.5) changes gradients only", "Chain(Clip(thresh=0.5), "),
         settings=given(opt=Clip(0.5))),
    Case("optimizer number", TypeError, "opt must be an optimizer class", settings=given(opt=0.1)),
    Case("other class", TypeError, "opt must be an optimizer class", settings=given(opt=nn.Linear)),
    Case("makes none", TypeError, "must make a torch optimizer, it made NoneType", settings=given(opt=lambda p: None)),
    Case("makes a foreign one", ValueError, "made an optimizer of other parameters than the ones it was given",
         settings=given(opt=lambda p: SGD(nn.Linear(2, 1).parameters(), 0.1))),
    Case("foreign", ValueError, ("given as opt holds parameters that are not the model's", "functools.partial("),
         settings=lambda: {"opt": Adam(Net().parameters())}),
    Case("partly foreign", ValueError, "build it from model.parameters() of the same model",
         settings=lambda: (m := Net()) and {"model": m, "opt": SGD([*m.parameters(), *Net().parameters()], 0.1)}),
    Case("instance without model", ValueError, ("needs a model instance", "functools.partial("),
         settings=lambda: {"model": Net, "opt": Adam(Net().parameters())}),
    Case("LBFGS", ValueError, ("LBFGS runs the model several times", "AdamW"),
         settings=given(opt=torch.optim.LBFGS)),
    Case("LBFGS instance", ValueError, ("LBFGS runs the model several times", "AdamW"),
         settings=lambda: (m := Net()) and {"model": m, "opt": torch.optim.LBFGS(m.parameters())}),
)  # fmt: skip
def test_model_and_optimizer(case, stage):
    bad_fit(case, stage)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def three(model, xs, ys):
    """A loss that takes no weights."""
    return F.mse_loss(run_window(model, xs), ys)


def gradient_is(value):
    """A finite loss with a gradient of ``value``."""

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum() * 0

        @staticmethod
        def backward(ctx, g):
            return torch.full((5, 3, 1), value)

    return lambda model, xs, ys: Bad.apply(run_window(model, xs))


@staged(
    Case("a class", TypeError, "build it first: MSELoss()", settings=given(loss=nn.MSELoss)),
    Case("a number", TypeError, "seqloss takes a criterion f(yhat, y), got 3", settings=given(loss=3)),
    Case("a string", TypeError, "got 'mse'", settings=given(loss="mse")),
    Case("not scalar", ValueError, ("must return a scalar, got a tensor of shape (5, 3, 1)", ".mean()"), loops=True,
         settings=given(loss=lambda m, xs, ys: (run_window(m, xs) - ys) ** 2)),
    Case("a float", TypeError, "the loss must return a scalar tensor, got float", loops=True,
         settings=given(loss=lambda m, xs, ys: run_window(m, xs).sum().item())),
    Case("None", TypeError, "the loss must return a scalar tensor, got NoneType", loops=True,
         settings=given(loss=lambda m, xs, ys: None)),
    Case("detached", ValueError, ("does not depend on the model's parameters", "without detach"), loops=True,
         settings=given(loss=lambda m, xs, ys: run_window(m, xs).detach().sum())),
    Case("of the data alone", ValueError, "does not depend on the model's parameters", loops=True,
         settings=given(loss=lambda m, xs, ys: ys.sum())),
    Case("fails", ZeroDivisionError, "division", loops=True, settings=given(loss=lambda m, xs, ys: 1 / 0)),
    Case("NaN", FloatingPointError, ("loss is nan at steps 0 to 5 of series", "Lower the learning rate"), loops=True,
         settings=given(loss=lambda m, xs, ys: run_window(m, xs).sum() * torch.nan)),
    Case("Inf", FloatingPointError, ("loss is inf at steps 0 to 5", "set clip"), loops=True,
         settings=given(loss=lambda m, xs, ys: run_window(m, xs).exp().sum() * torch.inf)),
    Case("gradient NaN", FloatingPointError, "gradient norm is nan at steps 0 to 5", loops=True,
         settings=given(loss=gradient_is(torch.nan))),
    Case("gradient Inf", FloatingPointError, "gradient norm is nan at steps 0 to 5", loops=True,
         settings=given(loss=gradient_is(torch.inf))),
    Case("KeyboardInterrupt", KeyboardInterrupt, "", loops=True, settings=lambda: {"loss": interrupted}),
    Case("new schedule", ZeroDivisionError, "division", loops=True,
         settings=lambda: {"loss": lambda m, xs, ys: 1 / 0,
                           "spec": {**PLAIN, "lr_schedule": partial(OneCycleLR, max_lr=1.0, total_steps=9)}}),
    # what a loss without weights cannot do
    Case("sample_weight", ValueError, ("sample_weight is given", "three takes no weights", "loss(model, xs, ys, ws)"),
         given(sample_weight=np.ones(N)), given(loss=three)),
    Case("NaN targets", ValueError, ("y has NaN", "three takes no weights", "use seqloss"),
         data(y=series(1, at=(0, 1, 2))), given(loss=three)),
    Case("unequal lengths", ValueError, ("differ in length", "three takes no weights", "use seqloss"),
         given(lengths=[12, 12, 12, 12, 7]), given(loss=three)),
    Case("validation weight", ValueError, "sample_weight is given, but the loss three takes no weights",
         given(validation_data=(X, Y, np.ones(N))), given(loss=three)),
    Case("no mean", ShapeError, ("cannot be weighted or masked", "loss(model, xs, ys, ws)"), loops=True,
         arguments=given(sample_weight=np.arange(1.0, N + 1)),
         settings=given(loss=seqloss(lambda yhat, y: (yhat - y).pow(2).mean()))),
)  # fmt: skip
def test_loss(case, stage):
    bad_fit(case, stage)


def interrupted(model, xs, ys):
    raise KeyboardInterrupt


def weight(at, value):
    w = np.ones((N, T))
    w[at] = value
    return w


def good(**others):
    return data(validation_data=others.pop("validation"), **others)


class NoHook:
    name = "idle"


class OnEpoch:
    def on_epoch(self, loop):
        pass


@pytest.mark.few
@staged(
    *(
        Case(f"weights {shape}", ShapeError,
             (f"sample_weight has shape {shape}", "expected (5,), (5, 12) or (1, 5, 12) for 5 series of 12 time steps"),
             given(sample_weight=np.ones(shape)))
        for shape in ((), (T,), (N + 1,), (T, N), (N, T, 1), (2, N, T))
    ),
    Case("negative weight", DataError, ("finite and not negative", "use 0"),
         given(sample_weight=weight((1, 2), -1))),
    Case("NaN weight", DataError, "sample_weight must be finite", given(sample_weight=weight((1, 2), np.nan))),
    Case("Inf weight", DataError, "sample_weight must be finite", given(sample_weight=weight((1, 2), np.inf))),
    Case("zero weights", DataError, "sample_weight leaves nothing to learn from", given(sample_weight=np.zeros(N))),
    Case("string weights", DataError, "sample_weight must hold real numbers", given(sample_weight=["1"] * N)),
    Case("object weights", DataError, "sample_weight must hold real numbers, got dtype object",
         given(sample_weight=np.ones(N, object))),
    Case("zero where targets are", DataError, "sample_weight leaves nothing to learn from",
         data(y=series(1, at=(0, slice(None), slice(0, 6))), sample_weight=np.repeat([[1.0] * 6 + [0.0] * 6], N, 0))),
    Case("number of lengths", ShapeError, ("lengths must be 5 integers, one per series", "shape (4,)"),
         given(lengths=[12, 3, 4, 5])),
    Case("float lengths", ShapeError, ("lengths must be 5 integers", "float64"), given(lengths=np.full(N, 3.0))),
    Case("bool lengths", ShapeError, "lengths must be 5 integers", given(lengths=np.ones(N, bool))),
    Case("length 0", DataError, "lengths must be from 1 to T=12, got 0 to 12", given(lengths=[0, 12, 12, 12, 12])),
    Case("length 13", DataError, "lengths must be from 1 to T=12, got 12 to 13", given(lengths=[13, 12, 12, 12, 12])),
    Case("validation array", ValueError,
         "validation_data must be (x, y), (x, y, sample_weight), (x, y, sample_weight, lengths) or "
         "(x, y, sample_weight, lengths, starts)",
         good(validation=X)),
    Case("validation x", ValueError, "validation_data must be (x, y)", good(validation=(X,))),
    Case("validation of 6", ValueError, "validation_data must be (x, y)", good(validation=(X, Y, *[None] * 4))),
    Case("validation lengths", DataError, "lengths must be from 1 to T=12, got 13 to 13",
         good(validation=(X, Y, None, [13] * N))),
    Case("validation dict", ValueError, "validation_data must be (x, y)", good(validation={"x": X, "y": Y})),
    Case("validation 2-D", ShapeError,
         "the rows of the matrix validation x are series of 1 step, but validation y has 12 steps; "
         "if it is of one "
         "series or of one feature, add the missing axis: x[:, None] or x[None]", good(validation=(X[0], Y))),
    Case("validation N", ShapeError, "validation x has 5 series and validation y has 4",
         good(validation=(X, Y[:, :4]))),
    Case("validation features", ShapeError, "validation x has 3 features, the training data have 2",
         good(validation=(series(3), Y))),
    Case("validation targets", ShapeError, "validation y has 2 features, the training data have 1",
         good(validation=(X, X))),
    Case("validation y None", ValueError, "the target y is None", good(validation=(X, None))),
    Case("validation NaN", DataError, "validation x is nan at feature 1, series 2, step 3",
         good(validation=(series(at=(1, 2, 3)), Y))),
    Case("validation weight", ShapeError, "sample_weight has shape (4,)", good(validation=(X, Y, np.ones(4)))),
    Case("callback number", TypeError, ("a callback is a function of the loop, or has on_start", "got 3"),
         settings=given(callbacks=3)),
    Case("one bad callback", TypeError, "a callback is a function of the loop",
         settings=given(callbacks=[print, NoHook()])),
    Case("callback class", TypeError, ("callback OnEpoch is a class", "OnEpoch(...)"),
         settings=given(callbacks=[OnEpoch])),
    Case("verbose", ValueError, "verbose must be 'auto', True or False, got 'loud'", settings=given(verbose="loud")),
    *(
        Case(f"comm={value!r}", ValueError,
             "comm must be 'auto', None, 'mpi', 'torch' or a communicator (an object with rank, "
             "size, allreduce_, "
             f"broadcast_, allgather, barrier), got {value!r}", settings=given(comm=value))
        for value in (5, "solo", SimpleNamespace(rank=0, size=2))
    ),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:validation x is a matrix")  # and then its shape is an error
def test_other_arguments(case, stage):
    bad_fit(case, stage)


@at("fresh", "refit")(
    *(
        Case(f"{value!r}", ValueError, ("random_state must be a non-negative int", f"got {value!r}"),
             settings=given(random_state=value))
        for value in (-1, 1.5, "seed", [1.5])
    ),
)  # fmt: skip
def test_random_state(case, stage):
    bad_fit(case, stage)


@pytest.mark.few
@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState])
@pytest.mark.parametrize(
    "arguments", [{"y": Y[:, :4]}, {"y": series(1, at=(0, 0, 0), value=np.inf)}, {"x": X[0]}]
)
@pytest.mark.parametrize("loss", [None, lambda m, xs, ys: run_window(m, xs).sum() * torch.nan])
def test_a_generator_of_the_user_moves_on_only_with_a_fit_that_learnt(make, arguments, loss):
    generator, twin = make(3), make(3)
    est = Estimator(Net, loss, None, PLAIN, random_state=generator)
    with nothing_changes(est, generator), pytest.raises((ValueError, FloatingPointError)):
        est.fit(**{"x": X, "y": Y, **arguments})
    est.set_params(loss=None).fit(X, Y)
    assert torch.equal(
        net2vec(est), net2vec(Estimator(Net, None, None, PLAIN, random_state=make(3)).fit(X, Y))
    )
    assert picture(generator) != picture(twin)


# -- errors in the middle of a fit ----------------------------------------------------------------------


class Recorder:
    """Parameters and optimizer after every step."""

    def __init__(self):
        self.parameters, self.optimizer = [], []

    def on_step(self, loop):
        self.parameters.append(net2vec(loop.shared_data["model"]))
        self.optimizer.append(copy.deepcopy(loop.shared_data["optimizer"].state_dict()))


def mapped(a, tmp_path, name):
    m = np.memmap(tmp_path / name, a.dtype, "w+", shape=a.shape)
    m[:] = a
    return m


@pytest.mark.parametrize("kind", ["memmap", "h5py"])
@pytest.mark.parametrize("where", ["first", "later"])
@pytest.mark.parametrize(
    "what", ["x is nan at feature 1", "x is inf at feature 1", "y is inf at feature 0"]
)
def test_bad_values_in_a_file_are_found_before_the_update_of_their_window(
    kind, where, what, tmp_path
):
    step = {"first": 2, "later": 7}[where]
    value = np.nan if "nan" in what else np.inf
    bad_x = series(at=(1, 2, step), value=value) if what[0] == "x" else X
    bad_y = series(1, at=(0, 2, step), value=value) if what[0] == "y" else Y
    record = Recorder()
    est = Estimator(Net(), spec={**PLAIN, "shuffle": False}, callbacks=record, random_state=0)
    with h5py.File(tmp_path / "data.h5", "w") as f:
        x, y = f.create_dataset("x", data=bad_x), f.create_dataset("y", data=bad_y)
        if kind == "memmap":
            x, y = mapped(bad_x, tmp_path, "x"), mapped(bad_y, tmp_path, "y")
        if where == "first":
            with (
                nothing_changes(est, x, y),
                pytest.raises(DataError, match=f"{what}, series 2, step 2; "),
            ):
                est.fit(x, y)
            return
        with pytest.raises(DataError, match=f"{what}, series 2, step 7; "):
            est.fit(x, y)
    assert len(record.parameters) == 1
    assert torch.equal(net2vec(est), record.parameters[-1])
    assert np.isfinite(est.predict(X)).all()


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("opt", [None, partial(SGD, lr=0.1, momentum=0.9)])
def test_not_finite_in_a_later_window(kind, accumulate, opt):
    calls = []

    def loss(model, xs, ys):
        calls.append(1)
        value = three(model, xs, ys)
        if len(calls) < 7:
            return value
        # 0 * inf backwards
        return value * torch.nan if kind == "loss" else value + (model.head.bias * 0).sqrt().sum()

    record = Recorder()
    # 4 windows an epoch
    spec = {
        **PLAIN,
        "batchsize": 5,
        "shuffle": False,
        "accumulate": accumulate,
        "seqsize": 3,
    }
    est = Estimator(Net(), loss, opt, spec, callbacks=record, random_state=0)
    with pytest.raises(FloatingPointError, match="is nan at steps"):
        est.fit(X, Y)
    # a gradient too is looked at in its own step, also while it waits
    assert len(record.parameters) == 6
    assert torch.equal(net2vec(est), record.parameters[5])
    assert picture(est.optimizer_.state_dict()) == picture(record.optimizer[5])
    assert all(p.grad is None for p in est.model_.parameters())
    assert not est.model_.training
    assert est.n_iter_ == len(est.history_) == len(est.loss_curve_)
    assert np.isfinite(est.predict(X)).all()
    assert np.isfinite(est.set_params(loss=None).partial_fit(X, Y).loss_)


@pytest.mark.few
@pytest.mark.parametrize("stage", ["fresh", "fitted"])
@pytest.mark.parametrize(
    "y", [np.full_like(Y, np.nan), series(1, at=(0, slice(None), slice(4, None)))]
)
def test_nothing_to_learn_from(y, stage, tmp_path):
    for targets in (y, mapped(y, tmp_path, "y")):
        est = Estimator(Net(), spec={**PLAIN, "burn_in": 4}, random_state=0, warm_start=True)
        if stage == "fitted":
            est.fit(X, Y)
        with (
            nothing_changes(est, y),
            pytest.raises(DataError, match=r"step of y .*NaN"),
        ):
            est.fit(X, targets)


# -- predict, score, save ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def est():
    return Estimator(Net(), None, None, PLAIN, random_state=0).fit(X, Y)


@pytest.mark.parametrize("call", [
    lambda e, path: e.predict(X),
    lambda e, path: e.predict(X, np.zeros((1, N, T))),
    lambda e, path: e.score(X, Y),
    lambda e, path: e.save(path / "e"),
], ids=["predict", "predict out", "score", "save"])  # fmt: skip
@pytest.mark.parametrize("failed", [False, True])
def test_before_fit(call, failed, tmp_path):
    est = Estimator(Net(), spec=PLAIN)
    if failed:
        with pytest.raises(DataError):
            est.fit(series(at=(1, 2, 3)), Y)
    with (
        nothing_changes(est),
        pytest.raises(NotFittedError, match="Estimator instance is not fitted yet"),
    ):
        call(est, tmp_path)
    assert list(tmp_path.iterdir()) == []


def read_only(a):
    a.flags.writeable = False
    return a


def out(*shape, dtype="float32"):
    return lambda: {"x": X, "out": np.full(shape, 7, dtype)}


def state_of(n_series, n_features=2, hidden=4):
    other = Estimator(nn.Sequential(LSTM(n_features, hidden), nn.Linear(hidden, 1)), spec=PLAIN)
    x = series(n_features, n_series)
    return other.fit(x, x[:1]).predict(x, return_state=True)[1]


@table(
    Case("2-D", ShapeError,
         "X has 12 features, but Estimator is expecting 2 features as input; the rows of a matrix "
         "are series of one "
         "step: if x is of one series or of one feature, add the missing axis: x[:, None] or x[None]", given(x=X[0])),
    Case("1-D", ShapeError, "x has one axis, of 12 values. Reshape your data", given(x=X[0, 0])),
    Case("None", DataError, "got None", given(x=None)),
    Case("features", ShapeError,
         "x has 3 features per step, but Estimator was fitted on 2; if a splitter cut it, note "
         "that arrays of shape "
         "(F, N, T) are cut along F: give samples(x) or timesteps(x) to the splitter", given(x=series(3))),
    Case("several inputs", ShapeError, "x has (2, 2) features per step, but Estimator was fitted on 2",
         given(x=(X, X))),
    Case("no series", ShapeError, "x has no series", given(x=X[:, :0])),
    Case("strings", DataError, "x must hold real numbers", given(x=X.astype(str))),
    Case("single NaN", DataError, ("x is nan at feature 1, series 2, step 3", "fill it in"),
         lambda: {"x": series(at=(1, 2, 3)), "out": np.full((1, N, T), 7.0)}),
    Case("Inf", DataError, "x is inf at feature 0, series 4, step 11",
         lambda: {"x": series(at=(0, 4, 11), value=np.inf), "out": np.full((1, N, T), 7.0)}),
    Case("lengths", ShapeError, "lengths must be 5 integers", given(x=X, lengths=[1, 2])),
    # out
    Case("out 2-D", ShapeError, ("out has shape (5, 12)", "expected (G, 5, 12)"), out(N, T)),
    Case("out N", ShapeError, ("out has shape (1, 4, 12)", "expected (G, 5, 12)"), out(1, 4, T)),
    Case("out T", ShapeError, "out has shape (1, 5, 13)", out(1, N, 13)),
    Case("out G", ShapeError, "out has shape (2, 5, 12); expected (1, 5, 12)", out(2, N, T)),
    Case("out of integers", DataError, ("out has dtype int64, which cannot hold float32", "make it floating-point"),
         out(1, N, T, dtype="int64")),
    *(
        Case(f"out of {kind}", DataError, (f"out has dtype {np.dtype(kind)}, which", "make it floating-point"),
             out(1, N, T, dtype=kind))
        for kind in ("U9", "S9", "V4", "M8[s]")
    ),
    Case("out of bools", DataError, "out has dtype bool", out(1, N, T, dtype="bool")),
    Case("out of torch integers", DataError, "out has dtype int64, which cannot hold float32",
         lambda: {"x": X, "out": torch.full((1, N, T), 7)}),
    Case("out read-only", DataError, ("out is read-only", "'r+'"),
         lambda: {"x": X, "out": read_only(np.full((1, N, T), 7.0))}),
    Case("out a number", ShapeError, ("out must be an array of shape (G, N, T)", "got int"), given(x=X, out=3)),
    Case("out a tuple of two", ShapeError, "out has 2 arrays, the model gives 1 outputs",
         lambda: {"x": X, "out": (np.full((1, N, T), 7.0), np.full((1, N, T), 7.0))}),
    Case("out an empty tuple", ShapeError, "out has 0 arrays, the model gives 1 outputs", given(x=X, out=())),
    Case("one of a tuple", ShapeError, "out[1] must be an array", lambda: {"x": X, "out": (np.zeros((1, N, T)), "b")}),
    # state
    *(
        Case(f"state {name}", DataError, ("state must be a list of tensors", "return_state=True", name),
             lambda value=value: {"x": X, "state": value})
        for name, value in {"dict": {}, "Tensor": torch.zeros(1, N, 4), "str": "ab", "int": 3,
                            "ndarray": np.zeros((2, 1, N, 4))}.items()
    ),
    *(
        Case(f"state of {name}", DataError, ("state[1] must be a tensor or an array of numbers", name),
             lambda value=value: {"x": X, "state": [torch.zeros(1, N, 4), value]})
        for name, value in {"NoneType": None, "str": "ab", "int": 3, "list": [0.0],
                            "object": np.full((1, N, 4), None), "<U1": np.full((1, N, 4), "a")}.items()
    ),
    Case("state of integers", DataError, "state[1], of 'rnn', has dtype torch.int64; expected floating-point numbers",
         lambda: {"x": X, "state": [torch.zeros(1, N, 4), np.zeros((1, N, 4), int)]}),
    Case("state empty", ShapeError, "state has 0 tensors, but the model has 2", given(x=X, state=[])),
    Case("state of one", ShapeError, "state has 1 tensor, but the model has 2",
         lambda: {"x": X, "state": [torch.zeros(1, N, 4)]}),
    Case("state of three", ShapeError, "state has 3 tensors, but the model has 2",
         lambda: {"x": X, "state": [torch.zeros(1, N, 4)] * 3}),
    Case("state of other units", ShapeError, "state[0], of 'rnn', has shape (1, 5, 3); expected (1, B, 4)",
         lambda: {"x": X, "state": state_of(N, 2, 3)}),
    Case("state of other series", ShapeError, "state[0] is of 4 series, the input has 5",
         lambda: {"x": X, "state": state_of(4)}),
)  # fmt: skip
def test_predict(case, est):
    arguments = case.arguments()
    with nothing_changes(est, arguments, X), pytest.raises(case.error) as info:
        est.predict(**arguments)
    assert_tells(info, case)


def test_an_hdf5_file_that_is_open_for_reading_is_no_out(est, tmp_path):
    with h5py.File(tmp_path / "out.h5", "w") as f:
        f["y"] = np.full((1, N, T), 7.0)
    with h5py.File(tmp_path / "out.h5", "r") as f:
        with (
            nothing_changes(est, f["y"]),
            pytest.raises(DataError, match="open for reading only; open it with mode"),
        ):
            est.predict(X, f["y"])
        with (
            pytest.raises(DataError, match="out has dtype int64"),
            h5py.File(tmp_path / "int.h5", "w") as g,
        ):
            est.predict(X, g.create_dataset("y", (1, N, T), "i8"))


def test_a_memory_map_that_is_read_only_is_no_out(est, tmp_path):
    mapped(Y, tmp_path, "out").flush()
    m = np.memmap(tmp_path / "out", "f4", "r", shape=(1, N, T))
    with (
        nothing_changes(est, m),
        pytest.raises(DataError, match=r"^out .*mode 'r\+'"),
    ):
        est.predict(X, m)


@table(
    Case("y 2-D", ShapeError, "y has shape (5, 12) = (N, T)", given(x=X, y=Y[0])),
    Case("y of other columns", ShapeError, "y has 4 features (axis 0 of (G, N, T)) where score needs 1",
         given(x=X, y=Y[0, :, :4])),
    Case("y None", ValueError, "This Estimator estimator requires y to be passed, but the target y is None.",
         given(x=X, y=None)),
    Case("y a string", DataError, "got 'y'", given(x=X, y="y")),
    Case("unequal N", ShapeError, "x has 5 series and y has 4", given(x=X, y=Y[:, :4])),
    Case("unequal T", ShapeError, "x has 12 time steps and y has 11", given(x=X, y=Y[:, :, 1:])),
    Case("features of y", ShapeError, ("y has 2 features", "score needs 1"), given(x=X, y=X)),
    Case("several y", ShapeError, ("y has 1, 1 features", "score needs 1"), given(x=X, y=(Y, Y))),
    Case("features of x", ShapeError, "x has 1 features", given(x=Y, y=Y)),
    Case("strings", DataError, "y must hold real numbers", given(x=X, y=Y.astype(str))),
    Case("Inf", DataError, ("y is infinite", "(NaN)"), given(x=X, y=series(1, at=(0, 1, 2), value=np.inf))),
    Case("weights", ShapeError, "sample_weight has shape (4,)", given(x=X, y=Y, sample_weight=np.ones(4))),
    Case("negative weight", DataError, "not negative", given(x=X, y=Y, sample_weight=-np.ones(N))),
    Case("lengths", DataError, "lengths must be from 1 to T=12", given(x=X, y=Y, lengths=[99] * N)),
)  # fmt: skip
def test_score(case, est):
    arguments = case.arguments()
    with nothing_changes(est, arguments), pytest.raises(case.error) as info:
        est.score(**arguments)
    assert_tells(info, case)


LENGTHS = np.array([12, 7, 9, 12, 3])


def padded(a, value):
    """Series of different lengths in one array, with a value after their ends."""
    return np.where(np.arange(T) < LENGTHS[:, None], a, value).astype("float32")


@pytest.mark.parametrize("value", [0, np.nan])
@pytest.mark.parametrize("kind", [np.asarray, list, samples])
def test_lengths_in_the_place_of_weights_are_refused_in_every_call(kind, value, est):
    x, y = padded(X, value), padded(Y, np.nan)
    lengths = LENGTHS
    if kind is samples:
        x, y = samples(x), samples(y)
    elif kind is list:
        lengths = LENGTHS.tolist()
    told = pytest.raises(DataError, match=r"sample_weight holds 3 to 12, .* lengths .*floats")
    for call in (est.fit, est.partial_fit, est.evaluate, est.score):
        with told:
            call(x, y, lengths)
    with told as caught:
        est.fit(X, Y, validation_data=(x, y, lengths))
    assert "of validation x, of 12 steps" in str(caught.value)
    assert "validation_data=(x, y, None, lengths)" in str(caught.value)


def test_validation_lengths_are_refused_beside_lengths_wherever_its_series_end(est):
    for lengths in (LENGTHS, np.full(N, 4)):
        with pytest.raises(DataError, match=r"look like the lengths .*validation x"):
            est.fit(X, Y, lengths=LENGTHS, validation_data=(X, Y, lengths))


@pytest.mark.slow
@pytest.mark.parametrize("weights", [[1, 2, 1, 2, 1], [1] * N, [0, 7, 9, 12, 3], LENGTHS * 1.0])
def test_whole_numbers_may_be_weights(weights):
    x = padded(X, 0)
    spec = {"epochs": 2, "batchsize": N, "seqsize": 2}
    given = np.asarray(weights)
    fits = [
        Estimator(Net(), spec=spec, random_state=0).fit(x, Y, w, lengths=lengths, validation_data=v)
        for w, lengths, v in (
            (given, None, (x, Y, given)),
            (given, LENGTHS, (X, Y, given)),
            (LENGTHS, LENGTHS, None),  # it is clear which is which
        )
    ]
    assert np.isfinite([est.loss_ for est in fits]).all()


class NoOutputAxis(nn.Module):
    """As many series as steps: torch broadcasts (S, B) with targets (S, B, 1)."""

    def __init__(self):
        super().__init__()
        self.rnn = LSTM(2, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.rnn(x)).squeeze(-1)


def squared(yhat, y):
    return (yhat - y) ** 2


def test_outputs_without_an_axis_are_an_error_of_a_criterion_and_of_predict():
    square = (X[:, :, :N], Y[:, :, :N])
    spec = {"epochs": 1, "batchsize": N, "seqsize": N}
    with pytest.raises(ShapeError, match=r"\(5, 5\) for targets of shape \(5, 5, 1\)"):
        Estimator(NoOutputAxis(), squared, spec=spec).fit(*square)
    # a loss may call the model in its own way
    loss = partial(lambda f, model, xs, ys: f(model(xs), ys[..., 0]).mean(), squared)
    est = Estimator(NoOutputAxis(), loss, spec=spec).fit(*square)
    with pytest.raises(ShapeError, match=r"gave an output of shape|axis"):
        est.predict(square[0])


def test_partial_fit_on_other_features(est):
    with (
        nothing_changes(est),
        pytest.raises(ShapeError, match=r"x has 3 features .* was fitted on 2"),
    ):
        est.partial_fit(series(3), Y)
    with (
        nothing_changes(est),
        pytest.raises(ShapeError, match=r"the model gives .* for targets of shape"),
    ):
        est.partial_fit(X, X)


def test_partial_fit_at_first(tmp_path):
    est = Estimator(Net(), spec=PLAIN)
    with nothing_changes(est), pytest.raises(DataError, match="x is nan at feature 1"):
        est.partial_fit(series(at=(1, 2, 3)), Y)
    assert not hasattr(est, "model_")
