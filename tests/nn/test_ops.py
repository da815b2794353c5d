"""Batch-last products against numpy.einsum, column-major reshapes and numerical gradients."""

import itertools

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from fluxutils_py.errors import FluxUtilsError, ShapeError
from fluxutils_py.nn.ops import batched_gemm, batched_gemm_, bmm, contract

SIZES = [(2, 3, 4, 5), (3, 3, 3, 3), (1, 1, 1, 1), (1, 7, 2, 1), (4, 1, 3, 6)]  # m, k, n, b
LETTERS = list(itertools.product("NTC", repeat=2))
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-13, torch.complex128: 1e-13}


def op(trans, X):
    """BLAS's op on a NumPy array (rows, columns, batch)."""
    return X if trans == "N" else X.swapaxes(0, 1) if trans == "T" else X.swapaxes(0, 1).conj()


def stored(trans, rows, columns, batch, **kwargs):
    """A random tensor whose op is (rows, columns, batch)."""
    return torch.randn(*((rows, columns) if trans == "N" else (columns, rows)), batch, **kwargs)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("m", "k", "n", "b"), SIZES)
def test_bmm_equals_einsum(m, k, n, b, dtype):
    A, B = torch.randn(m, k, b, dtype=dtype), torch.randn(k, n, b, dtype=dtype)
    out = bmm(A, B)
    assert out.dtype == dtype
    expected = np.einsum("mkb,knb->mnb", A.numpy(), B.numpy())
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=TOLERANCES[dtype])


def test_bmm_of_a_cube_is_not_torch_bmm():
    A, B = torch.randn(3, 3, 3), torch.randn(3, 3, 3)
    assert (bmm(A, B) - torch.bmm(A, B)).abs().max() > 0.1
    assert bmm(A, B, batch_first=True).equal(torch.bmm(A, B))


def test_bmm_with_batch_first_equals_einsum():
    A, B = torch.randn(5, 2, 3, dtype=torch.float64), torch.randn(5, 3, 4, dtype=torch.float64)
    expected = np.einsum("bmk,bkn->bmn", A.numpy(), B.numpy())
    np.testing.assert_allclose(bmm(A, B, batch_first=True).numpy(), expected, rtol=0, atol=1e-13)


def test_bmm_takes_any_memory_order_and_integers():
    A = torch.arange(2 * 3 * 5).reshape(5, 3, 2).permute(2, 1, 0)  # (2, 3, 5)
    B = torch.arange(3 * 8 * 5).reshape(3, 8, 5)[:, ::2]  # (3, 4, 5)
    out = bmm(A, B)
    assert out.dtype == torch.int64
    np.testing.assert_array_equal(out.numpy(), np.einsum("mkb,knb->mnb", A.numpy(), B.numpy()))


def test_bmm_of_nothing():
    assert bmm(torch.ones(2, 3, 0), torch.ones(3, 4, 0)).shape == (2, 4, 0)
    assert bmm(torch.ones(2, 0, 5), torch.ones(0, 4, 5)).equal(torch.zeros(2, 4, 5))


@pytest.mark.parametrize("batch_first", [False, True])
def test_bmm_gradients(batch_first):
    A = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    B = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    if batch_first:
        A, B = (X.detach().permute(2, 0, 1).contiguous().requires_grad_() for X in (A, B))
    assert gradcheck(lambda A, B: bmm(A, B, batch_first=batch_first), (A, B))


