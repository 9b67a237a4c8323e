"""Penstock reads long prompts into language models in bounded memory, exactly, without stalling anyone else."""

__version__ = "0.1.0"
