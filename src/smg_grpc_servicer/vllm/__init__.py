"""The vLLM worker."""
