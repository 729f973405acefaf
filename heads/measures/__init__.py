"""How good a head is: scores, calibration, tables, plots."""
