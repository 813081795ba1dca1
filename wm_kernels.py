"""The reward contraction of delayed Weight Maximization (WM 3.2, 3.5): what a displaced unit earns from the credit above it.

    wm_reward         R[g,i] = scale / M * sum_{n in g} dy[n,i] * sum_j u[n,j] W[j,i]       streams g of M = group consecutive tokens
    wm_credit         c[n,i] = R[g(n),i] * xi[n,i] / sigma                                   the reward, given to each token's own probe
    wm_credit_relu2   wm_credit at dy = relu(pre + sigma xi)^2 - relu(pre)^2                 (stage 1's c_fc), dy never stored whole
    signs             the probes xi = +-1, any range of rows again from (seed, row)

    impl      how
    torch     one GEMM u @ W, then the rest in place on blocks of rows that stay in cache; the default on the CPU
    triton    one pass: tl.dot tiles in registers, displacement, group sum and signs in the epilogue; the default on CUDA
    outer     the papers' first code: the 3-D tensor [streams, J, I] in memory, streams by the chunk; baseline and second reference

    precision of the products u W, accumulated in float32 (float64 for float64 inputs):
    ieee | tf32x3 (triton) | tf32 (CUDA) | bf16 (u and W rounded first)

Shapes: u [N, J] credit above, W [J, I] the weights that read the unit, dy [N, I] the unit's displacement, xi [N, I]. All of it runs without
autograd. Sums over the vocabulary or the width never meet a tensor larger than [N, I].
"""
from __future__ import annotations   # the kernels' annotations name tl, which is imported with the first launch

import contextlib
import functools
import os

import torch
import torch.nn.functional as F

from common import UserError

IMPLS = ("auto", "torch", "triton", "outer")
PRECISIONS = ("ieee", "tf32x3", "tf32", "bf16")
BLOCK = 128                 # columns whose signs come from one Philox call of 4 x 32 bits
CACHED = 1 << 18            # numbers in a block of rows whose elementwise work stays in cache
OUTER_STREAMS, OUTER_BYTES = 256, 1 << 29   # the outer baseline's chunk: this many streams, or what fits


# ---- signs ----

@torch.no_grad()
def signs(rows, cols, seed, offset=0, device=None, dtype=torch.float32):
    """[rows, cols] of +-1 in `dtype`: rows offset, offset + 1, ... of the infinite sign matrix of `seed` (0 <= seed < 2^63).

    Philox4x32-10 (Salmon et al., 2011) with the seed as its 64-bit key and (row, row >> 32, column // 128, 0) as its counter; bit k of
    its 128 output bits, low word first, is the sign of column k of the block, 1 meaning +1. So a row's signs depend on its number only.
    """
    _check_seed(seed, offset)
    if device is not None and torch.device(device).type == "cuda" and _has_triton():
        return _launch_signs(rows, cols, seed, offset, device, dtype)
    return _expand(_philox_bytes(rows, cols, seed, offset, device), cols, dtype)


def _check_seed(seed, offset):
    if not 0 <= seed < 2**63 or offset < 0:
        raise UserError(f"signs need 0 <= seed < 2^63 and offset >= 0, not {seed} and {offset}")