def test_bmm_gradient_equals_the_formula():
    A = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    B = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    G = torch.randn(2, 4, 5, dtype=torch.float64)
    bmm(A, B).backward(G)
    a, b, g = A.detach().numpy(), B.detach().numpy(), G.numpy()
    np.testing.assert_allclose(A.grad.numpy(), np.einsum("mnb,knb->mkb", g, b), rtol=0, atol=1e-13)
    np.testing.assert_allclose(B.grad.numpy(), np.einsum("mkb,mnb->knb", a, g), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("transA", "transB"), LETTERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("alpha", [1, 1.0, -0.5, 0.0])
def test_batched_gemm_equals_einsum(transA, transB, dtype, alpha):
    A, B = stored(transA, 2, 3, 5, dtype=dtype), stored(transB, 3, 4, 5, dtype=dtype)
    expected = alpha * np.einsum("mkb,knb->mnb", op(transA, A.numpy()), op(transB, B.numpy()))
    out = batched_gemm(transA, transB, alpha, A, B)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.resolve_conj().numpy(), expected, rtol=0, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(("transA", "transB"), LETTERS)
def test_batched_gemm_gradients(transA, transB):
    A = stored(transA, 2, 3, 5, dtype=torch.complex128, requires_grad=True)
    B = stored(transB, 3, 4, 5, dtype=torch.complex128, requires_grad=True)
    assert gradcheck(lambda A, B: batched_gemm(transA, transB, 2.0, A, B), (A, B))


@pytest.mark.parametrize("alpha", [torch.tensor(0.5), np.float64(0.5)])
def test_alpha_may_be_a_scalar_of_any_kind(alpha):
    A, B = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    expected = 0.5 * np.einsum("mkb,knb->mnb", A.numpy(), B.numpy())
    C = torch.zeros(2, 4, 5, dtype=torch.float64)
    np.testing.assert_allclose(
        batched_gemm("N", "N", alpha, A, B).numpy(), expected, rtol=0, atol=1e-13
    )
    np.testing.assert_allclose(
        batched_gemm_("N", "N", alpha, A, B, alpha, C).numpy(), expected, rtol=0, atol=1e-13
    )


def test_alpha_gets_a_gradient():
    alpha = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    A, B = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    assert gradcheck(lambda a: batched_gemm("N", "T", a, A, B.transpose(0, 1)), (alpha,))


def test_too_few_operands_are_an_error():
    with pytest.raises(
        TypeError,
        match=r"^batched_gemm: .*\(A, B\).* got 1 op",
    ):
        batched_gemm("N", "N", torch.ones(2, 3, 5))


def test_numpy_arrays_in_any_order_give_numpy_arrays(rng):
    A, B = rng.normal(size=(5, 3, 2)).transpose(2, 1, 0)[:, ::-1], rng.normal(size=(3, 4, 5))
    A.flags.writeable = False  # as a memory map opened for reading
    expected = np.einsum("mkb,knb->mnb", A, B)
    vector = rng.normal(size=2)
    results = {
        "bmm": (bmm(A, B), expected),
        "batch first": (
            bmm(A.transpose(2, 0, 1), B.transpose(2, 0, 1), batch_first=True),
            expected.transpose(2, 0, 1),
        ),
        "gemm": (batched_gemm("C", "N", 2.0, A.swapaxes(0, 1), B), 2 * expected),
        "contract": (contract(vector, A), np.tensordot(vector, A, 1)),
    }
    for name, (result, wanted) in results.items():
        assert type(result) is np.ndarray, name
        np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-13, err_msg=name)
    C = np.ones((2, 4, 5))
    assert batched_gemm_("N", "N", 2.0, A, B, 3.0, C) is C
    np.testing.assert_allclose(C, 2 * expected + 3, rtol=0, atol=1e-13)


def test_an_array_beside_a_tensor_gives_a_tensor(rng):
    A, B = rng.normal(size=(2, 3, 5)), torch.randn(3, 4, 5, dtype=torch.float64)
    assert bmm(A, B).equal(bmm(torch.from_numpy(A), B))


def test_batched_gemm_of_integers_stays_integer_unless_scaled_by_a_float():
    ones = torch.ones(2, 2, 3, dtype=torch.int64)
    assert batched_gemm("N", "N", ones, ones).equal(2 * ones)
    assert batched_gemm("N", "N", 0.5, ones, ones).equal(torch.ones(2, 2, 3))


@pytest.mark.parametrize(("transA", "transB"), LETTERS)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.5, 1.0), (-2, 0.25), (0.0, 3)])
def test_batched_gemm_in_place_equals_numpy(transA, transB, alpha, beta):
    A, B = (
        stored(transA, 2, 3, 5, dtype=torch.float64),
        stored(transB, 3, 4, 5, dtype=torch.float64),
    )
    C = torch.randn(2, 4, 5, dtype=torch.float64)
    address = C.data_ptr()
    product = np.einsum("mkb,knb->mnb", op(transA, A.numpy()), op(transB, B.numpy()))
    expected = alpha * product + beta * C.numpy()
    assert batched_gemm_(transA, transB, alpha, A, B, beta, C) is C
    assert C.data_ptr() == address
    np.testing.assert_allclose(C.numpy(), expected, rtol=0, atol=1e-13)


