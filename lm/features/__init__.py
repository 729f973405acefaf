"""Feature drafts: small models that read the target's states (EAGLE, EAGLE-3, GliDe, DSpark), loaded from released
directories.
"""
