"""Four papers reproduced for the pair of a config: their tables, closed forms, hierarchies of three models on a clock,
and DSpark's judge of confidences.
"""
