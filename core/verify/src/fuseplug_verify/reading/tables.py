"""What functions of torch and Python do, by their names: their code is not read."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHAPE = _names(
    """
    shape ndim size dim ndimension numel nelement stride is_contiguous nbytes storage_offset dense_dim
    sparse_dim
    """
)
TENSORS = frozenset({"value", "param", "option"})
"""Kinds of what may be a tensor."""

OF_TENSOR = {
    "dtype": "dtype",
    "is_floating_point": "dtype",
    "is_complex": "dtype",
    "itemsize": "dtype",
    "element_size": "dtype",
    "type": "dtype",
    "device": "device",
    "is_cuda": "device",
    "is_cpu": "device",
    "is_meta": "device",
    "get_device": "device",
    "is_mps": "device",
    "is_xpu": "device",
    "is_npu": "device",
    "layout": "device",
    "requires_grad": "grad",
    "grad_fn": "grad",
    "is_leaf": "grad",
    "grad": "grad",
    "data_ptr": "memory",
    "storage_offset": "memory",
}
STATE = {
    "is_autocast_enabled": "autocast",
    "get_autocast_dtype": "autocast",
    "get_autocast_gpu_dtype": "autocast",
    "get_autocast_cpu_dtype": "autocast",
    "is_autocast_cpu_enabled": "autocast",
    "is_autocast_available": "autocast",
    "is_autocast_cache_enabled": "autocast",
    "is_grad_enabled": "grad",
    "is_inference": "grad",
    "is_compiling": "tracing",
    "is_tracing": "tracing",
    "is_dynamo_compiling": "tracing",
    "is_exporting": "tracing",
    "is_scripting": "tracing",
    "is_torchdynamo_compiling": "tracing",
    "is_in_onnx_export": "tracing",
    "is_available": "device",
    "device_count": "device",
    "current_device": "device",
}
"""What a function asks about that says nothing of any value."""

MUTATES = _names(
    """
    append add update extend insert pop popitem clear remove setdefault discard write writelines put put_nowait
    send appendleft extendleft popleft rotate sort reverse move_to_end subtract intersection_update
    difference_update symmetric_difference_update set acquire release manual_seed seed set_state record notify
    flush close __setattr__ __delattr__ __setitem__ __delitem__ __next__ throw cache_clear set_
    """
)
MODULE_CHANGES = _names(
    """
    register_buffer register_parameter register_module add_module train eval to half float double bfloat16 type
    cuda cpu to_empty requires_grad_ zero_grad load_state_dict compile share_memory set_submodule
    set_extra_state __setattr__ __delattr__ __setstate__ ipu xpu mtia
    """
)
"""Methods of `torch.nn.Module` that change the module; those that register hooks do as well."""

RANDOM = _names(
    """
    rand randn rand_like randn_like randint randint_like randperm normal bernoulli multinomial poisson binomial
    uniform_ normal_ bernoulli_ exponential_ random_ cauchy_ log_normal_ geometric_ trunc_normal_ dropout
    dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_
    feature_alpha_dropout native_dropout rrelu rrelu_ gumbel_softmax sample rsample fractional_max_pool2d
    fractional_max_pool3d
    """
)
CLAMPS = _names(
    """
    clamp clip clamp_ clip_ clamp_min clamp_max clamp_min_ clamp_max_ nan_to_num nan_to_num_ hardtanh hardtanh_
    hardsigmoid hardsigmoid_ hardswish hardswish_ hardshrink softshrink isnan isinf isfinite isneginf isposinf
    where masked_fill masked_fill_ masked_scatter masked_select maximum minimum fmax fmin relu6 threshold
    threshold_ heaviside bucketize searchsorted clip_grad_norm_ copysign
    """
)
COMPARES = _names(
    """
    gt lt ge le greater less greater_equal less_equal isclose
    """
)
"""They clamp where their result is computed with. A comparison with 0 only tells the sign."""

VIEWS = _names(
    """
    view reshape t transpose permute squeeze unsqueeze expand expand_as view_as narrow select chunk split
    tensor_split hsplit vsplit unbind flatten unflatten ravel detach contiguous to type type_as float half
    bfloat16 double cpu cuda npu diagonal as_strided unfold movedim moveaxis swapaxes swapdims data T mT H mH
    real imag numpy broadcast_to broadcast_tensors view_as_complex view_as_real as_tensor asarray from_numpy
    atleast_1d atleast_2d rename alias reshape_as grad values indices requires_grad_ values_ split_with_sizes
    """
)
"""Functions whose result may share memory with their first argument."""

READS = _names(
    """
    get items keys values index count copy most_common elements total __getitem__ __contains__ __len__ __iter__
    issubset issuperset isdisjoint union intersection difference symmetric_difference match search fullmatch
    findall finditer sub split _asdict isEnabledFor tolist item __eq__ __repr__ __str__ __hash__ device
    initial_seed get_state qsize empty locked is_set
    """
)
"""Methods of Python's own objects that leave them as they are."""

LOGS = _names(
    """
    debug info warning warn error critical exception log isEnabledFor getEffectiveLevel
    """
)

SETTINGS = _names(
    """
    get_num_threads get_num_interop_threads get_default_dtype get_default_device get_float32_matmul_precision
    are_deterministic_algorithms_enabled is_deterministic_algorithms_warn_only_enabled
    get_deterministic_debug_mode is_inference_mode_enabled is_anomaly_enabled is_anomaly_check_nan_enabled
    get_rng_state initial_seed get_flush_denormal is_warn_always_enabled _is_tf32_enabled
    """
)
"""Questions about the process and its threads: the answers are not checked again at each call."""

OF_MEMORY = _names(
    """
    untyped_storage storage _typed_storage _version _base is_shared is_pinned
    """
)
"""Questions about where a tensor lies: no two calls need agree on that."""

OF_MODULE = _names(
    """
    parameters named_parameters buffers named_buffers get_parameter get_buffer get_submodule get_extra_state
    state_dict modules named_modules named_children
    """
)
"""Methods of `torch.nn.Module` by which everything below it may be reached."""
