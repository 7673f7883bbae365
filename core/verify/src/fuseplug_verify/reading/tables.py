"""What functions of torch and Python do, by their names, because their code is not read."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHAPES = _names("""
    shape ndim size dim ndimension numel nelement stride is_contiguous nbytes storage_offset data_ptr requires_grad
    grad_fn is_leaf is_inference is_grad_enabled
""")
"""Names that tell a tensor's shape or memory, or whether gradients are recorded: only examples can vary these."""

DTYPES = _names("""
    dtype is_floating_point is_complex itemsize element_size type device is_cuda is_cpu is_meta get_device is_mps is_xpu
    is_npu layout is_autocast_enabled get_autocast_dtype get_autocast_gpu_dtype get_autocast_cpu_dtype
    is_autocast_cpu_enabled is_autocast_available is_autocast_cache_enabled is_compiling is_dynamo_compiling
    is_exporting is_available device_count current_device get_device_capability
""")
"""Names whose values vary only with what is tried (dtypes, device, autocast), or in traced calls of the original."""

CREATES = _names("""
    zeros ones empty full arange linspace tensor as_tensor zeros_like ones_like empty_like full_like rand randn
    rand_like randn_like randint randint_like randperm eye tril_indices triu_indices finfo iinfo Size
""")
"""Functions of torch that make a tensor, or describe a dtype or a shape."""

COPIES = _names("clone bmm mm matmul addmm baddbmm linear cat stack")
"""Functions whose results never share memory with their arguments."""

RANDOM = _names("""
    rand randn rand_like randn_like randint randint_like randperm normal bernoulli multinomial poisson binomial
    uniform_ normal_ bernoulli_ exponential_ random_ cauchy_ log_normal_ geometric_ trunc_normal_ dropout
    dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_
    feature_alpha_dropout native_dropout rrelu rrelu_ gumbel_softmax sample rsample fractional_max_pool2d
    fractional_max_pool3d
""")

CLAMPS = _names("""
    clamp clip clamp_ clip_ clamp_min clamp_max clamp_min_ clamp_max_ nan_to_num nan_to_num_ hardtanh hardtanh_
    hardsigmoid hardsigmoid_ hardswish hardswish_ hardshrink softshrink isnan isinf isfinite isneginf isposinf
    where masked_fill masked_fill_ masked_scatter masked_select maximum minimum fmax fmin relu6 threshold
    threshold_ heaviside bucketize searchsorted copysign gt lt ge le less less_equal greater_equal isclose
""")
"""Functions that treat some magnitudes differently from others."""

NOT_COMPUTING = _names("""
    backward register_hook register_post_accumulate_grad_hook retain_grad share_memory_ set_ set_data resize_
    resize_as_ untyped_storage storage _typed_storage is_shared is_pinned pin_memory module_load rename_ refine_names
    __setstate__ __reduce_ex__ __dlpack__ __array__ numpy map_ map2_ apply_ broadcast_tensors from_dlpack from_file
    get_default_dtype set_default_dtype
""")
"""Names of functions and methods that look at more than numbers, or do more than compute."""

MUTATES = _names("""
    append add update extend insert pop popitem clear remove setdefault discard appendleft extendleft popleft rotate
    sort reverse move_to_end __setitem__ __delitem__ __setattr__ __delattr__
""")
"""Methods that change the object that they belong to, one of Python's own or of a model."""

LOGS = _names("debug info warning warn error critical exception log")
"""Functions of loggers."""

LIBRARIES = (
    *("math", "packaging", "einops", "torch.functional", "torch.nn.functional"),
    *("torch.distributions", "torch.special", "torch.linalg", "torch.fft"),
)
"""Python modules whose functions do nothing but compute."""
