"""KVFS: the KV cache of language-model agents, as files."""

__version__ = "0.1.0"
