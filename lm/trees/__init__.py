"""Trees of candidate tokens: several continuations of a text, which one forward of the target verifies (laws 4.2 and
4.5).
"""
