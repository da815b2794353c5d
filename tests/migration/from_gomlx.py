"""What gomlx gives for the rows of ``docs/from_gomlx.md``."""

from tests.migration import Checks

checks = Checks()
