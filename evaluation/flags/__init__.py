"""The settings that fit an engine best, found by replaying its own rule."""
