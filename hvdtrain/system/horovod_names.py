"""What programs that are used to Horovod's functions and classes find in hvdtrain instead."""

_OF_THE_TOPOLOGY = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
_REPLACEMENTS = {
    **{name: f"topology.{name}, where topology = hvdtrain.init()" for name in _OF_THE_TOPOLOGY},
    "allreduce": "hvdtrain.average in a step, and hvdtrain.reduce elsewhere",
    "grouped_allreduce": "hvdtrain.average in a step, and hvdtrain.reduce elsewhere",
    "allgather": "hvdtrain.gather in a step, and hvdtrain.gather_objects elsewhere",
    "grouped_allgather": "hvdtrain.gather in a step, and hvdtrain.gather_objects elsewhere",
    "allgather_object": "hvdtrain.gather_objects",
    "broadcast_variables": "hvdtrain.broadcast",
    "broadcast_global_variables": "hvdtrain.broadcast",
    "Average": "op='average'",
    "Sum": "op='sum'",
    "Adasum": "op='adasum'",
    "DistributedAdasumOptimizer": "hvdtrain.DistributedOptimizer(optimizer, op='adasum')",
    "PartialDistributedGradientTape": "hvdtrain.PartialDistributedOptimizer",
    "SyncBatchNormalization": "keras.layers.BatchNormalization(synchronized=True)",
    "ProcessSet": "hvdtrain.process_set",
    "add_process_set": "hvdtrain.process_set",
    "join": "hvdtrain.shard, with which all ranks make the same number of steps, or hvdtrain.Trainer",
    "load_model": "keras.models.load_model, and wrap model.optimizer in hvdtrain.DistributedOptimizer",
}


def replacement(name: str) -> str | None:
    """What to use instead of Horovod's ``name``; None if Horovod has no such name, or hvdtrain has it as well."""
    return _REPLACEMENTS.get(name)
