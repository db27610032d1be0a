# SPDX-License-Identifier: Apache-2.0
"""Who runs in the next step, and what became of the last one.

add, abort ──► waiting ──admit──► running ──commit──► ended
                  ▲                  │
                  └─────preempt──────┘
"""

from whalefall.runtime.scheduler.config import SchedulerConfig
from whalefall.runtime.scheduler.rerun import rerun
from whalefall.runtime.scheduler.scheduler import Scheduler
from whalefall.runtime.scheduler.trace import TraceWriter

__all__ = ["Scheduler", "SchedulerConfig", "TraceWriter", "rerun"]