def test_batched_gemm_in_place_writes_through_a_view_and_nowhere_else(rng):
    # column-major memory, as a Julia array has it, is seen from C order as the transpose
    memory = rng.normal(size=(6, 4, 2))  # (b, n, m); every other batch entry is ours
    before = memory.copy()
    A, B = torch.randn(2, 3, 3, dtype=torch.float64), torch.randn(3, 4, 3, dtype=torch.float64)
    C = torch.from_numpy(memory).permute(2, 1, 0)[:, :, ::2]
    batched_gemm_("N", "N", 2.0, A, B, -1.0, C)
    for j in range(3):
        expected = 2 * A[:, :, j].numpy() @ B[:, :, j].numpy() - before[2 * j].T
        np.testing.assert_allclose(memory[2 * j].T, expected, rtol=0, atol=1e-13)
    np.testing.assert_array_equal(memory[1::2], before[1::2])


def test_batched_gemm_in_place_does_not_read_c_if_beta_is_zero():
    A, B = torch.randn(2, 3, 5), torch.randn(3, 4, 5)
    C = torch.full((2, 4, 5), torch.nan)
    batched_gemm_("N", "N", 1.0, A, B, 0, C)
    np.testing.assert_allclose(
        C.numpy(), np.einsum("mkb,knb->mnb", A.numpy(), B.numpy()), rtol=0, atol=1e-5
    )


def test_batched_gemm_in_place_may_overwrite_its_own_argument():
    A, B = torch.randn(3, 3, 4, dtype=torch.float64), torch.randn(3, 3, 4, dtype=torch.float64)
    expected = np.einsum("mkb,knb->mnb", A.numpy(), B.numpy()) + A.numpy()
    batched_gemm_("N", "N", 1.0, A, B, 1.0, A)
    np.testing.assert_allclose(A.numpy(), expected, rtol=0, atol=1e-13)


def test_batched_gemm_in_place_is_followed_by_autograd():
    A, B, C = (torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert gradcheck(lambda A, B, C: batched_gemm_("T", "N", 2.0, A, B, 0.5, C.clone()), (A, B, C))


@pytest.mark.parametrize(
    ("left", "right"), [((3,), (3,)), ((2, 3), (3, 4)), ((2, 5, 3), (3,)), ((2, 3), (3, 4, 1, 2))]
)
def test_contract_equals_column_major_matrix_product(left, right, rng):
    A, B = rng.normal(size=left), rng.normal(size=right)
    # as in Julia: fold all but one axis in column-major order, multiply, unfold
    folded = A.reshape(-1, left[-1], order="F") @ B.reshape(right[0], -1, order="F")
    expected = folded.reshape(left[:-1] + right[1:], order="F")
    out = contract(torch.from_numpy(A), torch.from_numpy(B))
    assert out.shape == expected.shape
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-14)


def test_contract_gradients():
    A = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    B = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(contract, (A, B))


def test_results_are_new_memory():
    ones = torch.ones(1, 1, 1)
    for out in (
        bmm(ones, ones),
        bmm(ones, ones, batch_first=True),
        batched_gemm("N", "N", ones, ones),
        contract(ones, ones),
    ):
        out.zero_()
    assert ones.item() == 1


