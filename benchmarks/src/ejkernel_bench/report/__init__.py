"""What a recorded run looks like: one HTML page with interactive charts, pictures, and a section of a site."""

from __future__ import annotations

from ejkernel_bench.report.folder import missing, write
from ejkernel_bench.report.page import page_html, write_page
from ejkernel_bench.report.plots import write_plots
from ejkernel_bench.report.section import write_section

__all__ = ["missing", "page_html", "write", "write_page", "write_plots", "write_section"]
