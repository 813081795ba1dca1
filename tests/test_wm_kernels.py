"""wm_kernels.py: every path against the float64 sum over j, i, tokens, at ragged shapes; signs
against Random123's vectors. The Triton kernels run in Triton's interpreter (a process of its own)
and are compiled, without a GPU, for three generations of chips."""
import importlib
import itertools
import os
import subprocess
import sys

import pytest
import torch

import wm_kernels
from common import UserError
from helpers import ROOT
from wm_kernels import (PRECISIONS, TILES, philox, relu2_gain, signs, tiles_for, wm_credit,
                        wm_credit_relu2, wm_reward)

INTERPRETED = wm_kernels.interpreted()
inside = pytest.mark.skipif(not INTERPRETED, reason="not interpreted")
outside = pytest.mark.skipif(INTERPRETED, reason="interpreted")
IMPLS = ["triton"] if INTERPRETED else ["torch", "outer"]
SHAPES = [  # N, J, I, group
    (1, 1, 1, 1), (17, 33, 33, 1), (3, 1, 130, 1), (18, 65, 15, 2), (6, 20, 33, 3), (42, 5, 17, 21)]
if not INTERPRETED:
    SHAPES += [(15, 17, 65, 1), (6, 33, 64, 2), (48, 15, 97, 8), (96, 40, 17, 32)]
SIGMA, SCALE, SEED, FIRST = 0.01, 1.7, 2**40 + 12345, 1000


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def case(N, J, I, dtype=torch.float32):
    """u, dy (also used as pre-activation), W, signs."""
    u, dy, W = (random(*shape, seed=seed, dtype=dtype)
                for seed, shape in enumerate(((N, J), (N, I), (J, I)), 1))
    return u, dy, W, signs(N, I, SEED, FIRST)


