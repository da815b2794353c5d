"""Skip tests of what older versions of other packages lack; see "Lowest versions" in
docs/background/where_it_runs.md.
"""

from importlib.metadata import version

import pytest
from sklearn.utils.fixes import parse_version


def skip_before(package, lowest, what):
    """Skip the test that calls this if the installed package is older."""
    if parse_version(version(package)) < parse_version(lowest):
        pytest.skip(f"{what}: needs {package} {lowest}")
