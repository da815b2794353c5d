"""Choose the model and the settings of a ready-made estimator from the sizes of its data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fluxutils_py.inputs.inputs import Inputs
from fluxutils_py.inputs.targets import Targets

# Steps in all, beyond which a large network learns from all it sees: it needs neither dropout nor a
# trial.
PLENTY = 614_400
MANY_CLASSES = 10  # above which classes are not weighed: characters, rather than states
MOST_FEATURES = 400  # of a linear model of lags
MOST_LAGS = 48
STATISTICS = 13  # features for each input: itself, three exponential means, nine of windows
MANY_SERIES = 4000  # above which fewer kernels are enough
WHOLE = 500  # steps, up to which one target per series is learnt from whole series
PASSES = 20
LEAST_TRIAL = 200  # steps, of which a fifth is held out


@dataclass(frozen=True)
class DataSize:
    """What the choice depends on.

    Attributes
    ----------
    n_features : int
    n_series : int
        Of all ranks.
    n_steps : int
        Of all series together.
    longest : int
        Steps of the longest series.
    per_series : bool
        Whether there is one target per series.
    n_classes : int or None
        If targets are labels.
    """

    n_features: int
    n_series: int
    n_steps: int
    longest: int
    per_series: bool
    n_classes: int | None

    @classmethod
    def of(cls, inputs: Inputs, targets: Targets, n_classes: int | None) -> DataSize:
        segments = inputs.segments()
        return cls(
            n_features=sum(s.F for s in inputs.series),
            n_series=len(segments),
            n_steps=int(segments.length.sum()),
            longest=segments.max_length,
            per_series=targets.per_series,
            n_classes=n_classes,
        )


@dataclass(frozen=True)
class FitChoice:
    """What "auto" stands for in a fit. A file of an estimator holds it.

    Attributes
    ----------
    cell : str
        "kernels", "linear", "lstm", or "linear+lstm".
    n_kernels : int
        Features of the kernels.
    n_lags : int
    has_statistics : bool
        Whether a linear model may use statistics of several spans.
    has_means : bool
        Whether a network sees exponential means.
    class_weight : str or None
    needs_trial : bool
        Whether a fit on four fifths of the data is to find the gain first.
    gain : float
        Factor of what the network adds to the linear model.
    hidden_size, lr, dropout, input_noise, max_updates, batchsize, seqsize
        See :class:`fluxutils_py.SequenceRegressor`.
    """

    cell: str
    n_kernels: int = 10_000
    n_lags: int = 24
    has_statistics: bool = True
    has_means: bool = True
    hidden_size: int = 48
    lr: float = 5e-3
    dropout: float = 0.3
    input_noise: float = 0.1
    max_updates: int = 600
    batchsize: int = 16
    seqsize: int | None = 64
    class_weight: str | None = None
    needs_trial: bool = False
    gain: float = 1.0

    @classmethod
    def of(cls, cell: object, size: DataSize, *, is_fit: bool = True) -> FitChoice:
        """Choose for data of this size.

        ``cell`` is the argument of the estimator, "auto" or a choice of the user; unless
        ``is_fit``, the data are only the first of many.
        """
        is_auto = cell == "auto"
        if is_auto:
            cell = "kernels" if size.per_series else "linear+lstm"
            if size.n_steps < LEAST_TRIAL and size.longest == 1:
                cell = "linear"
            if not is_fit:
                cell = "lstm"  # which learns from part after part
        is_plenty = size.n_steps > PLENTY
        is_sum = isinstance(cell, str) and cell.startswith("linear+")
        n_lags = min(size.longest, MOST_LAGS, max(1, MOST_FEATURES // size.n_features))
        few_classes = size.n_classes is not None and size.n_classes <= MANY_CLASSES
        choice = cls(
            cell=cell if isinstance(cell, str) else "a class",
            n_kernels=2_000 if size.n_series > MANY_SERIES else 10_000,
            n_lags=n_lags,
            has_statistics=size.longest > 1 and STATISTICS * size.n_features <= MOST_FEATURES,
            has_means=size.longest > 1,
            class_weight="sqrt_balanced" if few_classes and not size.per_series else None,
            needs_trial=is_auto and is_sum and not is_plenty and size.n_steps >= LEAST_TRIAL,
        )
        if is_plenty:
            network = {"hidden_size": 128, "lr": 1e-2, "dropout": 0.0, "input_noise": 0.0}
            choice = replace(choice, max_updates=1000, batchsize=32, **network)  # type: ignore[arg-type]
        elif not is_sum:
            choice = replace(choice, lr=1e-2, dropout=0.0, input_noise=0.0)
        return replace(choice, **_windows_of(size, choice))  # type: ignore[arg-type]


def _windows_of(size: DataSize, choice: FitChoice) -> dict[str, int | None]:
    """Return how to cut the data, and how often to update a network."""
    if size.longest == 1:  # rows of single steps
        n_updates = 3 * PASSES * -(-size.n_series // 128)
        return {"batchsize": 128, "seqsize": None, "max_updates": min(max(n_updates, 200), 1000)}
    seqsize = choice.seqsize
    if size.per_series:
        seqsize = None if size.longest <= WHOLE else 128
    if choice.max_updates == 1000:
        return {"seqsize": seqsize}
    steps_of_update = choice.batchsize * min(seqsize or size.longest, size.longest)
    n_updates = PASSES * -(-size.n_steps // steps_of_update)
    return {"seqsize": seqsize, "max_updates": min(max(n_updates, 200), 600)}
