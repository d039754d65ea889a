"""Speculative decoding with draft tokens from other responses, preferably to the same prompt: an index and a drafter for vLLM."""
