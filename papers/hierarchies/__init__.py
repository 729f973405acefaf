"""Hierarchies of three models side by side: configurations, their generations, times and tables."""
