"""The KV cache: which blocks (`block_pool`, torch-free), their tensors (`paged`), their reuse (`prefix`), and what
of them a sliding window still reads (`window`)."""
