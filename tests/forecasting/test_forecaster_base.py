"""The data that a forecaster reads and keeps."""

import pytest

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting import Forecaster

pytestmark = pytest.mark.filterwarnings("ignore:.*series have no more steps than a season")


@pytest.mark.slow
def test_the_history_is_computed_when_it_is_first_needed(panel, small):
    fc = Forecaster(3, **small).fit(panel)
    assert isinstance(fc, Forecaster)
    assert isinstance(fc._origin, tuple)
    assert fc.ids_.tolist() == sorted(panel.unique_id.unique())
    assert fc._origin is fc.history_


def test_covariates_need_a_frame(small, rng):
    with pytest.raises(DataError, match="covariates are columns of data frames"):
        Forecaster(3, hist_exog_list=["price"], **small).fit(rng.normal(size=(1, 2, 30)))
