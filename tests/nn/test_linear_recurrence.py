"""The linear recurrence against its formula, step by step in torch, by the kernels and without; and
bit for bit.
"""

import pytest
import torch

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn import linear_recurrence, native_kernels
from fluxutils_py.nn.kernels import library as kernels

TYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
BOUNDS = {torch.float32: 2e-5, torch.float64: 1e-13, torch.complex64: 2e-5, torch.complex128: 1e-13}
ISAS = [name for name in kernels.ISAS if kernels.supports(name)]
by_kernels = pytest.mark.skipif(kernels.library_in_use() is None, reason=kernels.kernels_in_use())


@pytest.fixture(params=[False, *ISAS], ids=lambda isa: isa or "torch")
def path(request, monkeypatch):
    """Once without the kernels, then with those of each instruction set."""
    library = kernels.Library(kernels.PATH, request.param) if request.param else None
    monkeypatch.setattr(kernels._use, "loaded", True)
    monkeypatch.setattr(kernels._use, "library", library)


@pytest.fixture
def threads():
    """Sets the number of torch's threads, and of ours."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def by_steps(a, b, h0=None):
    h, hs = torch.zeros_like(b[0]) if h0 is None else h0, []
    for factor, added in zip(a.expand(b.shape), b, strict=True):
        h = factor * h + added
        hs.append(h)
    return torch.stack(hs)


def draw(shape, dtype, S, B, H, start=True):
    """Factors below 1, so that rounding does not grow; what is added; a start; and weights of a
    loss.
    """
    a = torch.randn(shape, dtype=dtype)
    a = 0.99 * a / (0.1 + a.abs())
    b, h0, w = (
        torch.randn(S, B, H, dtype=dtype),
        torch.randn(B, H, dtype=dtype),
        torch.randn(S, B, H, dtype=dtype),
    )
    return [t.requires_grad_() for t in (a, b, h0)[: 2 + start]], w


def outcomes(function, given, w):
    """The states and the gradients of their weighted sum."""
    h = function(*given)
    loss = (h * w).sum()
    loss = loss.real if loss.is_complex() else loss
    # a is not used in a first step from zero
    return h, *torch.autograd.grad(loss, given, materialize_grads=True)


def assert_close(found, expected, bound):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= bound * (1 + theirs.abs().max())


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 5, 3), (130, 3, 10), (5, 67, 9), (66, 70, 2)])
def test_states_and_gradients_are_those_of_the_formula(dtype, sizes):
    S, B, H = sizes
    for n, shape in enumerate(
        [
            (),
            (H,),
            (B, H),
            (1, H),
            (B, 1),
            (S, 1, H),
            (S, B, H),
            (1, B, 1),
            (S, 1, 1),
            (S, B, 1),
            (1, B, H),
        ]
    ):
        given, w = draw(shape, dtype, *sizes, start=n % 3 > 0)
        assert_close(
            outcomes(linear_recurrence, given, w), outcomes(by_steps, given, w), BOUNDS[dtype]
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_it_is_differentiable_twice_without_the_kernels(dtype):
    for shape in ((2,), (2, 2), (3, 1, 2), (3, 2, 2)):
        given, _ = draw(shape, dtype, 3, 2, 2)
        assert torch.autograd.gradcheck(linear_recurrence, given)
        fast = dtype.is_complex or len(shape) == 3  # along a random direction, not along each
        with native_kernels(False):
            assert torch.autograd.gradgradcheck(linear_recurrence, given, fast_mode=fast)


@by_kernels
def test_the_kernels_refuse_to_differentiate_twice():
    (a, b, h0), _ = draw((3, 2, 2), torch.float64, 3, 2, 2)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*native_kernels\(False\)"):
        torch.autograd.grad(linear_recurrence(a, b, h0).sum(), b, create_graph=True)


@by_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(19,), (70, 19), (65, 1, 19), (65, 70, 19)])
def test_to_the_last_bit_on_any_instruction_set_and_number_of_threads(
    dtype, shape, monkeypatch, threads
):
    given, w = draw(shape, dtype, 65, 70, 19)
    found = []
    for isa in ISAS:
        for n in (1, 2, 5):
            threads(n)
            monkeypatch.setattr(kernels._use, "library", kernels.Library(kernels.PATH, isa))
            found.append(outcomes(linear_recurrence, given, w))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@by_kernels
@pytest.mark.parametrize("dtype", TYPES)
def test_to_the_last_bit_in_pieces_of_time_and_for_some_of_the_series(dtype):
    (a, b, h0), w = draw((23, 37, 3), dtype, 23, 37, 3)
    h, _, db, dh0 = outcomes(linear_recurrence, (a, b, h0), w)
    first = linear_recurrence(a[:9], b[:9], h0)
    then = linear_recurrence(a[9:10], b[9:10], first[-1])
    last = linear_recurrence(a[10:], b[10:], then[-1])
    pieces = torch.cat([first, then, last])
    assert torch.equal(pieces, h)
    loss = (pieces * w).sum()
    d = torch.autograd.grad(loss.real if loss.is_complex() else loss, (b, h0))
    assert torch.equal(d[0], db)
    assert torch.equal(d[1], dh0)
    some = torch.tensor([36, 3, 4, 11])
    of_some = outcomes(linear_recurrence, (a[:, some], b[:, some], h0[some]), w[:, some])
    for whole, part in zip((h, db), (of_some[0], of_some[2]), strict=True):
        assert torch.equal(whole[:, some], part)


@pytest.mark.usefixtures("path")
def test_ten_thousand_steps_of_growth_and_decay_stay_finite():
    a = torch.tensor([1.5, 9.0, 1e-3, -0.5, 1.0])
    b = torch.zeros(10_000, 2, 5)
    b[:, :, 2:] = 1
    # products of 10,000 factors 1.5 or of 100 factors 9 overflow, the states do not
    h = linear_recurrence(a, b, torch.zeros(2, 5))
    assert h[:, :, :2].eq(0).all()
    torch.testing.assert_close(h[-1, 0, 2:], torch.tensor([1 / 0.999, 1 / 1.5, 1e4]))


@pytest.mark.usefixtures("path")
def test_the_gradient_by_a_shared_factor_sums_many_steps_without_losing_digits():
    a, b = torch.tensor([0.5], requires_grad=True), torch.rand(5000, 1, 1)
    (ours,) = torch.autograd.grad(linear_recurrence(a, b).sum(), a)
    a64 = a.detach().double().requires_grad_()
    with native_kernels(False):
        (exact,) = torch.autograd.grad(linear_recurrence(a64, b.double()).sum(), a64)
    torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=0)


@pytest.mark.usefixtures("path")
def test_nan_and_inf_stay_with_their_series_and_the_steps_after():
    (a, b), _ = draw((7, 5, 3), torch.float32, 7, 5, 3, start=False)
    with torch.no_grad():
        b[2, 1, 0], b[3, 4, 2] = float("nan"), float("inf")
        a[5, 4, 2] = 0
    h = linear_recurrence(a, b)
    bad = torch.zeros(7, 5, 3, dtype=torch.bool)
    bad[2:, 1, 0] = bad[3:, 4, 2] = True
    assert torch.equal(~h.isfinite(), bad)
    assert h[3, 4, 2].isinf()
    assert h[5, 4, 2].isnan()  # 0 times inf


@pytest.mark.usefixtures("path")
def test_any_memory_order_conjugates_and_types():
    (a, b, h0), w = draw((7, 5, 3), torch.complex128, 7, 5, 3)
    expected = outcomes(by_steps, (a, b, h0), w)
    strided = b.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    found = outcomes(linear_recurrence, (a, strided, h0), w)
    assert_close(found, expected, 1e-14)
    conjugate = a.detach().conj().resolve_conj().requires_grad_()
    assert_close([linear_recurrence(conjugate.conj(), b, h0)], expected[:1], 1e-14)
    real = a.detach().abs().requires_grad_()
    assert_close(
        outcomes(linear_recurrence, (real, b, h0), w), outcomes(by_steps, (real, b, h0), w), 1e-14
    )
    assert linear_recurrence(torch.rand(3), torch.rand(7, 5, 3).double()).dtype == torch.float64
    assert (
        linear_recurrence(torch.rand(3).half(), torch.rand(7, 5, 3).half()).dtype == torch.float16
    )


@pytest.mark.usefixtures("path")
def test_nothing_in_nothing_out():
    for S, B, H in ((0, 2, 3), (4, 0, 3), (4, 2, 0)):
        b = torch.rand(S, B, H, requires_grad=True)
        h = linear_recurrence(torch.rand(H), b)
        assert h.shape == (S, B, H)
        h.sum().backward()


@pytest.mark.usefixtures("path")
def test_inputs_changed_before_the_backward_pass_are_noticed():
    (a, b, h0), _ = draw((5, 3), torch.float64, 7, 5, 3)
    h = linear_recurrence(a, b, h0)
    with torch.no_grad():
        a.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified.*inplace"):
        h.sum().backward()


@pytest.mark.usefixtures("path")
def test_it_maps_over_a_further_axis():
    a, b = torch.rand(4, 3), torch.randn(4, 7, 5, 3)
    mapped = torch.func.vmap(linear_recurrence)(a, b)
    torch.testing.assert_close(
        mapped, torch.stack([by_steps(x, y) for x, y in zip(a, b, strict=True)])
    )


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            ((3,), (5, 3), None),
            r"^linear_recurrence .*\(S, B, H\).*\(5, 3\)",
        ),
        (((4,), (7, 5, 3), None), r"^a .*\(4,\).*broadcast.*b .*\(7, 5, 3\)"),
        (
            ((2, 7, 5, 3), (7, 5, 3), None),
            r"^a .*\(2, 7, 5, 3\).*b .*\(7, 5, 3\)",
        ),
        (((3,), (7, 5, 3), (3,)), r"^h0 .*\(B, H\) = \(5, 3\).*\(3,\)"),
    ],
)
def test_other_shapes_are_errors(shapes, message):
    with pytest.raises(ShapeError, match=f"{message}$"):
        linear_recurrence(*(None if s is None else torch.zeros(s) for s in shapes))


def test_integers_are_an_error():
    with pytest.raises(
        TypeError,
        match=r"^linear_recurrence .*torch.int64",
    ):
        linear_recurrence(torch.ones(3, dtype=torch.int64), torch.ones(7, 5, 3, dtype=torch.int64))


@pytest.mark.parametrize("is_native", [True, False])
def test_the_factor_of_a_single_step_has_a_gradient_of_zero_which_adam_tells_from_none(is_native):
    a, b = torch.randn(4, requires_grad=True), torch.randn(1, 3, 4)
    with native_kernels(is_native):
        linear_recurrence(a, b).sum().backward()
    assert torch.equal(a.grad, torch.zeros(4))
