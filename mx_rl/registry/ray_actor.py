"""The registry as a named, detached Ray actor on the head node; its floors live in Ray's internal KV, beyond its process.

Client -> ``run`` or ``wait`` (bytes of a Command) -> ``apply`` under one lock -> floors to the KV -> bytes of an Answer.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
import uuid
from typing import Any

import msgspec

from mx_rl.config import Options
from mx_rl.errors import CorruptRecord, InvalidArgument, RegistryLost, missing_extra
from mx_rl.records import Answer, AnyCommand, Refused, decode, encode
from mx_rl.registry.base import Registry
from mx_rl.registry.policy import Saved
from mx_rl.registry.state import State, apply

DEFAULT_NAME = "mx_rl-registry"
SHARED_NAMESPACE = "mx_rl-shared"
KV_NAMESPACE = b"mx_rl"
GROUPS = {"commands": 512, "waits": 16384}  # one group for both lets waits block every command, the commit among them
TICK_S = 0.25
MAX_TICKS_PER_S = 4000
RETRY_S = (0.05, 0.5)


class RegistryActor:
    """Runs in the actor's process. Ray gives each concurrency group an event loop on a thread of its own."""

    def __init__(self, scope: str, lease_s: float, grace_max_s: float, settle_s: float) -> None:
        from ray.experimental import internal_kv

        self._me = _ray().get_runtime_context().current_actor
        self._prefix = f"floor:{scope}:".encode()
        self._mark = f"lives:{scope}".encode()
        self._lock = threading.Lock()
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._waits = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = False
        self._state = State(
            secrets.randbits(63),
            saved=self._load(),
            lease_s=lease_s,
            grace_max_s=grace_max_s,
            settle_s=settle_s if internal_kv._internal_kv_exists(self._mark, namespace=KV_NAMESPACE) else 0.0,
        )
        # Taken away by ``_tend`` only: where it is found, another process served members until it died.
        internal_kv._internal_kv_put(self._mark, b"1", overwrite=True, namespace=KV_NAMESPACE)
        threading.Thread(target=self._tend, name="mx_rl-registry-sweep", daemon=True).start()

    async def run(self, data: bytes) -> bytes:
        command = self._decode(data)
        if isinstance(command, bytes):
            return command
        answer = self._apply(command, final=True, again=False)
        assert answer is not None, "a command whose wait is over is always answered"
        return answer

    async def wait(self, data: bytes) -> bytes:
        command = self._decode(data)
        if isinstance(command, bytes):
            return command
        deadline = time.monotonic() + command.wait
        self._loop = asyncio.get_running_loop()
        event = asyncio.Event()
        self._waiting.setdefault(command.policy, set()).add(event)
        self._waits += 1
        again = False
        try:
            while True:
                event.clear()
                final = time.monotonic() >= deadline
                answer = self._apply(command, final=final, again=again)
                if answer is not None:
                    return answer
                again = True
                tick = max(TICK_S, self._waits / MAX_TICKS_PER_S)
                await _set_within(event, min(tick, max(deadline - time.monotonic(), 0.0)))
        finally:
            self._waits -= 1
            waiting = self._waiting[command.policy]
            waiting.discard(event)
            if not waiting:
                del self._waiting[command.policy]

    async def forget(self, policy: str) -> bool:
        from ray.experimental import internal_kv

        with self._lock:
            forgotten = self._state.forget(policy, time.time())
            if forgotten:
                internal_kv._internal_kv_del(self._prefix + policy.encode(), namespace=KV_NAMESPACE)
        return forgotten

    def _apply(self, command: AnyCommand, *, final: bool, again: bool) -> bytes | None:
        with self._lock:
            if self._ending:
                raise RegistryLost("this registry is ending, since nobody uses it: connect again")
            before = self._state.changes(command.policy)
            answer = apply(self._state, command, time.time(), final=final, again=again)
            if self._state.unsaved:
                self._save()
            changed = self._state.changes(command.policy) != before
        if changed and self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake, command.policy)
        return encode(answer) if answer is not None else None

    def _wake(self, policy: str) -> None:
        for event in self._waiting.get(policy, ()):
            event.set()

    def _decode(self, data: bytes) -> Any:
        """The command, or the bytes of a refusal of what is none."""
        try:
            return decode(data, AnyCommand)
        except CorruptRecord as exc:
            refusal = Refused(error="CorruptRecord", message=str(exc), fields=exc.fields)
            return encode(Answer(boot=self._state.boot, floor=0, result=refusal))

    def _load(self) -> dict[str, Saved]:
        from ray.experimental import internal_kv

        keys = internal_kv._internal_kv_list(self._prefix, namespace=KV_NAMESPACE)
        values = {key: internal_kv._internal_kv_get(key, namespace=KV_NAMESPACE) for key in keys}
        return {key[len(self._prefix) :].decode(): decode(value, Saved) for key, value in values.items() if value}

    def _save(self) -> None:
        """Under the lock and before any answer: no member ever hears of a READY version that the KV has not."""
        from ray.experimental import internal_kv

        for policy, saved in list(self._state.unsaved.items()):
            key = self._prefix + policy.encode()
            internal_kv._internal_kv_put(key, encode(saved), overwrite=True, namespace=KV_NAMESPACE)
            del self._state.unsaved[policy]

    def _tend(self) -> None:
        """Sweep; and one lease after the last member left, end the actor for good."""
        from ray.experimental import internal_kv

        while not self._ending:
            time.sleep(1.0)
            with self._lock:
                self._state.sweep(time.time())
                self._ending = self._state.idle_s() > self._state.rules.lease_s
        internal_kv._internal_kv_del(self._mark, namespace=KV_NAMESPACE)
        # ray.actor.exit_actor hangs where concurrency groups have event loops of their own (ray 2.60).
        _ray().kill(self._me, no_restart=True)


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Until the event is set, or the time is over."""
    loop = asyncio.get_running_loop()
    timer = loop.call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


class RayRegistry(Registry):
    """``"ray"``: one registry a Ray job; ``"ray://name"``: one that jobs of a cluster share under this name.

    Works from the driver, from tasks and actors, and from any thread there; in an async actor call it off the event
    loop, which it blocks. The actor ends itself one lease after its last member left; its floors stay (``forget``).
    """

    def __init__(self, url: str = "ray", *, options: Options | None = None) -> None:
        scheme, _, name = url.partition("://")
        if scheme != "ray" or (not name and url != "ray") or "/" in name:
            raise InvalidArgument(f'registry {url!r}: "ray" or "ray://name"')
        self.url = url
        self._name = name
        self._options = options or Options()
        self._actor: Any = None
        self._lock = threading.Lock()

    def call(self, command: AnyCommand, *, timeout: float) -> Answer:
        began = time.monotonic()

        def send(actor: Any, remaining: float) -> Any:
            # Sent again late in its time, it must be answered, if only by "not yet", before the time is over.
            margin = min(1.0, remaining / 5)
            left = max(min(command.wait - (time.monotonic() - began), remaining - margin), 0.0)
            data = encode(msgspec.structs.replace(command, wait=left))
            if command.wait > 0:
                return actor.wait.options(concurrency_group="waits").remote(data)
            return actor.run.options(concurrency_group="commands").remote(data)

        answer: Answer = decode(self._ask(type(command).__name__, send, timeout), Answer)
        return answer

    def forget(self, policy: str, *, timeout: float = 10.0) -> bool:
        """Remove a policy and its floor: its next version is 1. False (and nothing done) while members live."""

        def send(actor: Any, remaining: float) -> Any:
            return actor.forget.options(concurrency_group="commands").remote(policy)

        return bool(self._ask("forget", send, timeout))

    def close(self) -> None:
        """Drop the handle. The actor goes on for the others, and ends itself when there are none."""
        with self._lock:
            self._actor = None

    def _ask(self, what: str, send: Any, timeout: float) -> Any:
        """Send, and send again, until there is an answer or the time is over."""
        ray = _ray()
        deadline = time.monotonic() + timeout
        pause, longest = RETRY_S
        problem: BaseException | None = None
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                return ray.get(send(self._connect(), remaining), timeout=max(deadline - time.monotonic(), 0.001))
            except ray.exceptions.GetTimeoutError as exc:
                problem = exc
                break
            except (ray.exceptions.RayError, ValueError) as exc:
                # Dead, restarting, ending, or the KV did not take the floor: what was done is done again, harmlessly.
                problem = exc
                self.close()
            time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))
            pause = min(pause * 2, longest)
        raise RegistryLost(
            f"registry {self.url!r} (Ray actor {self._name or DEFAULT_NAME!r} in namespace {self.namespace()!r}): no answer "
            f"to {what} within {timeout:.1f} s: {problem or 'no time was given'}. Nothing is known of what it did; ask again"
        ) from problem

    def namespace(self) -> str:
        """Always explicit: in an anonymous namespace no other job, and no later driver, would find the actor."""
        if self._name:
            return SHARED_NAMESPACE
        context = _ray().get_runtime_context()
        return context.namespace if _is_named(context.namespace) else f"mx_rl-{context.get_job_id()}"

    def _connect(self) -> Any:
        ray = _ray()
        with self._lock:
            if self._actor is not None:
                return self._actor
            namespace, name = self.namespace(), self._name or DEFAULT_NAME
            options = self._options
            actor_class = ray.remote(concurrency_groups=GROUPS)(RegistryActor)
            self._actor = actor_class.options(
                name=name,
                namespace=namespace,
                lifetime="detached",  # else it dies for good with the process that made it
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=0,
                resources={"node:__internal_head__": 0.001},
            ).remote(f"{namespace}:{name}", options.lease_s, options.grace_max_s, 2 * options.beat_s)
            return self._actor


def _is_named(namespace: str | None) -> bool:
    """Ray names the namespace of a job that gave none by a UUID."""
    if not namespace:
        return False
    try:
        uuid.UUID(namespace)
    except ValueError:
        return True
    return False


def _ray() -> Any:
    try:
        import ray
    except ImportError as exc:
        raise missing_extra("ray", "ray") from exc
    if not ray.is_initialized():
        raise InvalidArgument('registry "ray": Ray is not up in this process; call ray.init() first')
    return ray