ZEROS = torch.zeros


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: bmm(ZEROS(2, 3), ZEROS(3, 4, 5)),
            "bmm: A has shape (2, 3), expected three axes with the batch last; "
            "add one to a single matrix with A.unsqueeze(-1)",
        ),
        (
            lambda: bmm(ZEROS(5, 2, 3), ZEROS(3, 4), batch_first=True),
            "bmm: B has shape (3, 4), expected three axes with the batch first; "
            "add one to a single matrix with B.unsqueeze(0)",
        ),
        (
            lambda: bmm(ZEROS(2, 3, 5), ZEROS(4, 2, 5)),
            "bmm: A has shape (2, 3, 5), B has shape (4, 2, 5): the inner sizes 3 and 4 differ; "
            "expected (m, k, b) and (k, n, b)",
        ),
        (
            lambda: bmm(ZEROS(2, 3, 5), ZEROS(3, 2, 1)),
            "bmm: A has shape (2, 3, 5), B has shape (3, 2, 1): the batch sizes 5 and 1 differ; "
            "expected (m, k, b) and (k, n, b)",
        ),
        (
            lambda: bmm(ZEROS(5, 2, 3), ZEROS(5, 3, 4)),
            "bmm: A has shape (5, 2, 3), B has shape (5, 3, 4): the inner sizes 2 and 5 differ; "
            "expected (m, k, b) and (k, n, b)",
        ),
        (
            lambda: bmm(ZEROS(2, 3, 5), ZEROS(3, 4, 5), batch_first=True),
            "bmm: A has shape (2, 3, 5), B has shape (3, 4, 5): the inner sizes 5 and 4 differ; "
            "expected (b, m, k) and (b, k, n)",
        ),
        (
            lambda: bmm(ZEROS(2, 3, 5), ZEROS(2, 4, 5), batch_first=True),
            "bmm: A has shape (2, 3, 5), B has shape (2, 4, 5): the inner sizes 5 and 4 differ; "
            "expected (b, m, k) and (b, k, n)",
        ),
        (
            lambda: batched_gemm("T", "N", ZEROS(2, 3, 5), ZEROS(3, 4, 5)),
            "batched_gemm: A has shape (2, 3, 5), B has shape (3, 4, 5): the inner sizes 2 and 3 "
            "differ; expected (m, k, b) and (k, n, b) after 'T', 'N'",
        ),
        (
            lambda: batched_gemm("N", "N", ZEROS(2, 3, 5), ZEROS(3, 4)),
            "batched_gemm: B has shape (3, 4), expected three axes with the batch last; "
            "add one to a single matrix with B.unsqueeze(-1)",
        ),
        (
            lambda: batched_gemm_(
                "N", "N", 1.0, ZEROS(2, 3, 5), ZEROS(3, 4, 5), 0.0, ZEROS(4, 2, 5)
            ),
            "batched_gemm_: C has shape (4, 2, 5), the product has shape (2, 4, 5); "
            "allocate C as A.new_empty((2, 4, 5))",
        ),
        (
            lambda: contract(ZEROS(2, 1), ZEROS(3, 4)),
            "contract: A has shape (2, 1), B has shape (3, 4): the last axis of A has length 1, "
            "the first of B 3; bring the axes to sum over there with movedim",
        ),
        (
            lambda: contract(ZEROS(2, 1), ZEROS(())),
            "contract: B has no axes, expected at least one; multiply by a scalar with *",
        ),
    ],
)
def test_shape_errors_name_the_shapes_and_the_remedy(call, message):
    with pytest.raises(ShapeError) as caught:
        call()
    assert str(caught.value) == message
    assert isinstance(caught.value, FluxUtilsError)
    assert isinstance(caught.value, ValueError)


def test_another_letter_is_an_error():
    ones = ZEROS(2, 2, 1)
    with pytest.raises(ValueError, match=r"^batched_gemm: transB .*'t'.* 'C'$"):
        batched_gemm("N", "t", ones, ones)


@pytest.mark.parametrize(("alpha", "beta", "name"), [(0.5, 1, "alpha=0.5"), (1, 0.5, "beta=0.5")])
def test_a_factor_that_torch_would_cut_off_is_an_error(alpha, beta, name):
    ones = torch.ones(2, 2, 1, dtype=torch.int64)
    C = ones.clone()
    with pytest.raises(TypeError) as caught:
        batched_gemm_("N", "N", alpha, ones, ones, beta, C)
    assert str(caught.value) == (
        f"batched_gemm_: {name} does not fit into C of dtype torch.int64; "
        "use tensors of a wider dtype, or batched_gemm, which returns a new tensor"
    )
    assert C.equal(ones)
