"""Optimizers of FluxUtils.jl for torch: clipping per parameter, and decay without learning rate.

>>> model = torch.nn.Linear(3, 2)
>>> optimizer = ADAMW32(lr=1e-2)(model.parameters())

Pass them to an estimator as ``opt=ADAMW32(1e-2)``; their settings are parameters such as
``opt__lr``, ``opt__decay`` and ``opt__thresh``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fluxutils_py.lr_schedules import cosine, inverse_sqrt

__all__ = [
    "ADAM32",
    "ADAMW32",
    "Chain",
    "ChainFactory",
    "ChainedOptimizer",
    "Clip",
    "ClipNorm",
    "Transform",
    "WeightDecay",
    "by_name",
    "cosine",
    "inverse_sqrt",
]


class Transform:
    """A link of a :func:`Chain`: changes each parameter's gradient, or its update, in place.

    Write your own transform as a dataclass with numbers as fields, so that it can be shown, set and
    saved.
    """

    def __call__(self, delta: Tensor, x: Tensor) -> None:
        """Change ``delta``, for the parameter ``x``, in place."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Clip(Transform):
    """Clamp each value of a gradient to ``-thresh`` and ``thresh``. Source: ``Clip`` of
    FluxUtils.jl.

    >>> Clip(0.5)(delta := torch.tensor([3.0, -0.2]), torch.zeros(2)), delta
    (None, tensor([ 0.5000, -0.2000]))
    """

    thresh: float

    def __call__(self, delta: Tensor, x: Tensor) -> None:
        delta.clamp_(-self.thresh, self.thresh)


@dataclasses.dataclass(frozen=True)
class ClipNorm(Transform):
    """Scale each parameter's gradient down to the norm ``thresh``, if its norm is larger.

    To limit the norm of all parameters together, use ``clip`` of the spec, or torch's
    ``clip_grad_norm_``. Source: ``ClipNorm`` of FluxUtils.jl.

    >>> ClipNorm(1.0)(delta := torch.tensor([3.0, -4.0]), torch.zeros(2)), delta
    (None, tensor([ 0.6000, -0.8000]))
    """

    thresh: float

    def __call__(self, delta: Tensor, x: Tensor) -> None:
        # clamped, since a gradient of zero has the factor infinity, and a small one must not grow
        delta.mul_((self.thresh / torch.linalg.vector_norm(delta)).clamp_max(1))


@dataclasses.dataclass(frozen=True)
class WeightDecay(Transform):
    """Add ``decay`` times the parameter to its gradient or update.

    After the optimizer in a chain, each step shrinks the parameters by this fraction, whatever the
    learning rate. Before it, this is the gradient of a penalty on squares. Source: ``WeightDecay``
    of Flux.jl 0.9.

    >>> WeightDecay(0.1)(delta := torch.zeros(2), torch.tensor([3.0, -4.0])), delta
    (None, tensor([ 0.3000, -0.4000]))
    """

    decay: float = 0.0

    def __call__(self, delta: Tensor, x: Tensor) -> None:
        delta.add_(x, alpha=self.decay)


def ADAM32(
    lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999)
) -> functools.partial[torch.optim.Adam]:
    """Adam, for a :func:`Chain` or as ``opt``: ``functools.partial(torch.optim.Adam, lr=lr,
    betas=betas)``.

    Moments have the dtype of the parameters. Source: ``ADAM32`` of FluxUtils.jl.

    >>> type(ADAM32()([torch.zeros(2, requires_grad=True)])).__name__
    'Adam'
    """
    return functools.partial(torch.optim.Adam, lr=lr, betas=betas)


def ADAMW32(
    lr: float = 1e-3,
    decay: float = 1e-3,
    thresh: float = 0.5,
    betas: tuple[float, float] = (0.9, 0.999),
) -> ChainFactory:
    """``Chain(Clip(thresh), ADAM32(lr), WeightDecay(decay))``: Adam of clipped gradients, with
    decoupled decay.

    Parameters
    ----------
    lr : float
        May be 0: then parameters only shrink.
    decay : float
        The fraction by which a step shrinks the parameters. ``AdamW(weight_decay=decay / lr)`` does
        the same while the learning rate is constant; here, a schedule does not change the decay.
    thresh : float
        Largest absolute value of a gradient.
    betas : tuple of two floats

    Notes
    -----
    Source: ``ADAMW32`` of FluxUtils.jl.

    Examples
    --------
    >>> ADAMW32(0.01).links[::2]
    (Clip(thresh=0.5), WeightDecay(decay=0.001))
    """
    return ChainFactory(Clip(thresh), ADAM32(lr, betas), WeightDecay(decay))


