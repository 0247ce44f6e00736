"""The ops of low-rank gradient exchange: bases that all ranks start from, orthonormal columns, what is left over.

A gradient as a matrix ``M`` of ``n`` rows and ``m`` columns, the residual ``E`` added, is exchanged like this::

    q = graphopt.warm_basis(q_kept, key)                # [m, r], orthonormal columns, the same on every rank
    p = graphopt.orthonormal(all_reduce(M @ q))         # [n, r]
    q = all_reduce(M.T @ p) / ranks                     # [m, r]
    sent = p @ q.T                                      # the same on every rank
    graphopt.remember_(E, M, sent, keep)                # E = M - sent

None of these ops draws from a random stream, and on CUDA none waits for the device.

Source: Vogels, Karimireddy and Jaggi, PowerSGD, NeurIPS 2019 (arXiv 1905.13727); torch's ``powerSGD_hook``.
"""

from __future__ import annotations

import math

import torch

from graphopt.ir.ops.define import define, described, require

__all__ = ["cold_basis", "orthonormal", "remember_", "warm_basis"]

_GRAM_SCHMIDT = 2
"""Up to so many columns Gram-Schmidt takes less time than a QR decomposition."""

_GOLDEN = (math.sqrt(5) - 1) / 2


def _spread(shape: tuple[int, int], phase: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Numbers spread evenly over [-1, 1] without visible order: the fractions of ``k * k * golden + k * phase``.

    Source: Weyl, "Über die Gleichverteilung von Zahlen mod. Eins", 1916.
    """
    k = torch.arange(1, shape[0] * shape[1] + 1, dtype=torch.float64, device=like.device)
    return torch.frac(k * k * _GOLDEN + k * phase).mul_(2).sub_(1).reshape(shape).to(like.dtype)


def _phase(key: int) -> float:
    return math.fmod((key + 1) * math.sqrt(2), 1.0)


def _warm(q: torch.Tensor, key: int) -> torch.Tensor:
    _check_matrix("warm_basis", q)
    return _orthonormal(torch.where(q.any(), q, _spread((q.shape[0], q.shape[1]), _phase(key), q)))


def _empty_warm(q: torch.Tensor, key: int) -> torch.Tensor:
    _check_matrix("warm_basis", q)
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _cold(like: torch.Tensor, columns: int, key: int, step: torch.Tensor) -> torch.Tensor:
    made = _empty_cold(like, columns, key, step)
    phase = torch.frac(_phase(key) + step.double() * math.sqrt(3))
    return _orthonormal(_spread((made.shape[0], columns), phase, made))


def _empty_cold(like: torch.Tensor, columns: int, key: int, step: torch.Tensor) -> torch.Tensor:
    fits = like.dim() == 2 and 0 < columns <= like.shape[1]
    require(fits, "cold_basis", f"a matrix {described(like)} has no basis of {columns} columns")
    require(step.numel() == 1, "cold_basis", f"the step must be one element, not {described(step)}")
    return like.new_empty(like.shape[1], columns)


def _orthonormal(x: torch.Tensor) -> torch.Tensor:
    _check_matrix("orthonormal", x)
    if x.shape[1] > _GRAM_SCHMIDT:
        basis: torch.Tensor = torch.linalg.qr(x)[0]
        return basis.contiguous()
    columns: list[torch.Tensor] = []
    for column in x.unbind(1):
        for other in columns:
            column = column - torch.dot(column, other) * other
        norm = torch.linalg.vector_norm(column)
        columns.append(torch.where(norm == 0, column, column / norm))
    return torch.stack(columns, 1)


def _empty_orthonormal(x: torch.Tensor) -> torch.Tensor:
    _check_matrix("orthonormal", x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _check_matrix(op: str, x: torch.Tensor) -> None:
    fits = x.dim() == 2 and 0 < x.shape[1] <= x.shape[0] and x.dtype in (torch.float32, torch.float64)
    require(
        fits, op, f"it takes a matrix of float32 or float64 with at least as many rows as columns, not {described(x)}"
    )


def _remember(error: torch.Tensor, m: torch.Tensor, sent: torch.Tensor, keep: torch.Tensor) -> None:
    _check_remember(error, m, sent, keep)
    if keep:
        torch.sub(m, sent, out=error)


def _remember_unread(error: torch.Tensor, m: torch.Tensor, sent: torch.Tensor, keep: torch.Tensor) -> None:
    _check_remember(error, m, sent, keep)
    torch.where(keep.reshape(()) != 0, m - sent, error, out=error)


def _check_remember(error: torch.Tensor, m: torch.Tensor, sent: torch.Tensor, keep: torch.Tensor) -> None:
    for name, other in (("m", m), ("sent", sent)):
        same = other.shape == error.shape
        require(
            same, "remember_", f"{name} must have the residual's shape {list(error.shape)}, not be {described(other)}"
        )
    require(keep.numel() == 1, "remember_", f"keep must be one element, not {described(keep)}")


warm_basis = define("warm_basis(Tensor q, int key) -> Tensor", _warm, _empty_warm)
"""``warm_basis(Tensor q, int key) -> Tensor``: an orthonormal basis of the columns of ``q``, shape ``[m, r]``.

Where all of ``q`` is 0, as before the first step, numbers that depend on shape and ``key`` alone take its place.
"""

cold_basis = define("cold_basis(Tensor like, int columns, int key, Tensor step) -> Tensor", _cold, _empty_cold)
"""``cold_basis(Tensor like, int columns, int key, Tensor step) -> Tensor``: another orthonormal basis at each step.

Shape ``[like.shape[1], columns]``, of the dtype and on the device of ``like``; depends on shape, ``key`` and ``step``
(one element) alone.
"""

orthonormal = define("orthonormal(Tensor x) -> Tensor", _orthonormal, _empty_orthonormal)
"""``orthonormal(Tensor x) -> Tensor``: orthonormal columns that span those of ``x``, shape ``[n, r]`` with r <= n.

By Gram-Schmidt for one or two columns, where a column of zeros stays one; for more by QR decomposition.
"""

remember_ = define(
    "remember_(Tensor(a!) error, Tensor m, Tensor sent, Tensor keep) -> ()",
    _remember,
    _check_remember,
    _remember_unread,
)
"""``remember_(Tensor(a!) error, Tensor m, Tensor sent, Tensor keep) -> ()``: what was not sent is the new residual.

``error = m - sent``; where ``keep`` (one element) is 0 it stays as it is, whatever the others hold.
"""
