"""Responses X ~ target: a server, a file or the target itself answers requests, all behind one interface."""