def by_name(name: str, **settings: Any) -> Callable[..., Optimizer]:
    """Return a function that builds the optimizer of this name.

    Pass it as ``opt`` of an estimator or a trainer.

    Parameters
    ----------
    name : str
        Name of a class in ``torch.optim``, such as ``"sgd"``, ``"adamax"`` or ``"adamw"``, or
        ``"adam32"``, ``"adamw32"``; in upper or lower case.
    **settings
        Arguments of the optimizer.

    Raises
    ------
    ValueError
        If there is no such optimizer.
    TypeError
        If the optimizer has no such argument.

    Notes
    -----
    Source: ``KnownOptimizers`` of gomlx, with other defaults: there ``eps`` of Adam is 1e-7,
    ``weight_decay`` of AdamW 0.004, and ``lr`` of SGD 0.1, decaying as :func:`inverse_sqrt` does.

    Examples
    --------
    >>> by_name("adam", lr=0.01)
    functools.partial(<class 'torch.optim.adam.Adam'>, lr=0.01)
    """
    key = str(name).lower()
    ours: dict[str, Callable[..., Any]] = {"adam32": ADAM32, "adamw32": ADAMW32}
    if key in ours:
        return ours[key](**settings)
    members = vars(torch.optim).items()
    classes = {n.lower(): v for n, v in members if inspect.isclass(v) and issubclass(v, Optimizer)}
    del classes["optimizer"]  # their base
    if key not in classes:
        known = ", ".join(sorted([*classes, *ours]))
        raise ValueError(f"there is no optimizer {name!r}. Known are {known}")
    # raises TypeError here for an unknown argument; a partial would only when it is called
    inspect.signature(classes[key]).bind(None, **settings)
    return functools.partial(classes[key], **settings)


def Chain(*links: Any) -> Any:
    """Chain transforms and one optimizer.

    Each link changes the result of the one before it, starting from gradients.

    Parameters
    ----------
    *links : Transform, and one optimizer
        The optimizer is a class of ``torch.optim``, a ``functools.partial`` of one, a function of
        the parameters, or an instance. Transforms before it change gradients in place, as
        ``torch.nn.utils.clip_grad_value_`` does; transforms after it change the update that is
        subtracted from the parameters.

    Returns
    -------
    ChainFactory, or ChainedOptimizer
        For an instance, a ``ChainedOptimizer``, ready for ``step()``. Else a function of the
        parameters that makes one, for ``opt`` of an estimator.

    Raises
    ------
    TypeError
        If there is not exactly one optimizer.

    Notes
    -----
    Source: ``Optimiser`` of Flux.jl 0.9.

    Examples
    --------
    >>> sgd = functools.partial(torch.optim.SGD, lr=1.0)
    >>> for chain in (
    ...     Chain(Clip(0.5), sgd, WeightDecay(0.1)),
    ...     Chain(WeightDecay(0.1), Clip(0.5), sgd),
    ... ):
    ...     p = torch.tensor([10.0], requires_grad=True)
    ...     p.grad = torch.tensor([3.0])
    ...     chain([p]).step()
    ...     print(p.detach())
    tensor([8.5000])
    tensor([9.5000])
    """
    factory = ChainFactory(*links)
    optimizer = factory.optimizer
    if isinstance(optimizer, Optimizer):
        return ChainedOptimizer(optimizer, factory.before, factory.after)
    return factory


class ChainFactory:
    """Makes a :class:`ChainedOptimizer` when called with parameters; :func:`Chain` returns one for
    a class.

    Settings of all links may be passed by name where names are unique: ``chain(params, lr=0.1)``.
    """

    def __init__(self, *links: Any) -> None:
        self.links = links
        self._index = _index_of_optimizer(links)
        self.optimizer = links[self._index]
        self.before = links[: self._index]
        self.after = links[self._index + 1 :]
        settings: dict[str, inspect.Parameter] = {}
        self._owners: dict[str, int] = {}  # which link has the setting of this name
        for k, link in enumerate(links):
            for p in _settings(link):
                # of two of one name, the first link has it
                if self._owners.setdefault(p.name, k) == k:
                    settings[p.name] = p.replace(kind=p.KEYWORD_ONLY)
        params = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        # where get_params() and inspect look for the names of settings
        self.__signature__ = inspect.Signature([params, *settings.values()])

    def __call__(self, params: Any, **settings: Any) -> ChainedOptimizer:
        links = list(self.links)
        for name, value in settings.items():
            k = self._owners.get(name, self._index)
            change = functools.partial if k == self._index else dataclasses.replace
            links[k] = change(links[k], **{name: value})
        links[self._index] = links[self._index](params)
        return Chain(*links)

    def __reduce__(self) -> Any:
        return type(self), self.links

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.links))})"


