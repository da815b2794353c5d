"""One step after another: streams, their intervals and alarms, and learning."""

__all__: list[str] = []
