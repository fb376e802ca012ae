"""What a recorded run looks like: one HTML page with interactive charts, and pictures."""

from __future__ import annotations

from ejkernel.bench.report.page import page_html, write_page
from ejkernel.bench.report.plots import write_plots

__all__ = ["page_html", "write_page", "write_plots"]
