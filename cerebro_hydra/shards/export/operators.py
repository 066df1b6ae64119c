"""Lists the operators that an exported graph may call; nothing else is ever looked up by a name.

All are functions of tensors and numbers. None opens a file, starts a process, changes a setting of
torch or resizes the memory of a tensor, and none is listed whose kernel trusts the sizes that it is
given. The types of their arguments come from their schemas.

Arguments are checked where an operator's kernel reads beyond a tensor if sizes don't fit together.
PyTorch's own modules never call it so, but a graph from a file may.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

# Names of ATen's operators. A name allows its variant in place as well ("relu" also "relu_"), with
# all overloads that compute with tensors and have no `out`, or only the one behind a dot.
_ATEN = """
abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr angle arccos arccosh arcsin
arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh baddbmm bitwise_and bitwise_left_shift
bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm ceil chain_matmul clamp clamp_max
clamp_min clip conj conj_physical copysign cos cosh cross deg2rad digamma div divide dot eq erf erfc
erfinv exp exp2 expm1 float_power floor floor_divide fmax fmin fmod frac frexp gcd ge ger greater
greater_equal heaviside hypot i0 igamma igammac imag inner isclose isfinite isin isinf isnan
isneginf isposinf isreal kron lcm ldexp le lerp less less_equal lgamma log log10 log1p log2
logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt gt matmul matrix_exp
matrix_power maximum minimum mm mul multiply mv mvlgamma nan_to_num ne neg negative nextafter
not_equal outer polar polygamma positive pow rad2deg real reciprocal remainder round rsqrt rsub sgn
sigmoid sign signbit sin sinc sinh sqrt square sub subtract tan tanh tensordot true_divide trunc
vdot xlogy __and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__ __ilshift__
__irshift__

all amax amin aminmax any argmax argmin argsort argwhere bincount bucketize cdist corrcoef
count_nonzero cov cummax cummin cumprod cumsum cumulative_trapezoid diff dist frobenius_norm
gradient histc kthvalue logcumsumexp logsumexp max mean median min mode msort nanmean nanmedian
nanquantile nansum nonzero nonzero_numpy nonzero_static norm norm_except_dim nuclear_norm
pairwise_distance pdist prod quantile renorm searchsorted sort std std_mean sum sum_to_size topk
trace trapezoid trapz unique_consecutive unique_dim _unique2 var var_mean _weight_norm

adjoint alias as_strided atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to
cartesian_prod cat channel_shuffle chunk clone column_stack combinations complex concat concatenate
constant_pad_nd contiguous copy detach diag diag_embed diagflat diagonal diagonal_scatter
dsplit dstack expand expand_as fill fill_diagonal_ flatten flip fliplr flipud gather hsplit hstack
index index_add index_copy index_fill index_put index_reduce index_select lift_fresh lift_fresh_copy
mH mT masked_fill masked_scatter masked_select matrix_H meshgrid moveaxis movedim narrow
native_channel_shuffle numpy_T one_hot pad pad_sequence permute pixel_shuffle pixel_unshuffle put
ravel reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d
replication_pad2d replication_pad3d reshape reshape_as resolve_conj resolve_neg roll rot90 row_stack
scatter scatter_add scatter_reduce select select_scatter slice slice_scatter split split_with_sizes
squeeze stack swapaxes swapdims t take take_along_dim tensor_split tile to transpose tril triu
type_as unbind unflatten unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze vander
view view_as view_as_complex view_as_real vsplit vstack where zero

arange bartlett_window bernoulli blackman_window empty empty_like empty_permuted eye full full_like
hamming_window hann_window kaiser_window linspace logspace new_empty new_full new_ones new_zeros
ones ones_like rand rand_like randint randint_like randn randn_like randperm scalar_tensor
tril_indices triu_indices zeros zeros_like

adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d affine_grid_generator alpha_dropout avg_pool1d avg_pool2d avg_pool3d batch_norm
bilinear binary_cross_entropy binary_cross_entropy_with_logits celu col2im conv1d conv2d conv3d
conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution cosine_embedding_loss
cosine_similarity cross_entropy_loss dropout einsum elu embedding embedding_bag
feature_alpha_dropout feature_dropout fractional_max_pool2d fractional_max_pool3d gelu glu
grid_sampler grid_sampler_2d grid_sampler_3d group_norm hardshrink hardsigmoid hardswish hardtanh
hinge_embedding_loss huber_loss im2col instance_norm kl_div l1_loss layer_norm leaky_relu linear
log_sigmoid log_softmax margin_ranking_loss max_pool1d max_pool1d_with_indices max_pool2d
max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d max_unpool3d mish mse_loss
multi_margin_loss multilabel_margin_loss native_dropout native_group_norm
native_layer_norm nll_loss nll_loss2d nll_loss_nd poisson_nll_loss prelu relu relu6 rms_norm rrelu
scaled_dot_product_attention selu silu smooth_l1_loss soft_margin_loss softmax softplus softshrink
threshold triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d _upsample_bicubic2d_aa
_upsample_bilinear2d_aa fake_quantize_per_channel_affine fake_quantize_per_tensor_affine gru.input
gru_cell lstm.input lstm_cell rnn_relu.input rnn_relu_cell rnn_tanh.input rnn_tanh_cell

fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2
fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft
fft_rfft2 fft_rfftfreq fft_rfftn istft stft

cholesky cholesky_inverse cholesky_solve det inverse linalg_cholesky linalg_cholesky_ex linalg_cond
linalg_cross linalg_det linalg_diagonal linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
linalg_inv linalg_inv_ex linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_solve linalg_matmul
linalg_matrix_exp linalg_matrix_norm linalg_matrix_power linalg_matrix_rank linalg_multi_dot
linalg_norm linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander
linalg_vecdot linalg_vector_norm logdet pinverse qr slogdet svd

special_bessel_j0 special_bessel_j1 special_digamma special_entr special_erf special_erfc
special_erfcx special_erfinv special_exp2 special_expit special_expm1 special_gammainc
special_gammaincc special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p
special_log_ndtr special_log_softmax special_logit special_logsumexp special_multigammaln
special_ndtr special_ndtri special_polygamma special_psi special_round special_sinc special_softmax
special_xlog1py special_xlogy special_zeta

_log_softmax _safe_softmax _softmax _to_copy _unsafe_view

item sym_is_contiguous sym_numel sym_size.int sym_storage_offset sym_stride.int _assert_async.msg
_assert_scalar.default sym_constrain_range.default sym_constrain_range_for_size.default
"""

_BINARY = (
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
    operator.pow, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
    operator.and_, operator.or_, torch.sym_max, torch.sym_min,
)  # fmt: skip
_UNARY = (
    operator.neg, operator.pos, operator.abs, operator.not_, math.ceil, math.floor, math.trunc,
    math.sqrt, round, torch.sym_float, torch.sym_int, torch.sym_not, torch.sym_sqrt,
)  # fmt: skip
_NUMBERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    **{function.__name__: (function, ("number", "number")) for function in _BINARY},
    **{function.__name__: (function, ("number",)) for function in _UNARY},
    "sym_ite": (torch.sym_ite, ("number", "number", "number")),
    "sym_sum": (torch.sym_sum, ("List[number]",)),
}

TENSOR, NUMBER, MANY, NOTHING = "Tensor", "number", "many", "nothing"
"""What a call gives: a tensor, a number, several tensors, or nothing."""

# The types of arguments that a graph can hold, as torch's schemas call them.
_ARGUMENT = re.compile(
    r"(Optional\[)?(List\[(Optional\[)?(Tensor|number|int|float|bool)\]*"
    r"|(Tensor|number|int|float|bool|str|Device|ScalarType|Layout|MemoryFormat|Generator)\]?)"
)
_SCALARS = {"number", "int", "float", "bool"}

_ALLOWED = frozenset(_ATEN.split())

_SCALES = ("scales", "scales_d", "scales_h", "scales_w")
_UPSAMPLING = """
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""


@dataclass(frozen=True)
class Parameter:
    """Describes an argument that an operator takes; `type` is a type of torch's schemas."""

    name: str
    type: str
    required: bool
    positional: bool


@dataclass(frozen=True)
class Operator:
    """Holds a function that a graph may call, and what it takes and gives."""

    name: str
    run: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    result: str

    def __reduce__(self) -> tuple[Any, ...]:
        return operator_named, (self.name,)


@cache
def operator_named(name: str) -> Operator | None:
    """Return the operator of a name such as "aten.relu.default", or None if it is not allowed."""
    space, _, rest = name.partition(".")
    if space == "aten":
        packet, _, overload = rest.partition(".")
        return _aten(name, packet, overload)
    if name == "getitem":
        several, index = Parameter("a", MANY, True, True), Parameter("b", "int", True, True)
        return Operator(name, operator.getitem, (several, index), TENSOR)
    if space == "number" and rest in _NUMBERS:
        run, types = _NUMBERS[rest]
        takes = tuple(Parameter(str(i), type, True, True) for i, type in enumerate(types))
        return Operator(name, run, takes, NUMBER)
    return None


def name_of(target: Any) -> str | None:
    """Return the name under which a graph's target is looked up, whether it is allowed or not."""
    if isinstance(target, OpOverload):
        return str(target)
    if target is operator.getitem:
        return "getitem"
    for name, (function, _) in _NUMBERS.items():
        if target is function:
            return f"number.{name}"
    return None


