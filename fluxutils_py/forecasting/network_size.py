"""Choose by the amount of data how large a network is and how long it is trained."""

from __future__ import annotations

from copy import copy
from typing import cast

from torch import nn

from fluxutils_py.forecasting.direct_model import DirectModel
from fluxutils_py.forecasting.forecaster_settings import ForecasterSettings
from fluxutils_py.forecasting.segment_model import SegmentModel

# Chosen on the ends of training parts: 10 daily series of a year, 45 weekly ones of two years, 7
# daily ones of two years, 60 series of counts, hourly series. See benchmarks/EXPERIMENTS.md.
FEW_VALUES = 10_000  # of all series together, that larger networks overfit
SMALL = 32
LARGE = 96
VALUES_PER_STEP = 64  # of the optimizer
LEAST_STEPS = 100
MOST_STEPS = 1500
N_MODELS = 4  # the surest gain, whatever the data
MANY_VALUES = 50_000  # from which on four take more than four minutes


class SizedSettings(ForecasterSettings):
    """Settings that leave nothing open, as :func:`with_size` returns; only a type."""

    hidden_size: int
    max_steps: int
    n_models: int


def with_size(settings: ForecasterSettings, n_values: int) -> SizedSettings:
    """Return a copy of settings in which size, number of networks and steps are chosen if None."""
    sized = copy(settings)  # shallow: callbacks are the user's
    if sized.hidden_size is None:
        sized.hidden_size = SMALL if n_values < FEW_VALUES else LARGE
    if sized.max_steps is None:
        sized.max_steps = min(max(n_values // VALUES_PER_STEP, LEAST_STEPS), MOST_STEPS)
    if sized.n_models is None:
        sized.n_models = N_MODELS if n_values < MANY_VALUES else N_MODELS // 2
    return cast(SizedSettings, sized)


def size_of(model: nn.Module) -> int:
    """Return the size of a network, which was chosen where the settings leave it open."""
    assert isinstance(model, DirectModel | SegmentModel)
    return model.head.in_features
