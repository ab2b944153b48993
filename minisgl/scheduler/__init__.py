"""The scheduler: it plans the requests of each step and assigns KV pages to requests."""

from minisgl.scheduler.inbox import LocalInbox
from minisgl.scheduler.process import build_scheduler, run_scheduler
from minisgl.scheduler.scheduler import Scheduler

__all__ = ["LocalInbox", "Scheduler", "build_scheduler", "run_scheduler"]
