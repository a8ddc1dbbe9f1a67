"""The speculative step: draft, verify, accept, commit; CUDA graphs, prefill, the batch on the device."""
