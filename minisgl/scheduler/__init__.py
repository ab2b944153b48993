"""The brain: who runs in which step, and who owns which memory."""

from minisgl.scheduler.inbox import LocalInbox
from minisgl.scheduler.process import build_scheduler, run_scheduler
from minisgl.scheduler.scheduler import Scheduler

__all__ = ["LocalInbox", "Scheduler", "build_scheduler", "run_scheduler"]
