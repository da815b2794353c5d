"""Files of whatever is fitted, and model cards."""

from fluxutils_py.saving.card import card
from fluxutils_py.saving.saving import load, save

__all__ = ["card", "load", "save"]
