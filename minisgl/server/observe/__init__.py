"""What the API server observes: the phase of the service, hung workers, and the metrics."""

__all__: list[str] = []
