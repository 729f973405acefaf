"""One prompt: on the command line, and inside transformers."""
