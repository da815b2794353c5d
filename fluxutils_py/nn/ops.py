"""Products of batches of matrices with the batch axis last, and the contraction of two arrays.

FluxUtils.jl keeps the batch in the last axis, :func:`torch.bmm` in the first. These functions keep
the order of FluxUtils.jl, so that its formulas can be copied as they are. Nothing is guessed from
shapes: for three axes of equal length both orders are valid and give different results.

All of them take tensors or NumPy arrays. The result is a NumPy array if no argument is a tensor.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.errors import ShapeError

__all__ = ["batched_gemm", "batched_gemm_", "bmm", "contract"]

Trans = Literal["N", "T", "C"]
Array = Tensor | np.ndarray


def bmm(A: Array, B: Array, *, batch_first: bool = False) -> Any:
    """Multiply two batches of matrices, with the batch axis last.

    Parameters
    ----------
    A : tensor or array of shape (m, k, b)
        ``b`` matrices of ``m`` rows and ``k`` columns, of any dtype and in any memory order.
    B : tensor or array of shape (k, n, b)
        ``b`` matrices of the dtype of ``A``. A batch of one is not broadcast.
    batch_first : bool, default False
        Read ``A`` as (b, m, k) and ``B`` as (b, k, n), as :func:`torch.bmm` does.

    Returns
    -------
    tensor or array of shape (m, n, b), or (b, m, n) if ``batch_first``
        New memory, differentiable in ``A`` and ``B``.

    Raises
    ------
    ShapeError
        If an argument does not have three axes, or if the inner or batch sizes differ.

    Notes
    -----
    ``bmm`` of FluxUtils.jl v0.1.5.

    Examples
    --------
    >>> A, B = torch.ones(2, 3, 5), torch.ones(3, 4, 5)
    >>> bmm(A, B).shape
    torch.Size([2, 4, 5])
    >>> bmm(A, B)[:, :, 0].equal(A[:, :, 0] @ B[:, :, 0])
    True
    """
    return _match_type(_multiply_batches("bmm", A, B, batch_first=batch_first), A, B)


def batched_gemm(transA: Trans, transB: Trans, *operands: Any) -> Any:
    """Compute ``alpha * op(A) @ op(B)`` for each matrix of a batch, with the batch axis last.

    Call it as ``batched_gemm(transA, transB, alpha, A, B)`` or ``batched_gemm(transA, transB, A,
    B)``, as in Julia.

    Parameters
    ----------
    transA, transB : {"N", "T", "C"}
        What ``op`` does to each matrix, in the letters of BLAS: nothing, transpose, or conjugate
        transpose.
    alpha : number or 0-d tensor, default 1
        A float ``alpha`` turns an integer product into a float one.
    A : tensor or array of shape (m, k, b), or (k, m, b) if transposed
    B : tensor or array of shape (k, n, b), or (n, k, b) if transposed
        ``b`` matrices of the dtype of ``A``. A batch of one is not broadcast.

    Returns
    -------
    tensor or array of shape (m, n, b)
        New memory, differentiable in ``alpha``, ``A`` and ``B``.

    Raises
    ------
    ShapeError
        If ``A`` or ``B`` does not have three axes, or if the inner or batch sizes differ.
    ValueError
        If ``transA`` or ``transB`` is another letter.

    Notes
    -----
    ``batched_gemm`` of FluxUtils.jl v0.1.5.

    Examples
    --------
    >>> A, B = torch.ones(3, 2, 5), torch.ones(3, 4, 5)
    >>> batched_gemm("T", "N", 0.5, A, B).shape
    torch.Size([2, 4, 5])
    """
    if len(operands) not in (2, 3):
        raise TypeError(
            "batched_gemm: expected (alpha, A, B) or (A, B) after the letters, got "
            f"{len(operands)} operands"
        )
    # as Julia's methods do: the number of arguments tells whether alpha is one
    alpha, A, B = operands if len(operands) == 3 else (1, *operands)
    return _match_type(alpha * _multiply_batches("batched_gemm", A, B, transA, transB), A, B)


def batched_gemm_(
    transA: Trans, transB: Trans, alpha: Any, A: Array, B: Array, beta: Any, C: Any
) -> Any:
    """Write ``alpha * op(A) @ op(B) + beta * C`` into ``C``, for each matrix of a batch, with the
    batch axis last.

    Parameters
    ----------
    transA, transB, alpha, A, B
        As in :func:`batched_gemm`. ``A`` and ``B`` may share memory with ``C``.
    beta : number or 0-d tensor
        With 0, ``C`` is not read, so it may be uninitialised or NaN.
    C : tensor or array of shape (m, n, b)
        Written in place, through any view, in its dtype.

    Returns
    -------
    tensor or array of shape (m, n, b)
        ``C`` itself. Autograd follows the write as it follows any in-place operation.

    Raises
    ------
    ShapeError
        If shapes do not match. ``C`` is then unchanged.
    TypeError
        If ``alpha`` or ``beta`` does not fit into the dtype of ``C``, such as a float for integers.
    ValueError
        If ``transA`` or ``transB`` is another letter.

    Notes
    -----
    ``batched_gemm!`` of FluxUtils.jl v0.1.5.

    Examples
    --------
    >>> A, B, C = torch.ones(2, 3, 5), torch.ones(3, 4, 5), torch.ones(2, 4, 5)
    >>> batched_gemm_("N", "N", 1.0, A, B, 10.0, C) is C
    True
    >>> C.unique().tolist()
    [13.0]
    """
    out = C if isinstance(C, Tensor) else torch.from_numpy(C)
    # complete before the write, since A and B may share memory with C
    product = _multiply_batches("batched_gemm_", A, B, transA, transB)
    if out.shape != product.shape:
        raise ShapeError(
            f"batched_gemm_: C has shape {tuple(out.shape)}, the product has shape "
            f"{tuple(product.shape)}; allocate C as A.new_empty({tuple(product.shape)})"
        )
    for name, factor in (("alpha", alpha), ("beta", beta)):
        if torch.result_type(out, factor) != out.dtype:
            raise TypeError(
                f"batched_gemm_: {name}={factor!r} does not fit into C of dtype {out.dtype}; "
                "use tensors of a wider dtype, or batched_gemm, which returns a new tensor"
            )
    # with beta 0, C is not read: it may be uninitialised, and 0 * NaN is NaN
    out.copy_(alpha * product if beta == 0 else alpha * product + beta * out)
    return C


def contract(A: Array, B: Array) -> Any:
    """Sum the products of ``A`` and ``B`` over the last axis of ``A`` and the first of ``B``.

    The matrix product for any number of axes: ``out[i..., j...] = sum_k A[i..., k] * B[k, j...]``.
    Unlike ``A @ B``, it treats no axis as a batch axis.

    Parameters
    ----------
    A : tensor or array of shape (..., k)
    B : tensor or array of shape (k, ...)
        Of the dtype of ``A``. A ``k`` of one is not broadcast.

    Returns
    -------
    tensor or array of shape ``A.shape[:-1] + B.shape[1:]``
        New memory, differentiable in ``A`` and ``B``.

    Raises
    ------
    ShapeError
        If an argument has no axis, or if the two axes differ in length.

    Notes
    -----
    The operator ``*ᶜ`` of FluxUtils.jl v0.1.5. :func:`torch.tensordot` with ``dims=1`` broadcasts a
    contracted axis of length one; this function raises an error.

    Examples
    --------
    >>> contract(torch.ones(2, 3, 4), torch.ones(4, 5)).shape
    torch.Size([2, 3, 5])
    """
    left = _to_tensor(A)
    right = _to_tensor(B)
    for name, X in (("A", left), ("B", right)):
        if X.ndim == 0:
            raise ShapeError(
                f"contract: {name} has no axes, expected at least one; multiply by a scalar with *"
            )
    if left.shape[-1] != right.shape[0]:
        raise ShapeError(
            f"contract: A has shape {tuple(left.shape)}, B has shape {tuple(right.shape)}: the "
            f"last axis of A has length {left.shape[-1]}, the first of B {right.shape[0]}; bring "
            "the axes to sum over there with movedim"
        )
    return _match_type(torch.tensordot(left, right, dims=1), A, B)


def _multiply_batches(
    caller: str,
    A: Array,
    B: Array,
    transA: Trans = "N",
    transB: Trans = "N",
    batch_first: bool = False,
) -> Tensor:
    """Return ``op(A) @ op(B)`` of shape (m, n, b), or (b, m, n), after checks."""
    left = _batch_of_matrices(caller, "A", A, transA, batch_first)
    right = _batch_of_matrices(caller, "B", B, transB, batch_first)
    sizes = {
        "inner": (left.shape[2], right.shape[1]),
        "batch": (left.shape[0], right.shape[0]),
    }
    for name, (of_A, of_B) in sizes.items():
        if of_A != of_B:
            expected = "(b, m, k) and (b, k, n)" if batch_first else "(m, k, b) and (k, n, b)"
            if "gemm" in caller:
                expected = f"{expected} after {transA!r}, {transB!r}"
            raise ShapeError(
                f"{caller}: A has shape {tuple(A.shape)}, B has shape {tuple(B.shape)}: the {name} "
                f"sizes {of_A} and {of_B} differ; expected {expected}"
            )
    product = torch.bmm(left, right)
    return product if batch_first else product.permute(1, 2, 0)


def _batch_of_matrices(
    caller: str, name: str, array: Array, trans: Trans, batch_first: bool
) -> Tensor:
    """Return ``op(X)`` as a view with the batch axis first."""
    if trans not in ("N", "T", "C"):
        raise ValueError(f"{caller}: trans{name} is {trans!r}, expected 'N', 'T' or 'C'")
    X = _to_tensor(array)
    if X.ndim != 3:
        raise ShapeError(
            f"{caller}: {name} has shape {tuple(X.shape)}, expected three axes with the batch "
            f"{'first' if batch_first else 'last'}; add one to a single matrix with "
            f"{name}.unsqueeze({0 if batch_first else -1})"
        )
    # a view: torch.bmm accepts any strides, so nothing is copied here
    view = X if batch_first else X.permute(2, 0, 1)
    if trans == "T":
        return view.mT
    return view.mH if trans == "C" else view


def _to_tensor(X: Array) -> Tensor:
    # an array is copied, since torch does not accept reversed axes
    return X if isinstance(X, Tensor) else torch.from_numpy(np.array(X))


def _match_type(result: Tensor, *arguments: object) -> Any:
    """Return the result as a NumPy array if no argument is a tensor."""
    if any(isinstance(X, Tensor) for X in arguments):
        return result
    # NumPy does not know torch's lazy conjugation
    return result.resolve_conj().numpy()
