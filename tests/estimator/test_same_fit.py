"""What ranks compare before a fit, as far as one rank tells; tests/mpi compares several."""

import numpy as np

from fluxutils_py.estimator.same_fit import collective_settings, require_same_inputs
from fluxutils_py.inputs.inputs import Schema, read_inputs
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training import Checkpointer
from tests.plain_networks import plain_regressor


def test_the_course_of_a_fit_depends_on_its_epochs_and_hooks(tmp_path):
    est = plain_regressor(epochs=7, early_stopping=True, patience=3)
    course = collective_settings(est.resolved_params(), False, None)
    assert course["epochs"] == 7
    assert course["patience"] == 3
    assert collective_settings(est.resolved_params(), False, 2)["epochs"] == 2
    est.set_params(callbacks=Checkpointer(tmp_path))
    assert collective_settings(est.resolved_params(), False, None) != course


def test_one_rank_has_the_inputs_of_all():
    inputs = read_inputs(np.zeros((2, 3, 4)), Schema("Estimator"), lengths=[4, 2, 3])
    require_same_inputs(RankGroup(), inputs)
