"""What is read from the rows: the summary, its tables and plots, and the traces."""

from pipeline.report.report import Report, write_report

__all__ = ["Report", "write_report"]
