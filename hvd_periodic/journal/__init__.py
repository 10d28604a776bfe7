"""Reports exchanges to the log, to run logs, and to listeners."""

from hvd_periodic.journal.base import Journal, Listener, Report, Total

__all__ = ["Journal", "Listener", "Report", "Total"]
