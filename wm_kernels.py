"""The reward contraction of delayed Weight Maximization (WM 3.2, 3.5).

What does a displaced unit earn from the credit above it?

    wm_reward         R[g,i] = scale / M * sum_{n in g} dy[n,i] * sum_j u[n,j] W[j,i]
                      for streams g of M = group consecutive tokens
    wm_credit         c[n,i] = R[g(n),i] * xi[n,i] / sigma: the reward, given to each token's probe
    wm_credit_relu2   wm_credit at dy = relu(pre + sigma xi)^2 - relu(pre)^2 (stage 1's c_fc),
                      where dy is never stored whole
    signs             the probes xi = +-1, any range of rows again from (seed, row)

    impl      how
    torch     one GEMM u @ W, the rest in place on blocks of rows in cache; default on the CPU
    triton    one pass: tl.dot tiles in registers, and displacement, group sum and signs in the
              epilogue; default on CUDA
    outer     the papers' first code: the 3-D tensor [streams, J, I] in memory, streams by the
              chunk; baseline and second reference

    precision of the products u W, accumulated in float32 (float64 for float64 inputs):
    ieee | tf32x3 (triton) | tf32 (CUDA) | bf16 (u and W rounded first)

Shapes: u [N, J] credit above, W [J, I] the weights that read the unit, dy [N, I] the unit's
displacement, xi [N, I]. All of it runs without autograd.
"""
# the kernels' annotations name tl, which is imported with the first launch
from __future__ import annotations

import functools
import os

import torch
import torch.nn.functional as F

from common import UserError

IMPLS = ("auto", "torch", "triton", "outer")
PRECISIONS = ("ieee", "tf32x3", "tf32", "bf16")
BLOCK = 128        # columns whose signs come from one Philox call of 4 x 32 bits
CACHED = 1 << 18   # numbers in a block of rows whose elementwise work stays in cache
# the outer baseline's chunk: this many streams, or what fits
OUTER_STREAMS, OUTER_BYTES = 256, 1 << 29


# ---- signs ----

@torch.no_grad()
def signs(rows, cols, seed, offset=0, device=None, dtype=torch.float32):
    """[rows, cols] of +-1 in `dtype`: rows offset, offset + 1, ... of the seed's infinite matrix.

    Philox4x32-10 (Salmon et al., 2011) with the seed as its 64-bit key and (row, row >> 32,
    column // 128, 0) as its counter; bit k of its 128 output bits, low word first, is the sign of
    column k of the block, 1 meaning +1. UserError unless 0 <= seed < 2^63 and offset >= 0.
    """
    _check_seed(seed, offset)
    if device is not None and torch.device(device).type == "cuda" and _has_triton():
        return _launch_signs(rows, cols, seed, offset, device, dtype)
    return _expand(_philox_bytes(rows, cols, seed, offset, device), cols, dtype)


def _check_seed(seed, offset):
    if not 0 <= seed < 2**63 or offset < 0:
        raise UserError(f"signs need 0 <= seed < 2^63 and offset >= 0, not {seed} and {offset}")


def philox(counter, key):
    """10 rounds of Philox: four int64 tensors of 32-bit words, from four more and two integers."""
    mask = 0xFFFFFFFF
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64-bit products; wrapping keeps their bits
        c0 = (b >> 32).bitwise_and_(mask).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (a >> 32).bitwise_and_(mask).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = b.bitwise_and_(mask), a.bitwise_and_(mask)
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def _philox_bytes(rows, cols, seed, offset, device):
    """uint8 [rows, 16 * blocks]: the sign bits of the rows, low bit first."""
    blocks = -(-cols // BLOCK)
    row = torch.arange(offset, offset + rows, device=device)[:, None].expand(rows, blocks)
    block = torch.arange(blocks, device=device).expand(rows, blocks)
    counter = (row & 0xFFFFFFFF, row >> 32, block, torch.zeros_like(block))
    words = torch.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32)), -1)
    # int() wraps; the bytes are as little-endian machines hold them
    return words.int().view(torch.uint8).view(rows, 16 * blocks)


