"""The disk tier of the prefix cache: KV blocks that outlive the process. Torch-free; payloads are opaque bytes.

    <root>/                                    the folder the user names
        kv-v1/                                 one per format version; other versions are never touched
            lock                               flock'ed while entries are evicted, never waited for
            <fingerprint, 32 hex>/             one per model and way of computing
                label                          a name for people, never trusted
                <parent, 32 hex>-<tokens>-<key, 64 hex>.kv    an entry: 64 tokens, or fewer for a tail
                tmp-<random>                   an entry being written

Entries are immutable and self-describing (`format`), named by a hash chain over the token ids (`kvcache.keys`).
There is no index: a reader computes the names it wants, an evictor reads the tree of blocks from the names. `store`
finds (through `reader`) and loads, `writer` stores (through `publish`) in the background, `eviction` keeps to
the limit, `folder` refuses unsafe places, `admin` serves `infer cache`.
"""
