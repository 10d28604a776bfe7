"""Reports exchanges to the log, to run logs, and to listeners."""

from hvd_periodic.journal.base import Counters, Journal, Listener, Report, Total

__all__ = ["Counters", "Journal", "Listener", "Report", "Total"]
