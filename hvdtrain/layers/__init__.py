"""Layers whose weights are divided among the ranks."""

from hvdtrain.layers.embedding_group import EmbeddingGroup
from hvdtrain.layers.sharded_embedding import ShardedEmbedding
from hvdtrain.layers.whole_tables import whole_tables

__all__ = ["EmbeddingGroup", "ShardedEmbedding", "whole_tables"]
