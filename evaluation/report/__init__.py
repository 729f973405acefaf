"""Every policy and threshold from one trace: tables, plots, page, and the verdict."""
