"""Every policy and threshold from one trace, hierarchies beside them by decoding: tables, plots, page."""
