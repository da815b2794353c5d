"""Private parts of scikit-learn are fenced into one file, and this says for which versions they are
known to work.
"""

import inspect
import re
from pathlib import Path

import pytest
import sklearn
from sklearn.metrics import get_scorer

import fluxutils_py
from fluxutils_py import sklearn_private
from fluxutils_py.sklearn_private import Scorer

KNOWN_TO_WORK = ("1.6", "1.9")
PACKAGE = Path(fluxutils_py.__file__).parent


def test_this_version_is_one_of_those_that_are_known_to_work():
    version = sklearn.__version__
    assert version.rpartition(".")[0] in KNOWN_TO_WORK, (
        f"scikit-learn {version} is new: check that everything in sklearn_private.py is still "
        "there, then add it here"
    )


def test_they_are_where_they_were():
    assert list(inspect.signature(sklearn_private._wrap_data_with_container).parameters) == [
        "method", "data_to_wrap", "original_input", "estimator",
    ]  # fmt: skip
    function, greater_is_better, response, settings = Scorer.of(get_scorer("neg_log_loss"))
    assert (function.__name__, greater_is_better, response, settings) == (
        "log_loss",
        False,
        "predict_proba",
        {},
    )


@pytest.mark.slow
def test_no_other_file_uses_any():
    private = re.compile(
        r"from sklearn[\w.]*\._\w+ import|from sklearn[\w.]* import [^\n]*\b_\w|\b_(score_func|response_method|sign)\b"
        r"|_get_param_names|_validate_params|_parameter_constraints"
    )
    users = {f.name for f in PACKAGE.rglob("*.py") if private.search(f.read_text("utf-8"))}
    assert users == {"sklearn_private.py"}
