"""The scheduler: it decides which requests each step contains and which request owns which page."""

from minisgl.scheduler.inbox import LocalInbox
from minisgl.scheduler.process import build_scheduler, run_scheduler
from minisgl.scheduler.scheduler import Scheduler

__all__ = ["LocalInbox", "Scheduler", "build_scheduler", "run_scheduler"]
