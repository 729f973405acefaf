"""Data that the official SpecDec++ code made."""
