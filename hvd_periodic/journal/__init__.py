"""What exchanges tell of themselves: to the log, to files, and to whoever listens."""

from hvd_periodic.journal.base import Journal, Listener, Report, Total

__all__ = ["Journal", "Listener", "Report", "Total"]
