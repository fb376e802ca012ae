"""What a recorded run looks like: one HTML page with interactive charts, and pictures."""

from __future__ import annotations

from ejkernel_bench.report.folder import missing, write
from ejkernel_bench.report.page import page_html, write_page
from ejkernel_bench.report.plots import write_plots

__all__ = ["missing", "page_html", "write", "write_page", "write_plots"]
