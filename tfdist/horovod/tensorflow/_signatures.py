"""The interface of `horovod.tensorflow` 0.28.1: names, parameters and defaults.

Pure data, for the tests (the functions have these parameters; each is used with
another value than its default on two ranks) and for docs/from-horovod.md.
"""

from __future__ import annotations

_REDUCTION = "average=None, device_dense='', device_sparse='', " + (
    "compression=Compression.none, op=None, prescale_factor=1.0, postscale_factor=1.0"
)
_GRADIENTS = (
    "device_dense='', device_sparse='', compression=Compression.none, "
    "sparse_as_dense=False"
)
_SET = "process_set=global_process_set"
_SCOPE = "ignore_name_scope=False"

# Function or class → its parameters, as one writes them.
SIGNATURES = {
    # Start, end, and who this process is.
    "init": "comm=None, process_sets=None",
    "shutdown": "",
    "is_initialized": "",
    "size": "",
    "rank": "",
    "local_size": "",
    "local_rank": "",
    "cross_size": "",
    "cross_rank": "",
    "is_homogeneous": "",
    "size_op": "process_set_id=0, name=None",
    "rank_op": "name=None",
    "local_size_op": "name=None",
    "local_rank_op": "name=None",
    "process_set_included_op": "process_set_id=0, name=None",
    "start_timeline": "file_path, mark_cycles=False",
    "stop_timeline": "",
    # What was built.
    "mpi_threads_supported": "",
    "mpi_enabled": "",
    "mpi_built": "",
    "gloo_enabled": "",
    "gloo_built": "",
    "nccl_built": "",
    "ddl_built": "",
    "ccl_built": "",
    "cuda_built": "",
    "rocm_built": "",
    "gpu_available": "ext_base_name, verbose=False",
    # Collectives.
    "allreduce": f"tensor, {_REDUCTION}, name=None, {_SET}, {_SCOPE}",
    "grouped_allreduce": f"tensors, {_REDUCTION}, {_SET}, {_SCOPE}, name=None",
    "allgather": f"tensor, name=None, {_SCOPE}, {_SET}",
    "grouped_allgather": f"tensors, name=None, {_SCOPE}, {_SET}",
    "broadcast": f"tensor, root_rank, name=None, {_SCOPE}, {_SET}",
    "broadcast_": f"variables, root_rank, name=None, {_SET}",
    "alltoall": f"tensor, splits=None, name=None, {_SCOPE}, {_SET}",
    "reducescatter": (
        f"tensor, device_dense='', compression=Compression.none, op=Average, name=None,"
        f" {_SET}, {_SCOPE}, prescale_factor=1.0, postscale_factor=1.0"
    ),
    "grouped_reducescatter": (
        f"tensors, device_dense='', compression=Compression.none, op=Average, {_SET}, "
        "prescale_factor=1.0, postscale_factor=1.0"
    ),
    "join": "",
    "handle_average_backwards_compatibility": "op, average",
    "check_num_rank_power_of_2": "num_rank",
    # Variables and objects.
    "broadcast_variables": f"variables, root_rank, {_SET}, inplace=False",
    "broadcast_global_variables": "root_rank",
    "BroadcastGlobalVariablesHook": "root_rank, device=''",
    "broadcast_object": f"obj, root_rank=0, session=None, name=None, {_SET}",
    "broadcast_object_fn": f"root_rank=0, session=None, name=None, {_SET}",
    "allgather_object": f"obj, session=None, name=None, {_SET}",
    # Process sets.
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    # Gradients.
    "DistributedGradientTape": (
        f"gradtape, {_GRADIENTS}, op=Average, gradient_predivide_factor=1.0, "
        f"num_groups=0, groups=None, {_SET}, scale_local_gradients=True"
    ),
    "PartialDistributedGradientTape": (
        f"gradtape, {_GRADIENTS}, op=Average, gradient_predivide_factor=1.0, "
        f"num_groups=0, groups=None, {_SET}, local_layers=None, "
        "scale_local_gradients=True"
    ),
    "DistributedOptimizer": (
        f"optimizer, name=None, use_locking=False, {_GRADIENTS}, "
        "backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, "
        f"average_aggregated_gradients=False, num_groups=0, groups=None, {_SET}, "
        "scale_local_gradients=True"
    ),
    "SyncBatchNormalization": "fused=False, **kwargs",
    # Elastic.
    "elastic.run": "func",
    "elastic.TensorFlowState": "variables=None, session=None, **kwargs",
    "elastic.TensorFlowKerasState": "model, optimizer=None, backend=None, **kwargs",
}

# Methods of what DistributedGradientTape returns.
TAPE = {
    "register_local_source": "source",
    "gradient": "target, sources, output_gradients=None, use_generic_names=False",
    "get_local_and_global_gradients": (
        "target, sources, output_gradients=None, use_generic_names=False"
    ),
}

# Constants → Horovod's number.
CONSTANTS = {
    "Average": 0,
    "Sum": 1,
    "Adasum": 2,
    "Min": 3,
    "Max": 4,
    "Product": 5,
}
