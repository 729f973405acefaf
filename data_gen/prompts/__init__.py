"""From any prompt set to `Prompt` objects, and from those to the text and ids that a model reads."""
