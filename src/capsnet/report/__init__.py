"""Reports: HTML pages and figures."""
