"""What the calls of the pages for users of other systems give: one module for each page, named
after it.

A module holds ``checks = Checks()`` and one function for each row, which gets the names after the
call, and the value of the call if it is an expression:

    @checks.of("saves = h5load(path)")
    def _(names, value):
        assert names["saves"] == ...

The expected value comes from the reference: its formula, its documents, its tests. Not from the
code under test.
"""

from collections.abc import Callable
from typing import Any

Check = Callable[[dict[str, Any], Any], Any]


class Checks(dict[str, Check]):
    """Checks by the text of the call, as it stands in the page (a bar without its backslash)."""

    def of(self, *calls: str) -> Callable[[Check], Check]:
        """Register a check of one row, or of several rows that give the same."""

        def register(check: Check) -> Check:
            for call in calls:
                if call in self:
                    raise ValueError(f"two checks of {call}")
                self[call] = check
            return check

        return register
