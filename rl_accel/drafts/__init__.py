"""Drafts for speculative decoding from other responses, first those to the same prompt: an index, and vLLM's side of it."""
