"""Drafts for speculative decoding from other responses, first those to the same prompt: an index and a drafter for vLLM."""
