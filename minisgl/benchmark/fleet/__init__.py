"""A fleet of replicas in virtual time: real schedulers and prefix caches, routers, autoscaling."""

__all__: list[str] = []
