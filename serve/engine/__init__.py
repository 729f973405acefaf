"""The vLLM side of the plugin: its V1 runner, one supported release at a time; everything that needs no vLLM is one
floor up.
"""
