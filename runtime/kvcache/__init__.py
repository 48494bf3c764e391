"""The KV cache: which blocks (`block_pool`), their memory (`paged`) and how torch sees it (`tensors`), their reuse
(`prefix`), and what of them a sliding window still reads (`window`)."""
