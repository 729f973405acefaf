"""How well calibrated a block's confidences are, by position (law 4.8c)."""