@functools.lru_cache(maxsize=16)
def _byte_signs(device, dtype):
    """[256, 8]: the eight signs that a byte holds."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return (bits * 2 - 1).to(device=device, dtype=dtype)


def _expand(bits, cols, dtype):
    """[rows, cols] of +-1 from the bytes of _philox_bytes."""
    return F.embedding(bits.int(), _byte_signs(bits.device, dtype)).flatten(1)[:, :cols]


def _sign_rows(xi, rows, cols, device, dtype):
    """A function (slice of rows) -> signs [*, cols]; xi: a tensor or a pair (seed, offset)."""
    if isinstance(xi, torch.Tensor):
        return lambda part: xi[part].to(dtype)
    bits = _philox_bytes(rows, cols, *xi, device)  # 1/32 of what they expand to
    return lambda part: _expand(bits[part], cols, dtype)


# ---- the contraction ----

@torch.no_grad()
def wm_reward(u, dy, W, group=1, scale=1.0, impl="auto", precision="ieee"):
    """R [N / group, I], float32, or float64 where an input is.

    UserError when group does not divide N; ValueError when shapes disagree.
    """
    work = _check(u, dy, W, group)
    impl = choose_impl(impl, precision, u.device, work)
    if impl == "triton":
        return _launch(u, dy, W, group, scale, precision)
    if impl == "outer":
        return _outer(u, dy, W, group, scale, work)
    product = torch.empty(dy.shape, dtype=work, device=u.device)
    _product(u, W, scale / group, precision, product)
    if group == 1:
        return product.mul_(dy)
    R = product.new_empty(len(dy) // group, dy.size(1))
    for part in _blocks(dy.shape, group):
        streams = slice(part.start // group, part.stop // group)
        gain = product[part].mul_(dy[part]).unflatten(0, (-1, group))  # [streams, group, I]
        torch.sum(gain, 1, out=R[streams])
    return R


def wm_credit_relu2(u, pre, W, xi, sigma, group=1, **options):
    """wm_credit of relu^2 units, from their pre-activations pre [N, I]."""
    return wm_credit(u, pre, W, xi, sigma, group, relu2=True, **options)


@torch.no_grad()
def wm_credit(u, dy, W, xi, sigma, group=1, scale=1.0, impl="auto", precision="ieee", out=None,
              relu2=False):
    """c [N, I], dtype and errors as of wm_reward; relu2: dy holds pre-activations.

    xi: the probe's signs [N, I], or a pair (seed, offset) from which signs() regenerates them. out:
    any [N, I] of floating dtype that shares no memory with the inputs; without it a new tensor.
    """
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
        moved = relu2_gain(dy.to(work), xi, sigma) * xi if relu2 else dy
        R = _outer(u, moved, W, group, scale / sigma, work)
        return out.copy_(R.repeat_interleave(group, 0) * xi)
    product = out if out.dtype == work else torch.empty(dy.shape, dtype=work, device=u.device)
    _product(u, W, scale / group / sigma, precision, product)
    for part in _blocks(dy.shape, group):
        xi, p = rows(part), product[part]
        p.mul_(relu2_gain(dy[part].to(work), xi, sigma) if relu2 else dy[part])
        if group > 1:
            p = (p.mul_(xi) if relu2 else p).unflatten(0, (-1, group))  # [streams, group, I]
            p.copy_(p.sum(1, keepdim=True).expand(p.shape))
        if group > 1 or not relu2:  # else the sign of the displacement meets itself
            product[part].mul_(xi)
        if product is not out:
            out[part] = product[part]
    return out


def relu2_gain(pre, xi, sigma):
    """xi (b^2 - a^2) for a = relu(pre), b = relu(pre + sigma xi), xi = +-1: never negative.

    As xi (b - a)(b + a) with xi (b - a) = clamp(pre + max(sigma xi, 0), 0, sigma) no nearly equal
    numbers are subtracted, which would cost digits in float32.
    """
    step = xi * sigma
    total = (pre + step).clamp_min_(0).add_(pre.clamp_min(0))
    return step.clamp_min_(0).add_(pre).clamp_(0, sigma).mul_(total)


def _check(u, dy, W, group, xi=None, out=None):
    """The dtype to work in; errors for what does not fit together."""
    matrices = u.dim() == W.dim() == 2
    if not matrices or dy.shape != (u.size(0), W.size(1)) or u.size(1) != W.size(0):
        given = f"u {list(u.shape)}, dy {list(dy.shape)}, W {list(W.shape)}"
        raise ValueError(f"shapes {given} are not [N, J], [N, I], [J, I]")
    for name, z in (("xi", xi), ("out", out)):
        if isinstance(z, torch.Tensor) and z.shape != dy.shape:
            raise ValueError(f"{name} {list(z.shape)} has not dy's shape {list(dy.shape)}")
    if group < 1 or len(u) % group:
        raise UserError(f"streams of {group} tokens do not divide the {len(u)} tokens")
    return functools.reduce(torch.promote_types, (dy.dtype, W.dtype, torch.float32), u.dtype)


def choose_impl(impl, precision, device, work):
    """torch, triton or outer; UserError for what it cannot do."""
    if impl not in IMPLS or precision not in PRECISIONS:
        known = f"{' '.join(IMPLS)} and {' '.join(PRECISIONS)}"
        raise UserError(f"impl {impl}, precision {precision}: choose from {known}")
    on_cuda = device.type == "cuda"
    if impl == "auto":
        impl = "triton" if on_cuda and work == torch.float32 and _has_triton() else "torch"
    if impl == "triton":
        reason = ""
        if not _has_triton():
            reason = "is not installed (pip install triton, Linux only)"
        elif not on_cuda and not interpreted():
            reason = f"needs a CUDA device, not {device.type}"
        elif work != torch.float32:
            reason = "works in float32 only"
        if reason:
            raise UserError(f"impl triton {reason}; use impl torch")
    torch_precisions = ("ieee", "bf16", "tf32") if on_cuda else ("ieee", "bf16")
    allowed = {"torch": torch_precisions, "outer": ("ieee",), "triton": PRECISIONS}[impl]
    if precision not in allowed:
        raise UserError(f"precision {precision} is not to be had from impl {impl} on "
                        f"{device.type}; choose from {' '.join(allowed)}")
    return impl


def _blocks(shape, group):
    """Slices of rows: whole streams that fit into the cache, or one stream."""
    rows = max(1, CACHED // max(1, shape[1]) // group) * group
    return [slice(a, min(a + rows, shape[0])) for a in range(0, shape[0], rows)]


def _product(u, W, alpha, precision, out):
    """out = alpha u @ W; out holds float32 or float64."""
    if precision == "bf16":
        u, W = u.bfloat16(), W.bfloat16()
        if u.is_cuda:
            return out.copy_(torch.mm(u, W, out_dtype=torch.float32)).mul_(alpha)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        u, W = u.to(out.dtype), W.to(out.dtype)
        return torch.addmm(out, u, W, beta=0, alpha=alpha, out=out)
    finally:
        matmul.fp32_precision = before


def _outer(u, dy, W, group, scale, work):
    """wm_reward by way of the tensor [streams, J, I] of u outer dy (WM 3.5, before its kernels)."""
    u, dy, W = (z.to(work) for z in (u, dy, W))
    R = dy.new_empty(len(u) // group, dy.size(1))
    chunk = max(1, min(OUTER_STREAMS, OUTER_BYTES // max(1, W.numel() * W.element_size())))
    pairs = W.new_empty(min(chunk, len(R)), *W.shape)  # [streams, J, I]
    for a in range(0, len(R), chunk):
        some, part = pairs[:len(R) - a], slice(a * group, (a + chunk) * group)
        above, moved = (z[part].unflatten(0, (-1, group)) for z in (u, dy))  # [streams, group, .]
        torch.bmm(above.mT, moved, out=some)
        torch.sum(some.mul_(W), 1, out=R[a:a + chunk])
    return R.mul_(scale / group)


# ---- Triton ----
# A tile has BN rows, BI columns (BI divides BLOCK) and BJ terms of the sum. Row numbers, columns
# and steps are 64-bit: offsets cannot overflow.

tl = None   # triton.language, once _kernels() has run


def _tile_signs(seed, row, first, BI: tl.constexpr):
    """signs() of rows [BN] (int64) and columns first, ..., a multiple of BI: float32 [BN, BI]."""
    zero = (row * 0).to(tl.uint32)
    low, high = (row & 0xFFFFFFFF).to(tl.uint32), (row >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, low, high, zero + (first // 128).to(tl.uint32), zero)
    k = (first % 128 + tl.arange(0, BI))[None, :]
    word = tl.where(k < 96, w2[:, None], w3[:, None])
    word = tl.where(k < 32, w0[:, None], tl.where(k < 64, w1[:, None], word))
    return ((word >> (k % 32).to(tl.uint32)) & 1).to(tl.float32) * 2 - 1


def _tile_product(u, W, row, col, N, J, I, su0, su1, sw0, sw1, PRECISION: tl.constexpr,
                  WIDEN: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    """u @ W at rows [BN] and columns [BI] in float32; WIDEN: multiply 16-bit numbers so, too."""
    j = tl.arange(0, BJ).to(tl.int64)
    step = tl.full((), BJ, tl.int64)
    u_at = u + row[:, None] * su0 + j[None, :] * su1
    W_at = W + j[:, None] * sw0 + col[None, :] * sw1
    total = tl.zeros((BN, BI), tl.float32)
    for first in range(0, J, BJ):
        left = J - first
        a = tl.load(u_at, mask=(row < N)[:, None] & (j < left)[None, :], other=0.0)
        b = tl.load(W_at, mask=(j < left)[:, None] & (col < I)[None, :], other=0.0)
        if PRECISION == "bf16":
            a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        if a.dtype == b.dtype and a.dtype.primitive_bitwidth == 16 and not WIDEN:
            total = tl.dot(a, b, total)  # products of 16-bit numbers are exact in float32
        else:
            total = tl.dot(a.to(tl.float32), b.to(tl.float32), total,
                           input_precision="ieee" if PRECISION == "bf16" else PRECISION)
        u_at += step * su1
        W_at += step * sw0
    return total


def _tile_reward(u, dy, W, xi, row, first, N, J, I, seed, offset, sigma,
                 su0, su1, sd0, sd1, sw0, sw1, sx0, sx1, XI: tl.constexpr, RELU2: tl.constexpr,
                 PRECISION: tl.constexpr, WIDEN: tl.constexpr,
                 BN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    """(dy * (u @ W), signs) of a tile; 0 outside. XI: none (no signs, 0) | tensor | seed."""
    col = first + tl.arange(0, BI).to(tl.int64)
    inside = (row < N)[:, None] & (col < I)[None, :]
    product = _tile_product(u, W, row, col, N, J, I, su0, su1, sw0, sw1,
                            PRECISION, WIDEN, BN, BI, BJ)
    dy_at = dy + row[:, None] * sd0 + col[None, :] * sd1
    moved = tl.load(dy_at, mask=inside, other=0.0).to(tl.float32)
    if XI == "tensor":
        xi_at = xi + row[:, None] * sx0 + col[None, :] * sx1
        sign = tl.load(xi_at, mask=inside, other=0).to(tl.float32)
    elif XI == "seed":
        sign = _tile_signs(seed, row + offset, first, BI)
    else:
        sign = tl.zeros((BN, BI), tl.float32)
    if RELU2:  # relu2_gain, times the sign
        after = tl.maximum(moved + sigma * sign, 0.0, propagate_nan=tl.PropagateNan.ALL)
        total = after + tl.maximum(moved, 0.0)
        step = tl.maximum(moved + tl.maximum(sigma * sign, 0.0), 0.0)
        moved = tl.minimum(step, sigma) * total * sign
    return product * moved, sign


def _contract(u, dy, W, xi, out, N, J, I, seed: tl.int64, offset: tl.int64, mult, sigma,
              su0, su1, sd0, sd1, sw0, sw1, sx0, sx1, so0, so1, GROUP: tl.constexpr,
              XI: tl.constexpr, RELU2: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
              BN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    """out = the reward [N / GROUP, I] where XI is none, else the credit [N, I], times mult.

    A program has BI columns of BN rows of whole streams, or where GROUP does not divide BN of one
    stream, BN rows at a time.
    """
    program = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * BI
    col = first + tl.arange(0, BI)
    lane = tl.arange(0, BN).to(tl.int64)
    strip = out + col[None, :] * so1
    if BN % GROUP == 0:
        row = program * BN + lane
        value, sign = _tile_reward(u, dy, W, xi, row, first, N, J, I, seed, offset, sigma,
                                   su0, su1, sd0, sd1, sw0, sw1, sx0, sx1,
                                   XI, RELU2, PRECISION, WIDEN, BN, BI, BJ)
        if GROUP > 1:
            value = tl.sum(tl.reshape(value, (BN // GROUP, GROUP, BI)), 1)
        if XI == "none":
            g = program * (BN // GROUP) + tl.arange(0, BN // GROUP)
            inside = (g < N // GROUP)[:, None] & (col < I)[None, :]
            tl.store(strip + g[:, None] * so0, value * mult, mask=inside)
        else:
            if GROUP > 1:
                value = tl.broadcast_to(value[:, None, :], (BN // GROUP, GROUP, BI))
                value = tl.reshape(value, (BN, BI))
            inside = (row < N)[:, None] & (col < I)[None, :]
            tl.store(strip + row[:, None] * so0, value * sign * mult, mask=inside)
    else:
        start = program * GROUP
        end = start + GROUP
        total = tl.zeros((BI,), tl.float32)
        for a in range(0, GROUP, BN):
            value, _ = _tile_reward(u, dy, W, xi, start + a + lane, first, end, J, I, seed, offset,
                                    sigma, su0, su1, sd0, sd1, sw0, sw1, sx0, sx1,
                                    XI, RELU2, PRECISION, WIDEN, BN, BI, BJ)
            total += tl.sum(value, 0)
        if XI == "none":
            tl.store(out + program * so0 + col * so1, total * mult, mask=col < I)
        else:
            for a in range(0, GROUP, BN):
                row = start + a + lane
                inside = (row < end)[:, None] & (col < I)[None, :]
                if XI == "seed":
                    sign = _tile_signs(seed, row + offset, first, BI)
                else:
                    xi_at = xi + row[:, None] * sx0 + col[None, :] * sx1
                    sign = tl.load(xi_at, mask=inside, other=0).to(tl.float32)
                tl.store(strip + row[:, None] * so0, total[None, :] * sign * mult, mask=inside)


def _write_signs(out, N, I, seed: tl.int64, offset: tl.int64, so0, so1,
                 BN: tl.constexpr, BI: tl.constexpr):
    """signs() into out [N, I]."""
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    first = tl.program_id(1).to(tl.int64) * BI
    col = first + tl.arange(0, BI)
    inside = (row < N)[:, None] & (col < I)[None, :]
    sign = _tile_signs(seed, row + offset, first, BI)
    tl.store(out + row[:, None] * so0 + col[None, :] * so1, sign, mask=inside)


# BN, BI, BJ, warps, stages. The smallest, first, fits every chip; the interpreter runs that one.
TILES = (
    (16, 32, 32, 4, 2), (32, 64, 32, 4, 3), (64, 64, 32, 4, 3), (128, 64, 32, 8, 3),
    (64, 128, 32, 8, 3), (128, 128, 32, 8, 3), (128, 128, 64, 8, 3))


def tiles_for(shared, u_bytes, W_bytes):
    """The rows of TILES whose stages of u and W, and whose result, fit into `shared` bytes."""
    return [(n, i, j, warps, stages) for n, i, j, warps, stages in TILES
            if max(stages * j * (n * u_bytes + i * W_bytes), 4 * n * i) <= shared]


def _prune(configs, args, **_):
    """Autotune only what fits the chip."""
    shared = torch.cuda.get_device_properties(args["u"].device).shared_memory_per_block_optin
    tiles = tiles_for(shared, args["u"].element_size(), args["W"].element_size())
    return [c for c in configs if (*c.kwargs.values(), c.num_warps, c.num_stages) in tiles]


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
        configs = [triton.Config(dict(BN=n, BI=i, BJ=j), num_warps=w, num_stages=s)
                   for n, i, j, w, s in TILES]
        contract = triton.autotune(
            configs, key=["N", "J", "I", "GROUP", "XI", "RELU2", "PRECISION"],
            prune_configs_by=dict(early_config_prune=_prune))(contract)
    return contract, jit(_write_signs)


def interpreted():
    """Do Triton kernels run in its interpreter, on the CPU?"""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _launch(u, dy, W, group, scale, precision, xi=None, sigma=1.0, out=None, relu2=False):
    """wm_reward (xi None) or wm_credit in Triton."""
    N, I = dy.shape
    if out is None:
        out = torch.empty(N // group if xi is None else N, I, device=u.device)
    if not out.numel():
        return out
    contract, _ = _kernels()
    seed, offset, signs_at, kind = 0, 0, dy, "none"  # dy stands for signs that are not read
    if isinstance(xi, torch.Tensor):
        kind, signs_at = "tensor", xi
    elif xi is not None:
        kind, (seed, offset) = "seed", xi
    tensors = u, dy, W, signs_at, out
    strides = [step for z in tensors for step in z.stride()]
    args = (*tensors, N, u.size(1), I, seed, offset, scale / group / sigma, sigma, *strides)
    # the interpreter multiplies no bfloat16
    flags = dict(GROUP=group, XI=kind, RELU2=relu2, PRECISION=precision, WIDEN=interpreted())
    if interpreted():
        flags.update(zip(("BN", "BI", "BJ"), TILES[0]))

    def grid(tile):
        rows = tile["BN"] if tile["BN"] % group == 0 else group
        return -(-N // rows), -(-I // tile["BI"])
    with torch.cuda.device_of(u):
        contract[grid](*args, **flags)
    return out


def _launch_signs(rows, cols, seed, offset, device, dtype):
    out = torch.empty(rows, cols, device=device, dtype=dtype)
    if out.numel():
        _, write = _kernels()
        grid = -(-rows // 32), -(-cols // 128)
        with torch.cuda.device_of(out):
            write[grid](out, rows, cols, seed, offset, *out.stride(), BN=32, BI=128, num_warps=4)
    return out