def philox(counter, key):
    """Four int64 tensors of 32-bit words from four such counter words (tensors) and two key words (integers): 10 rounds."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57   # 64-bit products; wrapping keeps their bits
        c0, c1 = (b >> 32).bitwise_and_(mask).bitwise_xor_(c1).bitwise_xor_(k0), b.bitwise_and_(mask)
        c2, c3 = (a >> 32).bitwise_and_(mask).bitwise_xor_(c3).bitwise_xor_(k1), a.bitwise_and_(mask)
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def _philox_bytes(rows, cols, seed, offset, device):
    """uint8 [rows, 16 * blocks]: the sign bits of the rows, low bit first."""
    blocks = -(-cols // BLOCK)
    row = torch.arange(offset, offset + rows, device=device)[:, None].expand(rows, blocks)
    block = torch.arange(blocks, device=device).expand(rows, blocks)
    words = philox((row & 0xFFFFFFFF, row >> 32, block, torch.zeros_like(block)), (seed & 0xFFFFFFFF, seed >> 32))
    return torch.stack(words, -1).int().view(torch.uint8).view(rows, 16 * blocks)   # int() wraps; bytes as little-endian machines hold them


@functools.lru_cache(maxsize=16)
def _byte_signs(device, dtype):
    """[256, 8]: the eight signs that a byte holds."""
    return (((torch.arange(256)[:, None] >> torch.arange(8)) & 1) * 2 - 1).to(device=device, dtype=dtype)


def _expand(bits, cols, dtype):
    """[rows, cols] of +-1 from the bytes of _philox_bytes."""
    return F.embedding(bits.int(), _byte_signs(bits.device, dtype)).flatten(1)[:, :cols]


def _sign_rows(xi, rows, cols, device, dtype):
    """A function (slice of rows) -> signs [*, cols], for xi a tensor or a pair (seed, offset)."""
    if isinstance(xi, torch.Tensor):
        return lambda part: xi[part].to(dtype)
    bits = _philox_bytes(rows, cols, *xi, device)   # 1/32 of what they expand to
    return lambda part: _expand(bits[part], cols, dtype)


# ---- the contraction ----

@torch.no_grad()
def wm_reward(u, dy, W, group=1, scale=1.0, impl="auto", precision="ieee"):
    """R [N / group, I] of u [N, J], dy [N, I], W [J, I]: scale / group * sum over a stream's tokens of dy * (u W) (WM 3.2 and 3.5).

    float32, or float64 where an input is. UserError when group does not divide N; ValueError when shapes disagree.
    """
    work = _check(u, dy, W, group)
    impl = choose_impl(impl, precision, u.device, work)
    if impl == "triton":
        return _launch(u, dy, W, group, scale, precision)
    if impl == "outer":
        return _outer(u, dy, W, group, scale, work)
    product = _product(u, W, scale / group, precision, torch.empty(dy.shape, dtype=work, device=u.device))
    if group == 1:
        return product.mul_(dy)
    R = product.new_empty(len(dy) // group, dy.size(1))
    for part in _blocks(dy.shape, group):
        streams = slice(part.start // group, part.stop // group)
        torch.sum(product[part].mul_(dy[part]).unflatten(0, (-1, group)), 1, out=R[streams])
    return R


def wm_credit(u, dy, W, xi, sigma, group=1, scale=1.0, impl="auto", precision="ieee", out=None):
    """[N, I]: wm_reward of the token's stream times xi / sigma, the estimate of the unit's own credit (WM 3.2).

    xi: the probe's signs [N, I], or a pair (seed, offset) from which signs() regenerates them. out: any [N, I] of floating dtype that
    shares no memory with the inputs; without it a new tensor as of wm_reward. UserError and ValueError as there.
    """
    return _credit(u, dy, W, xi, sigma, group, scale, impl, precision, out, relu2=False)


def wm_credit_relu2(u, pre, W, xi, sigma, group=1, scale=1.0, impl="auto", precision="ieee", out=None):
    """wm_credit at dy = relu(pre + sigma xi)^2 - relu(pre)^2, for the pre-activation pre [N, I] of a relu^2 unit; needs sigma > 0."""
    return _credit(u, pre, W, xi, sigma, group, scale, impl, precision, out, relu2=True)


@torch.no_grad()
def _credit(u, dy, W, xi, sigma, group, scale, impl, precision, out, relu2):
    work = _check(u, dy, W, group, xi, out)
    if not sigma > 0:
        raise UserError(f"sigma {sigma}: a probe needs a size above 0")
    if not isinstance(xi, torch.Tensor):
        _check_seed(*xi)
    impl = choose_impl(impl, precision, u.device, work)
    if impl == "triton":
        return _launch(u, dy, W, group, scale, precision, xi, sigma, out, relu2)
    out = torch.empty(dy.shape, dtype=work, device=u.device) if out is None else out
    rows = _sign_rows(xi, *dy.shape, u.device, work)
    if impl == "outer":
        xi = rows(slice(None))
        R = _outer(u, relu2_gain(dy.to(work), xi, sigma) * xi if relu2 else dy, W, group, scale / sigma, work)
        return out.copy_(R.repeat_interleave(group, 0) * xi)
    product = out if out.dtype == work else torch.empty(dy.shape, dtype=work, device=u.device)
    _product(u, W, scale / group / sigma, precision, product)
    for part in _blocks(dy.shape, group):
        xi, p = rows(part), product[part]
        p.mul_(relu2_gain(dy[part].to(work), xi, sigma) if relu2 else dy[part])
        if group > 1 and relu2:
            p.mul_(xi)
        if group > 1:
            p = p.unflatten(0, (-1, group))                                     # [streams, group, I]
            p.copy_(p.sum(1, keepdim=True).expand(p.shape))
        if group > 1 or not relu2:   # else the sign of the displacement meets itself
            product[part].mul_(xi)
        if product is not out:
            out[part] = product[part]
    return out


def relu2_gain(pre, xi, sigma):
    """xi (b^2 - a^2) for a = relu(pre), b = relu(pre + sigma xi), xi = +-1: never negative.

    As xi (b - a)(b + a) with xi (b - a) = clamp(pre + max(sigma xi, 0), 0, sigma) no nearly equal numbers are subtracted; in float32 the
    plain formula keeps only the digits that survive sigma against pre.
    """
    step = xi * sigma
    total = (pre + step).clamp_min_(0).add_(pre.clamp_min(0))
    return step.clamp_min_(0).add_(pre).clamp_(0, sigma).mul_(total)


def _check(u, dy, W, group, xi=None, out=None):
    """The dtype to work in, after refusing what does not fit together."""
    if u.dim() != 2 or W.dim() != 2 or dy.shape != (u.size(0), W.size(1)) or u.size(1) != W.size(0):
        raise ValueError(f"shapes u {list(u.shape)}, dy {list(dy.shape)}, W {list(W.shape)} are not [N, J], [N, I], [J, I]")
    for name, z in (("xi", xi), ("out", out)):
        if isinstance(z, torch.Tensor) and z.shape != dy.shape:
            raise ValueError(f"{name} {list(z.shape)} has not the shape {list(dy.shape)} of the displacement")
    if group < 1 or len(u) % group:
        raise UserError(f"streams of {group} tokens do not divide the {len(u)} tokens; choose a divisor")
    return functools.reduce(torch.promote_types, (dy.dtype, W.dtype, torch.float32), u.dtype)


def choose_impl(impl, precision, device, work):
    """torch, triton or outer, after refusing what it cannot do."""
    if impl not in IMPLS or precision not in PRECISIONS:
        raise UserError(f"impl {impl}, precision {precision}: choose from {' '.join(IMPLS)} and {' '.join(PRECISIONS)}")
    if impl == "auto":
        impl = "triton" if device.type == "cuda" and work == torch.float32 and _has_triton() else "torch"
    if impl == "triton":
        if not _has_triton():
            raise UserError("impl triton: triton is not installed (pip install triton, Linux only); use impl torch")
        if device.type != "cuda" and not interpreted():
            raise UserError(f"impl triton needs a CUDA device, not {device.type}; use impl torch")
        if work != torch.float32:
            raise UserError("impl triton works in float32; use impl torch for float64")
    torch_precisions = ("ieee", "bf16", "tf32") if device.type == "cuda" else ("ieee", "bf16")
    allowed = {"torch": torch_precisions, "outer": ("ieee",), "triton": PRECISIONS}[impl]
    if precision not in allowed:
        raise UserError(f"precision {precision} is not to be had from impl {impl} on {device.type}; choose from {' '.join(allowed)}")
    return impl


def _blocks(shape, group):
    """Slices of rows: whole streams, together no larger than the cache (or one stream)."""
    rows = max(1, CACHED // max(1, shape[1]) // group) * group
    return [slice(a, min(a + rows, shape[0])) for a in range(0, shape[0], rows)]


def _product(u, W, alpha, precision, out):
    """out = alpha u @ W; out holds float32 or float64."""
    if precision == "bf16":
        u, W = u.bfloat16(), W.bfloat16()
        if u.is_cuda:
            return out.copy_(torch.mm(u, W, out_dtype=torch.float32)).mul_(alpha)
    u, W = u.to(out.dtype), W.to(out.dtype)
    if not u.is_cuda:
        return torch.addmm(out, u, W, beta=0, alpha=alpha, out=out)
    before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, "tf32" if precision == "tf32" else "ieee"
    try:
        return torch.addmm(out, u, W, beta=0, alpha=alpha, out=out)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _outer(u, dy, W, group, scale, work):
    """wm_reward by way of the tensor [streams, J, I] of u outer dy, a chunk of streams at a time (WM 3.5, before its kernels)."""
    u, dy, W = (z.to(work) for z in (u, dy, W))
    R = dy.new_empty(len(u) // group, dy.size(1))
    chunk = max(1, min(OUTER_STREAMS, OUTER_BYTES // max(1, W.numel() * W.element_size())))
    pairs = W.new_empty(min(chunk, len(R)), *W.shape)                           # [streams, J, I]
    for a in range(0, len(R), chunk):
        some, part = pairs[:len(R) - a], slice(a * group, (a + chunk) * group)
        torch.bmm(u[part].unflatten(0, (-1, group)).mT, dy[part].unflatten(0, (-1, group)), out=some)
        torch.sum(some.mul_(W), 1, out=R[a:a + chunk])
    return R.mul_(scale / group)


# ---- Triton ----
# A tile has BN rows, BI columns (BI divides BLOCK) and BJ terms of the sum. Row numbers, columns and steps are 64-bit: offsets cannot overflow.

tl = None   # triton.language, once _kernels() has run


def _tile_signs(seed, row, first, BI: tl.constexpr):
    """signs() of the rows [BN] (int64) and BI columns from `first` on, a multiple of BI: float32 [BN, BI]."""
    zero = (row * 0).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, (row & 0xFFFFFFFF).to(tl.uint32), (row >> 32).to(tl.uint32), zero + (first // 128).to(tl.uint32), zero)
    k = (first % 128 + tl.arange(0, BI))[None, :]
    word = tl.where(k < 32, w0[:, None], tl.where(k < 64, w1[:, None], tl.where(k < 96, w2[:, None], w3[:, None])))
    return ((word >> (k % 32).to(tl.uint32)) & 1).to(tl.float32) * 2 - 1


def _tile_product(u, W, row, col, N, J, I, su0, su1, sw0, sw1, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
                  BN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    """u @ W at rows [BN] and columns [BI], summed in float32. WIDEN: multiply 16-bit numbers as float32, with the same result."""
    j = tl.arange(0, BJ).to(tl.int64)
    step = tl.full((), BJ, tl.int64)
    u_at, W_at = u + row[:, None] * su0 + j[None, :] * su1, W + j[:, None] * sw0 + col[None, :] * sw1
    total = tl.zeros((BN, BI), tl.float32)
    for first in range(0, J, BJ):
        left = J - first
        a = tl.load(u_at, mask=(row < N)[:, None] & (j < left)[None, :], other=0.0)
        b = tl.load(W_at, mask=(j < left)[:, None] & (col < I)[None, :], other=0.0)
        if PRECISION == "bf16":
            a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        if a.dtype == b.dtype and a.dtype.primitive_bitwidth == 16 and not WIDEN:   # their products are exact in float32
            total = tl.dot(a, b, total)
        else:
            total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee" if PRECISION == "bf16" else PRECISION)
        u_at += step * su1
        W_at += step * sw0
    return total


def _tile_reward(u, dy, W, xi, row, first, N, J, I, seed, offset, sigma, su0, su1, sd0, sd1, sw0, sw1, sx0, sx1, XI: tl.constexpr,
                 RELU2: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    """(dy * (u @ W), signs) of a tile; 0 outside. XI: none (no signs, 0) | tensor | seed."""
    col = first + tl.arange(0, BI).to(tl.int64)
    inside = (row < N)[:, None] & (col < I)[None, :]
    product = _tile_product(u, W, row, col, N, J, I, su0, su1, sw0, sw1, PRECISION, WIDEN, BN, BI, BJ)
    moved = tl.load(dy + row[:, None] * sd0 + col[None, :] * sd1, mask=inside, other=0.0).to(tl.float32)
    if XI == "tensor":
        sign = tl.load(xi + row[:, None] * sx0 + col[None, :] * sx1, mask=inside, other=0).to(tl.float32)
    elif XI == "seed":
        sign = _tile_signs(seed, row + offset, first, BI)
    else:
        sign = tl.zeros((BN, BI), tl.float32)
    if RELU2:   # relu2_gain, times the sign
        total = tl.maximum(moved + sigma * sign, 0.0, propagate_nan=tl.PropagateNan.ALL) + tl.maximum(moved, 0.0)
        moved = tl.minimum(tl.maximum(moved + tl.maximum(sigma * sign, 0.0), 0.0), sigma) * total * sign
    return product * moved, sign


def _contract(u, dy, W, xi, out, N, J, I, seed: tl.int64, offset: tl.int64, mult, sigma, su0, su1, sd0, sd1, sw0, sw1, sx0, sx1, so0, so1,
              GROUP: tl.constexpr, XI: tl.constexpr, RELU2: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
              BN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    """out = the reward [N / GROUP, I] where XI is none, else the credit [N, I], times mult.

    A program has whole streams of one strip of columns: BN rows of them when GROUP divides BN, else one stream, BN rows at a time.
    """
    first = tl.program_id(1).to(tl.int64) * BI
    col = first + tl.arange(0, BI)
    lane = tl.arange(0, BN).to(tl.int64)
    strip = out + col[None, :] * so1
    if BN % GROUP == 0:
        row = tl.program_id(0).to(tl.int64) * BN + lane
        value, sign = _tile_reward(u, dy, W, xi, row, first, N, J, I, seed, offset, sigma, su0, su1, sd0, sd1, sw0, sw1, sx0, sx1,
                                   XI, RELU2, PRECISION, WIDEN, BN, BI, BJ)
        if GROUP > 1:
            value = tl.sum(tl.reshape(value, (BN // GROUP, GROUP, BI)), 1)
        if XI == "none":
            g = tl.program_id(0).to(tl.int64) * (BN // GROUP) + tl.arange(0, BN // GROUP)
            tl.store(strip + g[:, None] * so0, value * mult, mask=(g < N // GROUP)[:, None] & (col < I)[None, :])
        else:
            if GROUP > 1:
                value = tl.reshape(tl.broadcast_to(value[:, None, :], (BN // GROUP, GROUP, BI)), (BN, BI))
            tl.store(strip + row[:, None] * so0, value * sign * mult, mask=(row < N)[:, None] & (col < I)[None, :])
    else:
        start = tl.program_id(0).to(tl.int64) * GROUP
        end = start + GROUP
        total = tl.zeros((BI,), tl.float32)
        for a in range(0, GROUP, BN):
            value, _ = _tile_reward(u, dy, W, xi, start + a + lane, first, end, J, I, seed, offset, sigma, su0, su1, sd0, sd1, sw0, sw1,
                                    sx0, sx1, XI, RELU2, PRECISION, WIDEN, BN, BI, BJ)
            total += tl.sum(value, 0)
        if XI == "none":
            tl.store(out + tl.program_id(0).to(tl.int64) * so0 + col * so1, total * mult, mask=col < I)
        else:
            for a in range(0, GROUP, BN):
                row = start + a + lane
                inside = (row < end)[:, None] & (col < I)[None, :]
                if XI == "seed":
                    sign = _tile_signs(seed, row + offset, first, BI)
                else:
                    sign = tl.load(xi + row[:, None] * sx0 + col[None, :] * sx1, mask=inside, other=0).to(tl.float32)
                tl.store(strip + row[:, None] * so0, total[None, :] * sign * mult, mask=inside)


def _write_signs(out, N, I, seed: tl.int64, offset: tl.int64, so0, so1, BN: tl.constexpr, BI: tl.constexpr):
    """signs() into out [N, I]."""
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    first = tl.program_id(1).to(tl.int64) * BI
    col = first + tl.arange(0, BI)
    tl.store(out + row[:, None] * so0 + col[None, :] * so1, _tile_signs(seed, row + offset, first, BI),
             mask=(row < N)[:, None] & (col < I)[None, :])


# BN, BI, BJ, warps, stages. The smallest, first, fits every chip and is the one the interpreter runs.
TILES = ((16, 32, 32, 4, 2), (32, 64, 32, 4, 3), (64, 64, 32, 4, 3), (128, 64, 32, 8, 3), (64, 128, 32, 8, 3), (128, 128, 32, 8, 3),
         (128, 128, 64, 8, 3))


def tiles_for(shared, u_bytes, W_bytes):
    """The rows of TILES whose stages of u and W (of so many bytes a number), and whose result, fit into `shared` bytes of a block."""
    return [(n, i, j, w, s) for n, i, j, w, s in TILES if max(s * j * (n * u_bytes + i * W_bytes), 4 * n * i) <= shared]


def _prune(configs, args, **_):
    """Autotune only what fits the chip."""
    shared = torch.cuda.get_device_properties(args["u"].device).shared_memory_per_block_optin
    tiles = tiles_for(shared, args["u"].element_size(), args["W"].element_size())
    return [c for c in configs if (c.kwargs["BN"], c.kwargs["BI"], c.kwargs["BJ"], c.num_warps, c.num_stages) in tiles]


@functools.cache
def _has_triton():
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def _kernels():
    """(contraction, signs) as Triton kernels, the first one autotuned on a GPU."""
    global tl
    import triton
    import triton.language as tl
    jit = triton.jit(do_not_specialize=["seed", "offset"])
    for helper in (_tile_signs, _tile_product, _tile_reward):
        globals()[helper.__name__] = triton.jit(helper)
    contract = jit(_contract)
    if not interpreted():
        configs = [triton.Config(dict(BN=n, BI=i, BJ=j), num_warps=w, num_stages=s) for n, i, j, w, s in TILES]
        contract = triton.autotune(configs, key=["N", "J", "I", "GROUP", "XI", "RELU2", "PRECISION"],
                                   prune_configs_by=dict(early_config_prune=_prune))(contract)
    return contract, jit(_write_signs)


def interpreted():
    """Do Triton kernels run in its interpreter, on the CPU?"""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _launch(u, dy, W, group, scale, precision, xi=None, sigma=1.0, out=None, relu2=False):
    """wm_reward (xi None) or a credit by the Triton kernel."""
    N, I = dy.shape
    if out is None:
        out = torch.empty(N // group if xi is None else N, I, device=u.device)
    if not out.numel():
        return out
    contract, _ = _kernels()
    tensor = isinstance(xi, torch.Tensor)
    seed, offset = (0, 0) if xi is None or tensor else xi
    signs_at = xi if tensor else dy   # not read otherwise
    args = (u, dy, W, signs_at, out, N, u.size(1), I, seed, offset, scale / group / sigma, sigma, *u.stride(), *dy.stride(), *W.stride(),
            *signs_at.stride(), *out.stride())
    flags = dict(GROUP=group, XI="none" if xi is None else "tensor" if tensor else "seed", RELU2=relu2, PRECISION=precision,
                 WIDEN=interpreted())   # the interpreter multiplies no bfloat16
    if interpreted():
        flags.update(zip(("BN", "BI", "BJ"), TILES[0]))
    with _on(u.device):
        contract[lambda m: (-(-N // (m["BN"] if m["BN"] % group == 0 else group)), -(-I // m["BI"]))](*args, **flags)
    return out


def _launch_signs(rows, cols, seed, offset, device, dtype):
    """signs() by the Triton kernel."""
    out = torch.empty(rows, cols, device=device, dtype=dtype)
    if out.numel():
        with _on(out.device):
            _kernels()[1][(-(-rows // 32), -(-cols // 128))](out, rows, cols, seed, offset, *out.stride(), BN=32, BI=128, num_warps=4)
    return out


def _on(device):
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
