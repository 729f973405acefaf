"""Feature drafts: small models that read the target's states (EAGLE, GliDe, DSpark, MTP), from released directories."""
