"""What is read from the rows: the summary, the table and the plot."""

from pipeline.report.report import Report, write_report

__all__ = ["Report", "write_report"]
