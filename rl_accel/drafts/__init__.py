"""Drafts for speculative decoding from earlier responses to the same prompt: an index of tokens, and vLLM's side of it."""
