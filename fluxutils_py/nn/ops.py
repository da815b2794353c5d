"""Matrix products over a batch axis that comes last, and the contraction of two arrays.

In FluxUtils.jl the batch is the last axis of an array, in :func:`torch.bmm` the first. The functions here keep the
reference's axes, so that formulas carry over as they stand. For three axes of equal length both readings are valid
and give different numbers, so nothing is ever guessed from the shapes: they only serve the error messages.
"""

from typing import Literal

import torch
from torch import Tensor

from fluxutils_py.errors import ShapeError

__all__ = ["batched_gemm", "batched_gemm_", "bmm", "contract"]

Trans = Literal["N", "T", "C"]

_TO_FIRST = (2, 0, 1)  # (m, n, b) -> (b, m, n)
_TO_LAST = (1, 2, 0)  # (b, m, n) -> (m, n, b)


def bmm(A: Tensor, B: Tensor, *, batch_first: bool = False) -> Tensor:
    """Multiply two batches of matrices, with the batch axis last.

    Parameters
    ----------
    A : tensor of shape (m, k, b)
        ``b`` matrices of ``m`` rows and ``k`` columns. Any dtype that torch multiplies, any memory order.
    B : tensor of shape (k, n, b)
        As many matrices of ``k`` rows and ``n`` columns, of the dtype of ``A``. A batch of one is not broadcast.
    batch_first : bool, default False
        Read ``A`` as (b, m, k) and ``B`` as (b, k, n), as :func:`torch.bmm` does.

    Returns
    -------
    tensor of shape (m, n, b), or (b, m, n) if ``batch_first``
        New memory, differentiable in ``A`` and ``B``. In memory the batch is the slowest axis either way.

    Raises
    ------
    ShapeError
        If an argument has not three axes, or if the inner or batch sizes differ.

    Notes
    -----
    ``bmm`` of FluxUtils.jl v0.1.5. For ``m = k = n = b`` the result of :func:`torch.bmm` has the same shape but other
    values.

    Examples
    --------
    >>> A, B = torch.ones(2, 3, 5), torch.ones(3, 4, 5)
    >>> bmm(A, B).shape
    torch.Size([2, 4, 5])
    >>> bmm(A, B)[:, :, 0].equal(A[:, :, 0] @ B[:, :, 0])
    True
    """
    for name, X in (("A", A), ("B", B)):
        _check_axes("bmm", name, X, batch_first)
    left, right = (A, B) if batch_first else (A.permute(_TO_FIRST), B.permute(_TO_FIRST))
    problem = _mismatch(left, right)
    if problem:
        # read the other way round, would the shapes fit?
        if batch_first and A.shape[1] == B.shape[0] and A.shape[2] == B.shape[2]:
            way_out = "the shapes fit with the batch axis last: leave out batch_first=True"
        elif not batch_first and A.shape[2] == B.shape[1] and A.shape[0] == B.shape[0]:
            way_out = "the shapes fit with the batch axis first: pass batch_first=True"
        else:
            way_out = "expected (b, m, k) and (b, k, n)" if batch_first else "expected (m, k, b) and (k, n, b)"
        raise ShapeError(f"bmm: A has shape {tuple(A.shape)}, B has shape {tuple(B.shape)}: {problem}; {way_out}")
    product = torch.bmm(left, right)
    return product if batch_first else product.permute(_TO_LAST)


def batched_gemm(transA: Trans, transB: Trans, A: Tensor, B: Tensor, alpha: complex = 1.0) -> Tensor:
    """Compute ``alpha * op(A) @ op(B)`` for each matrix of a batch, with the batch axis last.

    Parameters
    ----------
    transA, transB : {"N", "T", "C"}
        What ``op`` does to each matrix, in the letters of BLAS: nothing, transpose, or conjugate transpose (which for
        real numbers is the transpose).
    A : tensor of shape (m, k, b), or (k, m, b) if transposed
        Any dtype that torch multiplies, any memory order.
    B : tensor of shape (k, n, b), or (n, k, b) if transposed
        As many matrices, of the dtype of ``A``. A batch of one is not broadcast.
    alpha : number, default 1.0
        A plain number, not a tensor. Other than 1 it turns an integer product into a float one if it is a float.

    Returns
    -------
    tensor of shape (m, n, b)
        New memory, differentiable in ``A`` and ``B``.

    Raises
    ------
    ShapeError
        If an argument has not three axes, or if the inner or batch sizes differ.
    ValueError
        If ``transA`` or ``transB`` is another letter.

    Notes
    -----
    ``batched_gemm`` of FluxUtils.jl v0.1.5, whose letters and order of arguments it keeps.

    Examples
    --------
    >>> A, B = torch.ones(3, 2, 5), torch.ones(3, 4, 5)
    >>> batched_gemm("T", "N", A, B, 0.5).shape
    torch.Size([2, 4, 5])
    """
    product = torch.bmm(*_operands("batched_gemm", transA, transB, A, B)).permute(_TO_LAST)
    return product if alpha == 1 else alpha * product


