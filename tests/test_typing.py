"""Type checkers see the types of the package in a user's script."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import fluxutils_py

SCRIPT = """
import numpy as np

from fluxutils_py import Estimator, SequenceRegressor, Spec

x = np.zeros((1, 5, 7), dtype="float32")
est = Estimator(spec=Spec(epochs=1), random_state=0)
reveal_type(est.fit(x, x))
reveal_type(SequenceRegressor(hidden_size=4).fit(x, x))
reveal_type(est.predict(x))
reveal_type(est.score(x, x))
shape: tuple[int, ...] = est.fit(x, x).predict(x).shape
est.fit(x, x, epochs="three")
Estimator(mode=2)
Spec(epochs="three")
est.predict(x).no_such_attribute
"""
# what takes long to read, and is not asked about; the package itself is silent, as an installed one
# is
CONFIG = """
[mypy]
[mypy-torch.*,sklearn.*,h5py.*,joblib.*,scipy.*,tqdm.*]
follow_imports = skip
ignore_missing_imports = True
[mypy-fluxutils_py.*]
follow_imports = silent
"""
SEEN = [
    'note: Revealed type is "fluxutils_py.estimator.estimator.Estimator"',
    'note: Revealed type is "fluxutils_py.auto.sequence_estimators.SequenceRegressor"',
    'note: Revealed type is "numpy.ndarray | Any"',
    'note: Revealed type is "float"',
    'error: Argument "epochs" to "fit" of "Estimator" has incompatible type "str"; expected "int | None"  [arg-type]',
    'error: Unexpected keyword argument "mode" for "Estimator"; did you mean "model"?  [call-arg]',
    'error: Argument "epochs" to "Spec" has incompatible type "str"; expected "int | None"  [arg-type]',
    'error: Item "ndarray" of "ndarray | Any" has no attribute "no_such_attribute"  [union-attr]',
]


@pytest.mark.slow
def test_a_users_script_is_checked(tmp_path, monkeypatch):
    pytest.importorskip("mypy")
    package = Path(fluxutils_py.__file__).parent
    assert (package / "py.typed").exists()
    # installed, mypy finds it as it does for users
    if package.parent != Path(sysconfig.get_path("purelib")):
        monkeypatch.setenv("MYPYPATH", str(package.parent))
    monkeypatch.chdir(tmp_path)
    Path("user.py").write_text(SCRIPT)
    Path("mypy.ini").write_text(CONFIG)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "mypy.ini",
        "--cache-dir",
        os.devnull,
        "user.py",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not ended.stderr
    # of all NumPys
    said = re.sub(
        r"ndarray\[(Any|tuple\[[^]]*\]), (Any|[\w.]*dtype\[Any\])\]", "ndarray", ended.stdout
    )
    found = [line.partition(": ")[2] for line in said.splitlines()]
    assert [line for line in found if line.startswith(("note: Reveal", "error"))] == SEEN
