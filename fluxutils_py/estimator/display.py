"""Draw loss curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

from sklearn.utils.validation import check_is_fitted

from fluxutils_py.estimator.streams.streaming import unwrap
from fluxutils_py.validation import require_package


class LossCurveDisplay:
    """A plot of the loss per epoch: training as a line, validation dashed in the same colour.

    Create it with :meth:`from_estimator`, as other displays of scikit-learn. It needs matplotlib.
    Several fits are drawn one after the other, on the same ``ax``.

    Parameters
    ----------
    loss_curve : list of float
        Training loss after each epoch.
    validation_loss_curve : list of float, optional
        Validation loss; NaN where there is none.
    name : str, optional
        Stands before "training" and "validation" in the legend.

    Attributes
    ----------
    line_, validation_line_ : matplotlib Line2D
        The second is None for a fit without validation loss.
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
        self, *, loss_curve: Any, validation_loss_curve: Any = None, name: str | None = None
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
            Axes to draw on. None: a new figure.
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
        fitted = unwrap(estimator).estimator
        check_is_fitted(fitted)
        if not hasattr(fitted, "loss_curve_"):
            raise TypeError(
                "LossCurveDisplay needs a fitted estimator with loss_curve_, or a pipeline or "
                f"search that ends in one; {type(fitted).__name__} has none"
            )
        training = fitted.loss_curve_
        validation = getattr(fitted, "validation_loss_curve_", None)
        if validation and len(validation) < len(training):  # some fits had validation data
            # so that each loss is drawn at its epoch
            validation = [record.get("validation_loss", math.nan) for record in fitted.history_]
        display = cls(
            loss_curve=training,
            validation_loss_curve=validation or None,
            name=type(fitted).__name__ if name is None else name,
        )
        return display.plot(ax, curve_kwargs=curve_kwargs)

    def plot(self, ax: Any = None, *, name: str | None = None, curve_kwargs: Any = None) -> Self:
        """Draw, on ``ax`` or in a new figure; parameters as in :meth:`from_estimator`.

        Raises
        ------
        ImportError
            Without matplotlib.
        """
        plt, ticker = (
            require_package(f"matplotlib.{n}", "plot", "LossCurveDisplay")
            for n in ("pyplot", "ticker")
        )
        if ax is None:
            _, ax = plt.subplots(layout="constrained")
            ax.spines[["top", "right"]].set_visible(False)
        name = self.name if name is None else name
        prefix = "" if name is None else f"{name}, "
        style = {"label": f"{prefix}training", **(curve_kwargs or {})}
        self.line_ = _draw_curve(ax, self.loss_curve, style)
        self.validation_line_: Any = None
        if self.validation_loss_curve is not None:
            style |= {
                # the one that the axes chose for the line of training
                "color": self.line_.get_color(),
                "linestyle": "--",
                "label": f"{prefix}validation",
            }
            self.validation_line_ = _draw_curve(ax, self.validation_loss_curve, style)
        ax.set(xlabel="epoch", ylabel="loss")
        # epochs are whole, and a fit may have only one
        ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
        ax.legend(frameon=False)
        self.ax_ = ax
        self.figure_ = ax.figure
        return self


def _draw_curve(ax: Any, curve: Sequence[float], style: dict[str, Any]) -> Any:
    epochs = range(1, len(curve) + 1)
    point = {"marker": "o"} if len(curve) == 1 else {}  # a line of one point cannot be seen
    return ax.plot(epochs, curve, **point | style)[0]
