"""Hugging Face decoders: their files, what may be asked of them, their modules and adapters."""
