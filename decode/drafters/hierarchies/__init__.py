"""Drafters made of drafters (design 4.12): HSDDW, Chen's variant, and the command that decodes, costs and compares them."""