def _aten(name: str, packet: str, overload: str) -> Operator | None:
    base = packet if packet.endswith("__") else packet.removesuffix("_")
    one = not _ALLOWED.isdisjoint({f"{packet}.{overload}", f"{base}.{overload}"})
    if not one and _ALLOWED.isdisjoint({packet, base}):
        return None
    found = getattr(torch.ops.aten, packet, None)
    if found is None or overload not in found.overloads() or overload.startswith("prim_"):
        return None
    target = getattr(found, overload)
    takes = []
    for argument in target._schema.arguments:
        kind = str(argument.real_type)
        if argument.is_out or not _ARGUMENT.fullmatch(kind):
            return None
        required = not argument.has_default_value()
        takes.append(Parameter(argument.name, kind, required, not argument.kwarg_only))
    result = _result([str(given.type) for given in target._schema.returns])
    computes = result in (TENSOR, MANY) or any("Tensor" in taken.type for taken in takes)
    if result is None or not (one or computes):
        return None
    run = checked(packet, target, [taken.name for taken in takes])
    return Operator(name, run, tuple(takes), result)


def _result(returns: list[str]) -> str | None:
    if not returns:
        return NOTHING
    if len(returns) > 1:
        return MANY if set(returns) == {"Tensor"} else None
    if returns[0] in _SCALARS:
        return NUMBER
    return {"Tensor": TENSOR, "List[Tensor]": MANY}.get(returns[0])


Check = Callable[..., bool]


def checked(name: str, run: Callable[..., Any], parameters: Sequence[str]) -> Callable[..., Any]:
    """Return an operator that raises ValueError before its kernel would read beyond a tensor.

    Args:
        name: of the operator, without its overload.
        parameters: the names of its arguments, in order.
    """
    check = _CHECKS.get(name)
    return run if check is None else partial(_run_checked, check, run, tuple(parameters))


def _run_checked(
    check: Check, run: Callable[..., Any], parameters: Sequence[str], *args: Any, **kwargs: Any
) -> Any:
    if not check(**dict(zip(parameters, args, strict=False)), **kwargs):
        raise ValueError("sizes or types of its arguments don't fit together")
    return run(*args, **kwargs)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> bool:
    if v.dtype != g.dtype or not v.is_floating_point() or not v.numel():
        return False
    if dim == -1:
        return g.numel() == 1
    return 0 <= dim < v.dim() and g.shape == tuple(
        size if number == dim else 1 for number, size in enumerate(v.shape)
    )


def _embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, **options: Any,
) -> bool:  # fmt: skip
    if indices.dim() != 1 or offsets.dim() != 1 or len(offsets) <= include_last_offset:
        return False
    ends = torch.cat([offsets, offsets.new_full((1,), len(indices))])
    return (
        weight.dim() == 2
        and weight.is_floating_point()
        and bool((offsets[0] == 0) & (ends.diff() >= 0).all())
        and (
            per_sample_weights is None
            or (
                per_sample_weights.shape == indices.shape
                and per_sample_weights.dtype == weight.dtype
            )
        )
    )


def _recurrent(
    gates: int, input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor],
    has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
    batch_first: bool,
) -> bool:  # fmt: skip
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    if len(states) != (2 if gates == 4 else 1) or any(x.dim() != 3 for x in (input, *states)):
        return False
    directions = 2 if bidirectional else 1
    cells = num_layers * directions
    out, hidden = states[0].shape[2], states[-1].shape[2]  # they differ if outputs are projected
    rows = input.shape[0 if batch_first else 1]
    shapes: list[tuple[int, ...]] = []
    for layer in range(num_layers):
        width = input.shape[2] if layer == 0 else out * directions
        cell: list[tuple[int, ...]] = [(gates * hidden, width), (gates * hidden, out)]
        cell += [(gates * hidden,)] * (2 if has_biases else 0)
        cell += [(out, hidden)] if out != hidden else []
        shapes += cell * directions
    return (
        num_layers > 0
        and min(*input.shape, out, hidden) > 0
        and all(x.is_floating_point() for x in (input, *states, *params))
        and all(tuple(x.shape[:2]) == (cells, rows) for x in states)
        and [tuple(x.shape) for x in params] == shapes
    )


def _attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> bool:
    return key.dim() > 1 and value.dim() > 1 and key.shape[-2] == value.shape[-2]


def _repeats(repeats: Tensor | int, **options: Any) -> bool:
    # Counts whose sum overflows would be written to a tensor that is too small.
    return not isinstance(repeats, Tensor) or float(repeats.sum(dtype=torch.float64)) < 2**62


def _upsampled(output_size: Sequence[int] | None, **given: Any) -> bool:
    # A source lies at its place divided by the scale, and must lie in the input.
    scales = [given[name] for name in _SCALES if name in given]
    if not scales or output_size is None:
        return True
    sizes = given["self"].shape[-len(scales) :]
    return len(output_size) == len(sizes) and all(
        scale is None or made <= size * scale < math.inf
        for scale, made, size in zip(scales, output_size, sizes, strict=True)
    )


_CHECKS: dict[str, Check] = {
    "_weight_norm": _weight_norm,
    "embedding_bag": _embedding_bag,
    "lstm": partial(_recurrent, 4),
    "gru": partial(_recurrent, 3),
    "rnn_tanh": partial(_recurrent, 1),
    "rnn_relu": partial(_recurrent, 1),
    "repeat_interleave": _repeats,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(_UPSAMPLING.split(), _upsampled),
}
