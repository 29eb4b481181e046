"""Whose bytes are believed: a version is moved until what arrived is proved, each time without whoever gave wrong bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mx_rl.errors import DigestMismatch, PeerLost, VersionGone
from mx_rl.fetch import Giver, Haul, Progress, Supplier
from mx_rl.plan import Plan
from mx_rl.proof import Wrong


class Doubt:
    """``bad``: gave wrong bytes. ``aside``: gave a part of a box that is wrong, and wait until another has tried alone."""

    def __init__(self) -> None:
        self.bad: set[Giver] = set()
        self.aside: set[Giver] = set()
        self._trying: Giver | None = None

    @property
    def out(self) -> set[Giver]:
        return self.bad | self.aside

    def judge(self, wrong: Sequence[Wrong], givers: Mapping[int, Giver]) -> bool:
        """A box that came from one giver convicts it. Of those that several gave a part of, one tries alone. False where
        nobody is known to have given anything."""
        found = [dict.fromkeys(givers[window] for window in one.windows if window in givers) for one in wrong]
        certain = {giver for these in found if len(these) == 1 for giver in these}
        if certain:
            self.bad |= certain
            self.aside.clear()
            return True
        suspects = list(dict.fromkeys(giver for these in found for giver in these))
        if not suspects:
            return False
        self._trying = suspects[0]
        self.aside |= set(suspects[1:])
        return True

    def turn(self) -> bool:
        """Whoever tried alone could not: it is the others' turn. False where none is left."""
        if not self.aside:
            return False
        if self._trying is not None:
            self.bad.add(self._trying)
        self.aside.clear()
        return True


def move_proved(
    plan: Plan,
    found: Sequence[Supplier],
    progress: Progress,
    haul: Haul,
    fetch: Callable[[Sequence[Supplier]], None],
    check: Callable[[], Sequence[Wrong]],
) -> None:
    """``fetch`` from the suppliers until ``check`` finds nothing wrong.

    Raises what ``fetch`` does where no source is left: DigestMismatch if all that were refused gave wrong bytes.
    """
    doubt = Doubt()
    labels = {one.giver: one.label for one in found}
    told: set[Giver] = set()
    reason = ""

    def tell(givers: set[Giver]) -> None:
        for one in found:
            if one.giver in givers - told:
                haul.refused[one.label] = reason
                haul.retries += 1
        told.update(givers)

    def forget() -> None:
        for window, giver in progress.forget(doubt.out).items():
            if window < plan.num_windows and giver in labels:
                low, high = plan.window_bounds[window]
                haul.served_by[labels[giver]] -= int(high - low)
        for label in [label for label, nbytes in haul.served_by.items() if nbytes <= 0]:
            del haul.served_by[label]

    while True:
        try:
            fetch([one for one in found if one.giver not in doubt.out])
        except (DigestMismatch, PeerLost, VersionGone):
            if not doubt.turn():
                raise
            tell(doubt.bad)
            forget()
            continue
        wrong = check()
        if not wrong:
            tell(doubt.aside)
            return
        names = list(dict.fromkeys(one.name for one in wrong))
        haul.damaged += [name for name in names if name not in haul.damaged]
        reason = f"DigestMismatch: {_listed(names)} arrived with other sums than were published"
        if not doubt.judge(wrong, progress.givers):
            raise DigestMismatch(reason, version=progress.identity[2], tensors=names)
        tell(doubt.bad)
        forget()
        progress.landing.header.begin()  # whoever reads along takes another source


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
