"""The state of the service: its phase, hung workers, and the metrics."""

__all__: list[str] = []
