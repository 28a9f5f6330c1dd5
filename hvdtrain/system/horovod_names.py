"""What programs that are used to Horovod's functions and classes find in hvdtrain instead."""

_OF_THE_TOPOLOGY = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
_OF_THE_BUILD = (
    *("mpi_built", "gloo_built", "nccl_built", "cuda_built", "rocm_built", "ccl_built", "ddl_built"),
    *("mpi_enabled", "gloo_enabled", "mpi_threads_supported", "is_homogeneous"),
)
_REPLACEMENTS = {
    **dict.fromkeys(_OF_THE_BUILD, "the command python -m hvdtrain doctor"),
    **{name: f"topology.{name}, where topology = hvdtrain.init()" for name in _OF_THE_TOPOLOGY},
    "allreduce": "hvdtrain.average in a step, and hvdtrain.reduce elsewhere",
    "grouped_allreduce": "hvdtrain.average in a step, and hvdtrain.reduce elsewhere",
    "allgather": "hvdtrain.gather in a step, and hvdtrain.gather_objects elsewhere",
    "grouped_allgather": "hvdtrain.gather in a step, and hvdtrain.gather_objects elsewhere",
    "allgather_object": "hvdtrain.gather_objects",
    "broadcast_variables": "hvdtrain.broadcast",
    "broadcast_global_variables": "hvdtrain.broadcast",
    "alltoall": "horovod.tensorflow.alltoall, after hvdtrain.init",
    "reducescatter": "horovod.tensorflow.reducescatter, after hvdtrain.init",
    "grouped_reducescatter": "horovod.tensorflow.grouped_reducescatter, after hvdtrain.init",
    "Average": "op='average'",
    "Sum": "op='sum'",
    "Min": "hvdtrain.reduce(values, 'min')",
    "Max": "hvdtrain.reduce(values, 'max')",
    "Adasum": "op='adasum'",
    "DistributedAdasumOptimizer": "hvdtrain.DistributedOptimizer(optimizer, op='adasum')",
    "PartialDistributedGradientTape": "hvdtrain.PartialDistributedOptimizer",
    "SyncBatchNormalization": "keras.layers.BatchNormalization(synchronized=True)",
    "ProcessSet": "hvdtrain.process_set",
    "add_process_set": "hvdtrain.process_set",
    "broadcast_object_fn": "hvdtrain.broadcast_object",
    "is_initialized": "hvdtrain.init, which may be called again",
    "shutdown": "the end of the program, at which a rank leaves the job",
    "start_timeline": "hvdtrain.init(timeline=…)",
    "stop_timeline": "hvdtrain.init(timeline=…), whose file is complete when the program ends",
    "join": "hvdtrain.shard, with which all ranks make the same number of steps, or hvdtrain.Trainer",
    "load_model": "keras.models.load_model, and wrap model.optimizer in hvdtrain.DistributedOptimizer",
}


def replacement(name: str) -> str | None:
    """What to use instead of Horovod's ``name``; None if Horovod has no such name, or hvdtrain has it as well."""
    return _REPLACEMENTS.get(name)