class ChainedOptimizer(Optimizer):
    """An optimizer between transforms; made by :func:`Chain`.

    Its parameter groups, state and ``state_dict()`` are those of the optimizer inside, so
    schedulers and checkpoints see no difference. It does not change parameters without a gradient.
    """

    def __init__(
        self,
        inner: Optimizer,
        before: Iterable[Transform] = (),
        after: Iterable[Transform] = (),
    ) -> None:
        self.inner = inner
        self.before = tuple(before)
        self.after = tuple(after)
        super().__init__(inner.param_groups, inner.defaults)
        self._share_with_inner()

    @property
    def links(self) -> tuple[Any, ...]:
        """The transforms and the optimizer, in the order of :func:`Chain`."""
        return *self.before, self.inner, *self.after

    def _share_with_inner(self) -> None:
        # the same objects, so that schedulers and checkpoints of the chain reach the optimizer
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state
        self.defaults = self.inner.defaults

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once; a ``closure`` is called once before, to compute gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        params = [p for p in params if p.grad is not None]
        for p in params:
            for transform in self.before:
                transform(p.grad, p)
        if not self.after:  # no copies of the parameters then
            self.inner.step()
            return loss
        old = [p.clone() for p in params]
        self.inner.step()
        for p, x in zip(params, old, strict=True):
            delta = x - p  # the update is subtracted, as a gradient is
            for transform in self.after:
                transform(delta, x)
            torch.sub(x, delta, out=p)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict()`` of this chain or of the optimizer in it."""
        self.inner.load_state_dict(state_dict)
        self._share_with_inner()  # torch makes new objects

    def __reduce__(self) -> Any:
        # torch's own way restores groups and state only
        return type(self), (self.inner, self.before, self.after)

    def __repr__(self) -> str:
        links = ", ".join(map(repr, self.links))
        return f"ChainedOptimizer({links})"


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state into an optimizer, with each tensor in the floating type in which it was saved.

    torch's ``load_state_dict`` converts all tensors but ``step`` to the type of the parameters,
    even those that never had it, such as ``mu_product`` of ``NAdam``: in float64 that changes the
    number.
    """
    optimizer.load_state_dict(state)
    # torch numbers the parameters in the order of the groups
    params = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in state["param_groups"] for key in group["params"]]
    for p, key in zip(params, keys, strict=True):
        saved_values = state["state"].get(key, {})
        for name, saved in saved_values.items():
            loaded = optimizer.state[p][name]
            if not isinstance(saved, Tensor) or not isinstance(loaded, Tensor):
                continue
            if loaded.dtype != saved.dtype:
                # copied: training must not change the state that was passed
                optimizer.state[p][name] = saved.to(loaded.device, copy=True)


def _index_of_optimizer(links: tuple[Any, ...]) -> int:
    """Return the position of the one optimizer in a chain."""
    others = [k for k, link in enumerate(links) if not isinstance(link, Transform)]
    if len(others) == 1:
        index = others[0]
        if callable(links[index]) or isinstance(links[index], Optimizer):
            return index
    raise TypeError(
        "a chain has one optimizer (a class of torch.optim, a functools.partial of one, a function "
        "of the parameters, or an instance) among transforms such as Clip(0.5); got "
        f"{links!r}"
    )


def _settings(link: Any) -> list[inspect.Parameter]:
    """Return the settings of a link as parameters with defaults.

    Those of a transform are its fields; those of an optimizer that is still to be made are the
    arguments of its class, partial or function, without the model's parameters.
    """
    keyword = inspect.Parameter.KEYWORD_ONLY
    if isinstance(link, Transform):
        # a class of the user's own may have none
        names = getattr(link, "__dataclass_fields__", ())
        return [inspect.Parameter(name, keyword, default=getattr(link, name)) for name in names]
    if isinstance(link, Optimizer):  # its settings are in its groups, and are fixed
        return []
    parameters = list(inspect.signature(link).parameters.values())
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, keyword)
    return [p for p in parameters[1:] if p.kind in by_name and p.default is not p.empty]
