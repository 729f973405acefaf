"""Responses X ~ target: the sources that answer requests, behind one interface."""