def batched_gemm_(
    transA: Trans, transB: Trans, alpha: complex, A: Tensor, B: Tensor, beta: complex, C: Tensor
) -> Tensor:
    """Write ``alpha * op(A) @ op(B) + beta * C`` into ``C``, for each matrix of a batch, with the batch axis last.

    Parameters
    ----------
    transA, transB : {"N", "T", "C"}
        As in :func:`batched_gemm`.
    alpha : number
        Factor of the product.
    A, B : tensors
        As in :func:`batched_gemm`. They may share memory with ``C``: they are read before ``C`` is written.
    beta : number
        Factor of what ``C`` holds. With 0, ``C`` is not read, so it may be uninitialised or NaN.
    C : tensor of shape (m, n, b)
        Written in place, through any view (a slice, a transpose), in its own dtype, which is that of ``A`` and ``B``.

    Returns
    -------
    tensor of shape (m, n, b)
        ``C`` itself. Autograd follows the write as it does any in-place operation, and refuses it on a leaf that
        requires a gradient.

    Raises
    ------
    ShapeError
        If an argument has not three axes, if the inner or batch sizes differ, or if ``C`` has another shape than the
        product. ``C`` is then as it was.
    TypeError
        If ``alpha`` or ``beta`` is not a number of the kind that ``C`` holds (a float for integers, a complex number
        for floats), where torch would cut it off without a word.
    ValueError
        If ``transA`` or ``transB`` is another letter.

    Notes
    -----
    ``batched_gemm!`` of FluxUtils.jl v0.1.5. The product goes through memory of its own, as large as ``C``: torch's
    ``baddbmm_`` into a ``C`` that shares memory with ``A`` or ``B`` gives wrong numbers without an error.

    Examples
    --------
    >>> A, B, C = torch.ones(2, 3, 5), torch.ones(3, 4, 5), torch.ones(2, 4, 5)
    >>> batched_gemm_("N", "N", 1.0, A, B, 10.0, C) is C
    True
    >>> C.unique().tolist()
    [13.0]
    """
    left, right = _operands("batched_gemm_", transA, transB, A, B)
    _check_axes("batched_gemm_", "C", C, batch_first=False)
    expected = (left.shape[1], right.shape[2], left.shape[0])
    if tuple(C.shape) != expected:
        raise ShapeError(
            f"batched_gemm_: C has shape {tuple(C.shape)}, the product has shape {expected}; "
            f"allocate C as A.new_empty({expected})"
        )
    for name, factor in (("alpha", alpha), ("beta", beta)):
        if torch.result_type(C, factor) != C.dtype:
            raise TypeError(
                f"batched_gemm_: {name}={factor!r} does not fit into C of dtype {C.dtype}; "
                "use tensors of a wider dtype, or batched_gemm, which returns a new tensor"
            )
    result = torch.baddbmm(C.permute(_TO_FIRST), left, right, beta=beta, alpha=alpha)
    return C.copy_(result.permute(_TO_LAST))


def contract(A: Tensor, B: Tensor) -> Tensor:
    """Sum the products of ``A`` and ``B`` over the last axis of ``A`` and the first of ``B``.

    The matrix product for arrays of any number of axes: ``out[i..., j...] = sum_k A[i..., k] * B[k, j...]``. Unlike
    ``A @ B``, no axis is a batch axis.

    Parameters
    ----------
    A : tensor of shape (..., k)
        At least one axis. Any memory order.
    B : tensor of shape (k, ...)
        At least one axis, of the dtype of ``A``. A ``k`` of one is not broadcast.

    Returns
    -------
    tensor of shape ``A.shape[:-1] + B.shape[1:]``
        New memory, differentiable in ``A`` and ``B``; without axes if both arguments are vectors.

    Raises
    ------
    ShapeError
        If an argument has no axis, or if the two axes differ in length.

    Notes
    -----
    The operator ``*ᶜ`` of FluxUtils.jl v0.1.5; :func:`torch.tensordot` with ``dims=1``, which broadcasts a contracted
    axis of length one without an error.

    Examples
    --------
    >>> contract(torch.ones(2, 3, 4), torch.ones(4, 5)).shape
    torch.Size([2, 3, 5])
    """
    for name, X in (("A", A), ("B", B)):
        if X.ndim == 0:
            raise ShapeError(f"contract: {name} has no axes, expected at least one; multiply by a scalar with *")
    if A.shape[-1] != B.shape[0]:
        raise ShapeError(
            f"contract: A has shape {tuple(A.shape)}, B has shape {tuple(B.shape)}: the last axis of A has length "
            f"{A.shape[-1]}, the first of B {B.shape[0]}; bring the axes to sum over there with movedim"
        )
    return torch.tensordot(A, B, dims=1)


def _operands(caller: str, transA: Trans, transB: Trans, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Views op(A) of shape (b, m, k) and op(B) of shape (b, k, n), checked."""
    views = []
    for name, trans, X in (("A", transA, A), ("B", transB, B)):
        if trans not in ("N", "T", "C"):
            raise ValueError(f"{caller}: trans{name} is {trans!r}, expected 'N', 'T' or 'C'")
        _check_axes(caller, name, X, batch_first=False)
        view = X.permute(_TO_FIRST)
        views.append(view if trans == "N" else view.mT if trans == "T" else view.mH)
    left, right = views
    problem = _mismatch(left, right)
    if problem:
        raise ShapeError(
            f"{caller}: A has shape {tuple(A.shape)}, B has shape {tuple(B.shape)}, transA={transA!r}, "
            f"transB={transB!r}: {problem}; expected op(A) of shape (m, k, b) and op(B) of shape (k, n, b)"
        )
    return left, right


def _check_axes(caller: str, name: str, X: Tensor, batch_first: bool) -> None:
    if X.ndim != 3:
        which = "first" if batch_first else "last"
        axis = 0 if batch_first else -1
        raise ShapeError(
            f"{caller}: {name} has shape {tuple(X.shape)}, expected three axes with the batch {which}; "
            f"add a batch axis to a single matrix with {name}.unsqueeze({axis})"
        )


def _mismatch(left: Tensor, right: Tensor) -> str:
    """What keeps (b, m, k) and (b, k, n) from being multiplied; empty if nothing does."""
    if left.shape[2] != right.shape[1]:
        return f"the inner sizes {left.shape[2]} and {right.shape[1]} differ"
    if left.shape[0] != right.shape[0]:
        return f"the batch sizes {left.shape[0]} and {right.shape[0]} differ"
    return ""
