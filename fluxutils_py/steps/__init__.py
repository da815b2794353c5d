"""One step of a model as operations, and the native call that runs them on a carried state."""

__all__: list[str] = []  # streams, predictions and exports use it; users do not