def reference(u, dy, W, group, scale):
    """The triple loop of WM 3.2, in float64; the loop over j, i as one elementwise product."""
    u, dy, W = u.double(), dy.double(), W.double()
    R = torch.zeros(len(u) // group, W.size(1), dtype=torch.float64)
    for n in range(len(u)):
        R[n // group] += scale / group * dy[n] * sum(u[n, j] * W[j] for j in range(len(W)))
    return R


def triples(u, dy, W, xi, group, device="cpu"):
    """[(what, function of (impl, **kw) on the device, reference)] of the three contractions."""
    x, pre, kw = xi.double(), dy.double(), dict(group=group, scale=SCALE)
    moved = torch.relu(pre + SIGMA * x)**2 - torch.relu(pre)**2

    def credit(dy):
        return reference(u, dy, W, group, SCALE).repeat_interleave(group, 0) * x / SIGMA

    def call(f, *more):
        given = [z.to(device) if torch.is_tensor(z) else z for z in (u, dy, W, *more)]
        return lambda impl, **o: f(*given, impl=impl, **kw, **o)
    found = [("reward", call(wm_reward), reference(u, dy, W, group, SCALE))]
    for name, f, want in (("credit", wm_credit, credit(dy)),
                          ("relu2", wm_credit_relu2, credit(moved))):
        found.append((name, call(f, xi, SIGMA), want))
        found.append((name + ", seed", call(f, (SEED, FIRST), SIGMA), want))
    return found


def close(got, want, tolerance=1e-6):
    assert got.shape == want.shape and torch.isfinite(got).all()
    distance = (got.double() - want).norm()
    assert distance <= tolerance * want.norm(), float(distance / want.norm())


# ---- signs ----

@pytest.mark.parametrize("counter, key, words", [
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
     "d16cfe09 94fdcceb 5001e420 24126ea1")])
def test_philox_equals_random123s_vectors(counter, key, words):
    out = philox([torch.tensor([c]) for c in counter], key)
    assert " ".join(f"{int(w):08x}" for w in out) == words


def test_signs_are_the_bits_of_philox_at_row_and_block():
    row, seed = 2**33 + 5, 2**45 + 77
    drawn = signs(1, 300, seed, row)[0]
    for block in range(3):
        counter = [torch.tensor([c]) for c in (5, 2, block, 0)]
        words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
        want = [2 * (int(w) >> k & 1) - 1 for w in words for k in range(32)]
        got = drawn[128 * block:128 * block + 128].tolist()
        assert got == want[:len(got)] and len(got) == min(128, 300 - 128 * block)


def test_any_rows_and_columns_can_be_drawn_alone():
    whole = signs(70, 200, 9, 100)
    assert torch.equal(signs(13, 200, 9, 140), whole[40:53])
    assert torch.equal(signs(70, 31, 9, 100), whole[:, :31])
    assert signs(0, 200, 9).shape == (0, 200) and signs(3, 0, 9).shape == (3, 0)
    for dtype in (torch.float64, torch.bfloat16, torch.int8):
        drawn = signs(70, 200, 9, 100, dtype=dtype)
        assert drawn.dtype == dtype and torch.equal(drawn.float(), whole)
    assert not torch.equal(signs(70, 200, 10, 100), whole)


def test_signs_are_fair_and_independent():
    s = signs(1024, 512, 3)
    assert set(s.unique().tolist()) == {-1.0, 1.0}
    assert abs(s.mean()) < 5 / s.numel()**0.5
    # 512 columns, 256 rows: the largest of some 100,000 correlations of 1024 (512) signs stays
    # within 6 standard errors
    assert (s.T @ s / 1024 - torch.eye(512)).abs().max() < 6 / 1024**0.5
    assert (s[:256] @ s[:256].T / 512 - torch.eye(256)).abs().max() < 6 / 512**0.5
    assert abs((s * signs(1024, 512, 4)).mean()) < 5 / s.numel()**0.5


# ---- the contraction ----

@pytest.mark.parametrize("N, J, I, group", SHAPES)
def test_every_path_equals_the_triple_loop(N, J, I, group):
    for (what, f, want), impl in itertools.product(triples(*case(N, J, I), group), IMPLS):
        close(f(impl), want)
    if INTERPRETED:   # which has no float64
        return
    exact = triples(*case(N, J, I, torch.float64), group)
    for (what, f, want), impl in itertools.product(exact, IMPLS):
        got = f(impl)
        assert got.dtype == torch.float64
        close(got, want, 1e-11)   # the reference itself subtracts squares


def test_blocks_of_rows_do_not_show(monkeypatch):
    cases = triples(*case(30, 20, 50), 3)
    whole = [f("torch") for _, f, _ in cases]
    for cached in (1, 50 * 7, 50 * 12):
        monkeypatch.setattr(wm_kernels, "CACHED", cached)
        assert all(torch.equal(f("torch"), w) for (_, f, _), w in zip(cases, whole))
    monkeypatch.setattr(wm_kernels, "OUTER_STREAMS", 4)
    for (_, f, want) in cases:
        close(f("outer"), want)


def sea(z, fill, layout):
    """(buffer full of `fill`, a view of it that holds z) with rows, columns or both strided."""
    rows, cols = z.shape
    buffer = torch.full((2 * rows + 7, 2 * cols + 9), fill, dtype=z.dtype)
    if layout == "rows":
        view = buffer[3:3 + rows, 4:4 + cols]
    elif layout == "columns":
        view = buffer[3:3 + rows, 1:1 + 2 * cols:2]
    else:
        view = buffer.view(buffer.size(1), -1).T[2:2 + rows, 1:1 + cols]
    view.copy_(z)
    return buffer, view


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("layout", ["rows", "columns", "transposed"])
def test_guard_bands_stay_and_nan_outside_does_not_leak(group, layout):
    """Inputs are views into a sea of NaN, outputs views into a sea of sevens."""
    N, J, I = 8, 9, 34
    views = [sea(z, float("nan"), layout)[1] for z in case(N, J, I)]
    for (what, f, want), impl in itertools.product(triples(*views, group), IMPLS):
        if what == "reward":
            close(f(impl), want)
            continue
        buffer, out = sea(torch.zeros(N, I), 7.0, layout)
        out.fill_(float("nan"))   # what was there must not matter
        assert f(impl, out=out) is out
        close(out, want)
        out.fill_(7.0)
        assert (buffer == 7).all()


def test_nan_stays_in_its_token():
    """A NaN displacement spoils its own stream's unit and nothing else; relu does not hide it."""
    for impl, group in itertools.product(IMPLS, (1, 4)):
        u, pre, W, xi = case(12, 5, 40)
        pre[6, 3] = float("nan")
        R = wm_credit_relu2(u, pre, W, xi, SIGMA, group, impl=impl)
        spoilt = torch.zeros(12, 40, dtype=torch.bool)
        spoilt[6 // group * group:6 // group * group + group, 3] = True
        assert torch.equal(R.isnan(), spoilt)


def test_dtypes_and_precisions():
    u, dy, W, xi = case(12, 20, 30)
    low = [z.bfloat16() for z in (u, dy, W)]
    for impl in IMPLS:
        # bfloat16 inputs lose nothing but their own digits
        for (_, f, want) in triples(*low, xi, 4):
            got = f(impl)
            assert got.dtype == torch.float32
            close(got, want)
        want = wm_credit(u, dy, W, xi, SIGMA).double()
        close(wm_credit(u, dy, W, xi.to(torch.int8), SIGMA, impl=impl), want)
        narrow = torch.empty(12, 30, dtype=torch.bfloat16)
        close(wm_credit(u, dy, W, xi, SIGMA, impl=impl, out=narrow), want, 4e-3)
    a, b = low[0], low[2]
    if INTERPRETED:   # the interpreter rounds towards zero
        a, b = ((z.view(torch.int32) & ~0xFFFF).view(torch.float32) for z in (u, W))
    got = wm_reward(u, dy, W, 4, impl=IMPLS[0], precision="bf16")
    close(got, reference(a, dy, b, 4, 1.0))


def test_nothing_needs_a_gradient():
    u, dy, W, xi = case(8, 5, 9)
    for z in (u, dy, W):
        z.requires_grad_()
    for impl in IMPLS:
        credits = [f(u, dy, W, xi, SIGMA, impl=impl) for f in (wm_credit, wm_credit_relu2)]
        for got in (wm_reward(u, dy, W, impl=impl), *credits):
            assert not got.requires_grad


def test_no_tokens_no_units():
    for impl, (N, J, I) in itertools.product(IMPLS, ((0, 3, 4), (4, 3, 0), (4, 0, 3))):
        u, dy, W, xi = case(N, J, I)
        assert wm_reward(u, dy, W, 2, impl=impl).shape == (N // 2, I)
        got = wm_credit_relu2(u, dy, W, xi, SIGMA, 2, impl=impl)
        assert got.shape == (N, I) and not got.any()   # no term in the sum: zero


def test_the_relu2_displacement_keeps_its_digits():
    pre, xi = random(1000, seed=5) * 3, signs(1000, 1, 5)[:, 0]

    def plain(pre, xi, sigma):
        return torch.relu(pre + sigma * xi)**2 - torch.relu(pre)**2
    for sigma in (1e-4, 1e-2, 10.0):
        exact = plain(pre.double(), xi.double(), sigma)
        close(relu2_gain(pre, xi, sigma) * xi, exact, 2e-7)
    exact = plain(pre.double(), xi.double(), 1e-4)
    assert (plain(pre, xi, 1e-4).double() - exact).norm() > 1e-6 * exact.norm()   # it loses digits


@pytest.mark.parametrize("change, message", [
    (dict(group=5), "do not divide"), (dict(group=0), "do not divide"),
    (dict(impl="cuda"), "choose from"), (dict(precision="fp8"), "choose from"),
    (dict(precision="tf32x3", impl="torch"), "is not to be had"),
    (dict(precision="bf16", impl="outer"), "is not to be had"), (dict(sigma=0.0), "above 0"),
    (dict(xi=(-1, 0)), "seed"), (dict(xi=(1, -1)), "offset"), (dict(xi=(2**63, 0)), "seed")])
def test_mistakes_are_one_line(change, message):
    u, dy, W, xi = case(12, 5, 9)
    with pytest.raises(UserError, match=message):
        wm_credit(u, dy, W, **{**dict(xi=xi, sigma=SIGMA), **change})


def test_shapes_are_checked():
    u, dy, W, xi = case(12, 5, 9)
    for bad in (dict(u=u[:11]), dict(dy=dy[:, :8]), dict(W=W.T), dict(W=W[0]), dict(xi=xi[:11]),
                dict(out=dy[:, :8])):
        with pytest.raises(ValueError):
            wm_credit(**{**dict(u=u, dy=dy, W=W, xi=xi, sigma=SIGMA), **bad})


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="there is a place to run it")
def test_triton_without_a_gpu_is_refused():
    u, dy, W, _ = case(4, 3, 5)
    with pytest.raises(UserError, match="CUDA device|not installed"):
        wm_reward(u, dy, W, impl="triton")


# ---- Triton ----

def test_import_takes_no_triton(monkeypatch):
    """The CPU path neither imports Triton nor needs it."""
    monkeypatch.setitem(sys.modules, "triton", None)   # importing it fails
    monkeypatch.delitem(sys.modules, "wm_kernels")
    fresh = importlib.import_module("wm_kernels")
    u, dy, W = torch.ones(2, 3), torch.ones(2, 5), torch.ones(3, 5)
    assert fresh is not wm_kernels and (fresh.wm_reward(u, dy, W) == 3).all()
    with pytest.raises(UserError, match="not installed"):
        fresh.wm_reward(u, dy, W, impl="triton")


def interpreter(*args):
    """Run tests of this file under Triton's interpreter, in a process of their own."""
    pytest.importorskip("triton")
    command = [sys.executable, *"-m pytest -q -n0 -p no:cacheprovider".split(), __file__, *args]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    out = subprocess.run(command, text=True, capture_output=True, env=env, cwd=ROOT)
    assert out.returncode == 0 and "passed" in out.stdout, out.stdout[-3000:]


@outside
def test_the_same_tests_under_tritons_interpreter():
    interpreter("-k", "path or guard or nan or dtypes or gradient or no_tokens or beyond")


@pytest.mark.slow
@outside
def test_all_tiles_under_tritons_interpreter():
    interpreter("-m", "slow", "-k", "tile_by_tile")


def check_tile(tile, groups, monkeypatch):
    monkeypatch.setattr(wm_kernels, "TILES", (tile,))
    for group in groups:
        for _, f, want in triples(*case(96, 35, 140), group):
            close(f("triton"), want)


@inside
def test_tiles_and_rows_beyond_32_bits(monkeypatch):
    check_tile(TILES[3], (32, 96), monkeypatch)
    for rows, cols, first in ((1, 1, 0), (33, 129, 2**33 + 5), (70, 300, 2**32 - 3)):
        drawn = wm_kernels._launch_signs(rows, cols, SEED, first, "cpu", torch.float32)
        assert torch.equal(drawn, signs(rows, cols, SEED, first))


@pytest.mark.slow
@inside
def test_tile_by_tile(monkeypatch):
    """Groups below, at and above a tile's rows; tiles wider and longer than the matrices."""
    for tile in TILES:
        check_tile(tile, (1, 4, 32, 96), monkeypatch)


# compute capability -> bytes of shared memory a block can have
CHIPS = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
SIGNS = (("none", False), ("tensor", False), ("seed", False), ("tensor", True), ("seed", True))
GROUPS = (1, 8, 24, 256)   # 24 and 256: one stream a program


def compiled(kernel, chip, warps, stages, pointers, **constants):
    """Metadata and assembly of a kernel compiled for a chip that need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    types = dict(pointers, seed="i64", offset="i64", mult="fp32", sigma="fp32")
    types.update(dict.fromkeys(constants, "constexpr"))
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values())
               if kind.startswith("*") or kind == "i32"}
    source = ASTSource(kernel, signature, constants, aligned)
    options = dict(num_warps=warps, num_stages=stages)
    return triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)


def fits(chip, dtype, precision, xi, relu2, group, tile):
    """Compile one variant of the contraction; it must be machine code that fits the chip."""
    contract = wm_kernels._kernels()[0].fn   # under the autotuner
    n, i, j, warps, stages = tile
    pointers = {**dict.fromkeys(("u", "dy", "W"), "*" + dtype), "xi": "*fp32", "out": "*fp32"}
    flags = dict(GROUP=group, XI=xi, RELU2=relu2, PRECISION=precision, WIDEN=False)
    strides = dict.fromkeys(("su1", "sd1", "sw1", "sx1", "so1"), 1)
    out = compiled(contract, chip, warps, stages, pointers, BN=n, BI=i, BJ=j, **flags, **strides)
    assert out.asm["cubin"][:4] == b"\x7fELF"
    assert out.metadata.shared <= CHIPS[chip], (chip, dtype, tile, flags, out.metadata.shared)


def signs_fit(chip):
    write = wm_kernels._kernels()[1]
    out = compiled(write, chip, 4, 1, {"out": "*fp32"}, BN=32, BI=128, so1=1)
    assert out.asm["cubin"][:4] == b"\x7fELF"


def test_kernels_compile_for_every_chip(tmp_path, monkeypatch):
    """Every chip, dot, kind of signs and way to sum a stream; the slow test combines them."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fits(80, "fp32", "ieee", "none", False, 8, TILES[0])
    fits(89, "fp32", "tf32x3", "tensor", True, 24, TILES[0])
    fits(90, "fp32", "bf16", "seed", True, 1, TILES[0])
    signs_fit(80)


def test_tiles_offered_to_a_chip():
    assert tiles_for(99 << 10, 4, 4) == list(TILES[:6])
    assert tiles_for(227 << 10, 4, 4) == list(TILES)
    assert tiles_for(99 << 10, 2, 2) == list(TILES)
    assert tiles_for(48 << 10, 4, 4) == list(TILES[:3])
    # a strip lies within a block of signs; tl.dot's least size
    assert all(128 % t[1] == 0 and min(t[:3]) >= 16 for t in TILES)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype, size", [("fp32", 4), ("bf16", 2)])
def test_every_variant_compiles_and_fits_the_chip(chip, dtype, size, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signs_fit(chip)
    # bfloat16 inputs meet only one kind of dot
    precisions = itertools.cycle(PRECISIONS if size == 4 else ("ieee",))
    # a tile meets three precisions, one a group; signs from a seed at relu^2 have every part
    for tile, group in itertools.product(tiles_for(CHIPS[chip], size, size), GROUPS[:3]):
        fits(chip, dtype, next(precisions), "seed", True, group, tile)
    for (xi, relu2), group in itertools.product(SIGNS, GROUPS):
        fits(chip, dtype, next(precisions), xi, relu2, group, TILES[1])


ON_A_GPU = [("torch", "ieee", 1e-6), ("triton", "ieee", 1e-6), ("triton", "tf32x3", 1e-5),
            ("triton", "tf32", 2e-3), ("torch", "tf32", 2e-3), ("triton", "bf16", 1e-2),
            ("torch", "bf16", 1e-2)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_the_gpu():
    on_cpu = case(96, 70, 140)
    assert torch.equal(signs(96, 140, SEED, FIRST, device="cuda").cpu(), on_cpu[3])
    for group in (1, 8, 96):
        for _, f, want in triples(*on_cpu, group, device="cuda"):
            for impl, precision, tolerance in ON_A_GPU:
                close(f(impl, precision=precision).cpu(), want, tolerance)
