"""The harness of k8s-tests: clusters, Helm releases, waits, load from inside, and diagnostics.

It knows Kubernetes and the chart's names; what is to hold on a cluster stands in the tests.
"""

__all__: list[str] = []
