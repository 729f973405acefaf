"""How far a block's confidences can be trusted, place by place (law 4.8c)."""
