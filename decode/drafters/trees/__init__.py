"""Trees of drafts: how they grow, when a policy stops them, and the loop that verifies them."""
