"""Hierarchies of three models side by side: contenders, their generations, times and tables."""
