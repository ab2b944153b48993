"""The harness of k8s-tests: clusters, Helm releases, waits, load from inside, and diagnostics.

The harness knows Kubernetes and the names in the chart. The tests contain the expectations.
"""

__all__: list[str] = []
