"""Ready-made estimators whose choice is made here, for tests of what does not depend on it."""

from dataclasses import dataclass, fields, replace
from typing import Any

from fluxutils_py import SequenceClassifier, SequenceRegressor, Spec
from fluxutils_py.auto.sequence_estimators import FLAT

# the settings of 0.1.0
PLAIN = {
    **{"cell": "lstm", "hidden_size": 32, "dropout": 0.0, "lr": 1e-2},
    **{"epochs": 100, "max_updates": None, "batchsize": 256, "seqsize": None},
    **{"lr_schedule": None, "shuffle": False, "clip": None},
}
FURTHER = {f.name for f in fields(Spec)} - set(FLAT)


def with_spec(arguments):
    """Arguments of a ready-made estimator; the fields of a spec among them are in its spec."""
    spec = {name: value for name, value in arguments.items() if name in FURTHER}
    return {**{k: v for k, v in arguments.items() if k not in spec}, "spec": spec or None}


class _Choosing:
    def choose(self, size, is_fit):
        return replace(super().choose(size, is_fit), **self.chosen())


class _Plain(_Choosing):
    """The network sees the inputs as they are."""

    def chosen(self):
        return {"scale_input": False, "input_noise": 0.0}


class PlainRegressor(_Plain, SequenceRegressor):
    pass


class PlainClassifier(_Plain, SequenceClassifier):
    pass


# in messages and files; pickle takes the other name
PlainRegressor.__name__ = "SequenceRegressor"
PlainClassifier.__name__ = "SequenceClassifier"


def plain_regressor(hidden_size=32, num_layers=1, cell="lstm", **arguments):
    positional = {"hidden_size": hidden_size, "num_layers": num_layers, "cell": cell}
    return PlainRegressor(**with_spec({**PLAIN, **positional, **arguments}))


def plain_classifier(hidden_size=32, num_layers=1, cell="lstm", **arguments):
    positional = {"hidden_size": hidden_size, "num_layers": num_layers, "cell": cell}
    arguments = {"class_weight": None, **arguments}
    return PlainClassifier(**with_spec({**PLAIN, **positional, **arguments}))


class _Quiet(_Choosing):
    """Without the noise of inputs, which each rank and each device draws for itself."""

    def chosen(self):
        return {"input_noise": 0.0}


class QuietRegressor(_Quiet, SequenceRegressor):
    pass


class QuietClassifier(_Quiet, SequenceClassifier):
    pass


class KernelClassifier(_Choosing, SequenceClassifier):
    """Of few causal kernels."""

    def chosen(self):
        return {"n_kernels": 168}


class _OfLags(_Choosing):
    def chosen(self):
        return {"n_lags": self.n_lags}


@dataclass(eq=False, repr=False, kw_only=True)
class LagRegressor(_OfLags, SequenceRegressor):
    """A linear model of so many steps."""

    cell: Any = "linear"
    n_lags: int = 2


@dataclass(eq=False, repr=False, kw_only=True)
class LagClassifier(_OfLags, SequenceClassifier):
    """A linear model of so many steps."""

    cell: Any = "linear"
    n_lags: int = 2
