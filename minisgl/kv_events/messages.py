"""The events of a prefix cache in the format of vLLM 0.33, which llm-d's endpoint picker reads.

A message on the wire has three frames: the topic, the sequence number (8 bytes, big-endian) and an
`EventBatch` as MessagePack. A batch is an array, an event is a map with the key `type`.

A block is a run of `block_size` tokens. Its hash stands for these tokens and for all tokens before
them, so a block is in a cache only together with the blocks before it.
"""

import msgspec

KV_MEDIUM = "GPU"  # the tier of the KV pool; pickers weigh tiers by this name


class _Event(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Base of the events."""


class BlockStored(_Event):
    """The cache holds these consecutive blocks from now on.

    block_hashes       one for each block, in 1..2^64 - 1.
    parent_block_hash  the block before the first one; None: the first one begins a prompt.
    token_ids          all tokens of the blocks, in order.
    lora_id, lora_name always None: adapters are not supported.
    extra_keys         one entry for each block. The first block of a prompt with a cache salt has
                       [salt]; all other entries are None. None: no block has a salt.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(_Event):
    """The cache does not hold these blocks any more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(_Event):
    """The subscriber forgets all blocks of this replica. Later events announce blocks again."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one message. ts: Unix time in seconds of the message."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None
