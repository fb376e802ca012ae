"""What the code beside `MaskInfo` reads of a mask: its fields, its sizes, and how to change it."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, Self, TypeVar, overload

from ejkernel.masks._checks import Window

Mask = TypeVar("Mask", bound="Parts")


def causal(
    cls: Callable[..., Mask], query_length: int | None = None, key_length: int | None = None, *, offset: int = 0, **fields: Any
) -> Mask:
    """A causal mask: key j is visible to query i if j <= i + offset.

    Args:
        query_length: T, only needed to materialise the mask.
        key_length: S; `query_length` if left out.
        offset: position of query 0; `S - T` for bottom-right alignment.
        **fields: any other field of `MaskInfo`, e.g. `window=128`.
    """
    sizes = (None, query_length, query_length if key_length is None else key_length)
    return cls(causal=True, causal_offset=offset, sizes=sizes, **fields)


class CausalName:
    """`MaskInfo.causal(...)` makes a causal mask, `info.causal` says whether it is one: class and instance share a name.

    Instances store their bool in `__dict__`, which hides this descriptor.
    """

    @overload
    def __get__(self, instance: None, owner: type[Mask]) -> functools.partial[Mask]: ...
    @overload
    def __get__(self, instance: object, owner: type[Any]) -> bool: ...
    def __get__(self, instance: object | None, owner: type[Any]) -> functools.partial[Any] | bool:
        return functools.partial(causal, owner)


CAUSAL_NAME = CausalName()


class Parts(abc.ABC):
    """The side of `MaskInfo` on which the modules beside it are written. Its fields are documented there."""

    dense: Any
    query_segments: Any
    key_segments: Any
    query_positions: Any
    key_positions: Any
    query_lengths: Any
    key_lengths: Any
    causal: CausalName = CAUSAL_NAME
    causal_offset: int
    window: Window | None
    chunk_size: int | None
    prefix: int | None
    sizes: tuple[int | None, int | None, int | None]

    @property
    @abc.abstractmethod
    def batch_size(self) -> int | None: ...

    @property
    @abc.abstractmethod
    def q_len(self) -> int | None: ...

    @property
    @abc.abstractmethod
    def kv_len(self) -> int | None: ...

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int | None, int | None, int | None]: ...

    @abc.abstractmethod
    def known_sizes(self, purpose: str) -> tuple[int, int]: ...

    @abc.abstractmethod
    def materialize(self, query_length: int | None = None, key_length: int | None = None) -> Any: ...

    @abc.abstractmethod
    def replace(self, **fields: Any) -> Self: ...
