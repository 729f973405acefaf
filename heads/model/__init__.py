"""One acceptance-prediction head: forward, files, model card."""
