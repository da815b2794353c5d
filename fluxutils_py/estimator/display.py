"""Draw loss curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.validation import require_package


class LossCurveDisplay:
    """A plot of the loss per epoch: training as a line, validation dashed in the same colour.

    Create it with :meth:`from_estimator` or :meth:`from_cv_results`, as other displays of
    scikit-learn. It needs matplotlib.

    Parameters
    ----------
    loss_curve : list of float, or list of such
        Training loss after each epoch, of one fit or of each of several.
    validation_loss_curve : the same, or None
        Validation loss; NaN where there is none, or None for a fit without any.
    name : str, list of str, or None
        Names of the fits in the legend. None: "training" and "validation" for one, "fold 0", "fold
        1", ... for several.

    Attributes
    ----------
    line_, validation_line_ : matplotlib Line2D, or list of such
        The lines, one per fit; None for a fit without validation loss.
    ax_ : matplotlib Axes
    figure_ : matplotlib Figure

    Examples
    --------
    >>> display = LossCurveDisplay(
    ...     loss_curve=[3.0, 2.0, 1.5], validation_loss_curve=[3.5, 2.5, 2.25]
    ... )
    >>> display.plot().ax_.get_xlabel()  # doctest: +SKIP
    'epoch'
    """

    def __init__(
        self, *, loss_curve: Any, validation_loss_curve: Any = None, name: Any = None
    ) -> None:
        self.loss_curve = loss_curve
        self.validation_loss_curve = validation_loss_curve
        self.name = name

    @classmethod
    def from_estimator(
        cls, estimator: Any, *, ax: Any = None, name: str | None = None, curve_kwargs: Any = None
    ) -> Self:
        """Draw the loss of a fitted estimator.

        Parameters
        ----------
        estimator : object
            An estimator with ``loss_curve_``, a pipeline that ends in one, or a search whose best
            estimator is one.
        ax : matplotlib Axes, optional
            Axes to draw on. None: those of a new figure.
        name : str, optional
            Name in the legend. None: the estimator's class.
        curve_kwargs : dict, optional
            Keywords for matplotlib's ``plot``.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before ``fit``.
        TypeError
            If the estimator has no loss curve.
        """
        fitted = _estimator_with_curve(estimator)
        training, validation = _loss_curves(fitted)
        display = cls(
            loss_curve=training,
            validation_loss_curve=validation,
            name=type(fitted).__name__ if name is None else name,
        )
        return display.plot(ax, curve_kwargs=curve_kwargs)

    @classmethod
    def from_cv_results(
        cls,
        cv_results: Mapping[str, Any],
        *,
        ax: Any = None,
        name: str | Sequence[str] | None = None,
        curve_kwargs: Any = None,
    ) -> Self:
        """Draw the losses of the folds of a cross-validation.

        Parameters
        ----------
        cv_results : dict
            The result of ``cross_validate(..., return_estimator=True)``.
        ax : matplotlib Axes, optional
        name : str or list of str, optional
            A prefix of "fold 0", "fold 1", ..., or a name for each fold.
        curve_kwargs : dict or list of dict, optional
            Keywords for matplotlib's ``plot``, for all folds or for each.

        Raises
        ------
        ValueError
            If the results lack the fitted estimators, or the number of names or keywords is wrong.
        """
        if "estimator" not in cv_results:
            raise ValueError(
                f"cv_results has no 'estimator' (found: {', '.join(cv_results)}): "
                "call cross_validate(..., return_estimator=True)"
            )
        curves = [_loss_curves(_estimator_with_curve(e)) for e in cv_results["estimator"]]
        validation = [v for _, v in curves]
        display = cls(
            loss_curve=[t for t, _ in curves],
            validation_loss_curve=validation if any(v is not None for v in validation) else None,
            name=name,
        )
        return display.plot(ax, curve_kwargs=curve_kwargs)

    def plot(
        self, ax: Any = None, *, name: str | Sequence[str] | None = None, curve_kwargs: Any = None
    ) -> Self:
        """Draw, on ``ax`` or in a new figure; parameters as in :meth:`from_cv_results`.

        Raises
        ------
        ImportError
            Without matplotlib.
        """
        modules = ("pyplot", "cbook", "lines", "ticker")
        plt, cbook, lines, ticker = (
            require_package(f"matplotlib.{n}", "plot", "LossCurveDisplay") for n in modules
        )
        curves = self._curves(self.name if name is None else name, curve_kwargs)
        if ax is None:
            _, ax = plt.subplots(layout="constrained")
            ax.spines[["top", "right"]].set_visible(False)
        solid: list[Any] = []
        dashed: list[Any] = []
        for training, validation, style, (label, validation_label) in curves:
            # "c" and "color", "lw" and "linewidth" are one keyword
            style = {"label": label, **cbook.normalize_kwargs(style, lines.Line2D)}
            solid += _draw_curve(ax, training, style)
            if validation is None:
                dashed.append(None)
                continue
            look = {
                # the one that the axes chose for the line of training
                "color": solid[-1].get_color(),
                "linestyle": "--",
                "label": validation_label,
            }
            dashed += _draw_curve(ax, validation, style | look)
        if self._has_several and any(dashed):
            # one entry of the legend for all that are dashed
            ax.plot([], [], color="0.4", linestyle="--", label="validation")
        ax.set(xlabel="epoch", ylabel="loss")
        # epochs are whole, and a fit may have only one
        ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
        ax.legend(frameon=False)
        self.ax_ = ax
        self.figure_ = ax.figure
        self.line_: Any = solid if self._has_several else solid[0]
        self.validation_line_: Any = None
        if any(dashed):
            self.validation_line_ = dashed if self._has_several else dashed[0]
        return self

    @property
    def _has_several(self) -> bool:
        """Whether there is a list of curves rather than one curve."""
        # len(), since an array of several numbers has no truth value
        return len(self.loss_curve) > 0 and isinstance(self.loss_curve[0], Sequence | np.ndarray)

    def _curves(self, name: Any, curve_kwargs: Any) -> list[tuple[Any, Any, Any, Any]]:
        """Return training and validation losses of each fit, how they look, and the labels of the
        two; what has no label is not in the legend.
        """
        curves = self.loss_curve if self._has_several else [self.loss_curve]
        n = len(curves)
        validation = self.validation_loss_curve
        if validation is None or not self._has_several:
            validation = [validation] * n
        names = _as_list(name, n, "name")
        styles = _as_list({} if curve_kwargs is None else curve_kwargs, n, "curve_kwargs")
        if not self._has_several:
            # without a list of fits, the legend tells training and validation apart
            prefix = "" if names[0] is None else f"{names[0]}, "
            labels = f"{prefix}training", f"{prefix}validation"
            return [(curves[0], validation[0], styles[0], labels)]
        if isinstance(name, str | None):
            names = [f"{name}, fold {i}" if name else f"fold {i}" for i in range(n)]
        parts = zip(curves, validation, styles, names, strict=True)
        return [(curve, valid, style, (label or "", None)) for curve, valid, style, label in parts]


def _draw_curve(ax: Any, curve: Sequence[float], style: dict[str, Any]) -> list[Any]:
    epochs = range(1, len(curve) + 1)
    point = {"marker": "o"} if len(curve) == 1 else {}  # a line of one point cannot be seen
    lines: list[Any] = ax.plot(epochs, curve, **point | style)
    return lines


def _estimator_with_curve(estimator: Any) -> Any:
    """Return the fitted estimator with the loss curve: the last step of a pipeline, the best of a
    search.
    """
    while not hasattr(estimator, "loss_curve_"):
        check_is_fitted(estimator)
        if hasattr(estimator, "steps"):
            estimator = estimator.steps[-1][1]
        elif hasattr(estimator, "best_estimator_"):
            estimator = estimator.best_estimator_
        else:
            raise TypeError(
                "LossCurveDisplay needs a fitted estimator with loss_curve_, or a pipeline or "
                f"search that ends in one; {type(estimator).__name__} has none"
            )
    return estimator


def _loss_curves(estimator: Any) -> tuple[list[float], list[float] | None]:
    """Return training and validation loss per epoch."""
    training = estimator.loss_curve_
    validation = getattr(estimator, "validation_loss_curve_", None)
    if validation and len(validation) < len(training):  # some fits had validation data, some not
        # so that each loss is drawn at its epoch
        validation = [record.get("validation_loss", math.nan) for record in estimator.history_]
    return training, validation or None


def _as_list(given: Any, n: int, name: str) -> list[Any]:
    """Return a list of ``n`` values: the given ones, or ``n`` times the given one."""
    if not isinstance(given, list | tuple):
        return [given] * n
    if len(given) != n:
        raise ValueError(
            f"{name} has {len(given)} entries for {n} loss curves; give one, or one for each"
        )
    return list(given)
