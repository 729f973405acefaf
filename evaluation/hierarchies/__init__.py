"""Hierarchies of three models side by side: competitors, their generations, times and tables."""
