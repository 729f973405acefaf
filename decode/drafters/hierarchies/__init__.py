"""Drafters made of drafters (law 4.12): HSDDW, Chen's variant, and the command that decodes, costs and compares
them.
"""
