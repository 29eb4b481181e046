"""Trainer and Rollout: the base classes that users subclass. An instance is one rank, in an actor of its own."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from mx_rl.errors import InvalidArgument

if TYPE_CHECKING:
    from mx_rl.publisher import Publisher
    from mx_rl.subscriber import Subscriber


class Member(ABC):
    """What a Trainer and a Rollout share.

    The attributes below are set before ``__init__``. The group's ``kwargs`` go to ``__init__`` where the class defines
    one; a class without an ``__init__`` finds them as attributes. Methods are called by name through the group; names
    that begin with an underscore are refused. ``async def`` methods run on one event loop of the actor's own.
    """

    policy: str
    rank: int
    """In the world (Trainer) or in the replica (Rollout)."""
    world_size: int
    local_rank: int
    """Among the ranks of this world or replica on the same node."""
    device: str
    """``"cuda:0"`` where Ray assigned a GPU (Ray hides the others, so that the ordinal is always 0), else ``"cpu"``."""

    @abstractmethod
    def build(self) -> Any:
        """Make what this rank works with and return its tensors: a module, a mapping of names to tensors or shards, or
        a callable that returns either.

        Called once in the actor, on every rank at once. MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK are
        set, so that ``torch.distributed.init_process_group("gloo")`` works here for all ranks of a world or replica.
        """

    def close(self) -> None:  # noqa: B027 - a hook: most classes have nothing to free
        """Free what ``build`` opened (engines, processes). Called once before the actor ends, after the publisher or
        subscriber was closed, on a thread of its own; what takes longer than a few seconds is cut off."""


class Trainer(Member):
    """One rank of the world that publishes. ``self.publisher`` is there once ``build`` has returned.

    Where ``build`` returns None, or meta tensors of the full shapes, each publish takes what a method ``export`` of yours
    gives: an iterable or async iterable of (name, full tensor), as for ``Publisher.publish(stream=)``.
    """

    publisher: Publisher


class Rollout(Member):
    """One rank of a replica that installs versions. ``self.subscriber`` is there once ``build`` has returned.

    Every call of a method through the fleet is a hold: weights do not change while it runs. A class whose engine has
    its own safe points sets ``holds = False``.

    Where ``build`` returns None, or meta tensors, each sync calls a method ``load_weights`` of yours with an iterator over
    (name, tensor), as ``Subscriber.stream`` gives it; what raises in it leaves the replica tainted until the next sync.
    """

    replica: str
    """The replica's name: unique for ever, a replacement has another."""
    subscriber: Subscriber
    holds: bool = True

    @property
    def version(self) -> int | None:
        """Number of the installed version, or None before the first."""
        subscriber = getattr(self, "subscriber", None)
        return None if subscriber is None else subscriber.version


MemberT = TypeVar("MemberT", bound=Member)
_GIVEN = {"policy", "rank", "world_size", "local_rank", "device", "replica", "publisher", "subscriber"}
_NOT_CALLED = {"build", "close"}


def check_class(user_class: Any, base: type[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse here, in the caller, what would only fail in the actor. Raises InvalidArgument."""
    if not (isinstance(user_class, type) and issubclass(user_class, base)):
        raise InvalidArgument(
            f"{user_class!r} is no subclass of mx_rl.ray.{base.__name__}; actors of another class "
            "are wrapped by from_actors"
        )
    if inspect.isabstract(user_class):
        raise InvalidArgument(f"{user_class.__name__} has no build method")
    init = _own_init(user_class)
    if init is not None:
        try:
            inspect.signature(init).bind(None, **kwargs)
        except TypeError as error:
            raise InvalidArgument(
                f"kwargs={sorted(kwargs)} do not fit {user_class.__name__}.__init__: {error}"
            ) from None
        return
    taken = sorted(name for name in kwargs if name in _GIVEN or callable(getattr(user_class, name, None)))
    if taken:
        raise InvalidArgument(
            f"kwargs {taken} would hide what {user_class.__name__} has under these names; rename them, "
            "or give the class an __init__ that takes them"
        )


def make(user_class: type[MemberT], kwargs: Mapping[str, Any], given: Mapping[str, Any]) -> MemberT:
    """The instance, with what is ``given`` set before its ``__init__`` runs."""
    member = user_class.__new__(user_class)
    for name, value in given.items():
        setattr(member, name, value)
    init = _own_init(user_class)
    if init is not None:
        init(member, **kwargs)
    else:
        for name, value in kwargs.items():
            setattr(member, name, value)
    return member


def _own_init(user_class: Any) -> Any:
    return None if user_class.__init__ is object.__init__ else user_class.__init__


def check_method(owner: object, name: str) -> None:
    """Raises InvalidArgument unless ``name`` is a public method of the class or instance ``owner``."""
    kind = owner if isinstance(owner, type) else type(owner)
    title = kind.__name__
    ours = issubclass(kind, Member) and name in _NOT_CALLED
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or ours:
        raise InvalidArgument(f"{name!r} is not called by name: a public method of {title} is")
    if not callable(getattr(owner, name, None)):
        raise InvalidArgument(f"{title} has no method {name!r}")
