"""Where a version waits and what peers read, in every combination: whole versions, bit for bit, and who serves whom."""

from functools import partial

import pytest
import torch

from mx_rl import Shard
from mx_rl.errors import AliasConflict, InvalidArgument, Tainted
from tests.support.local import steady_publisher as publisher
from tests.support.local import steady_subscriber as subscriber
from tests.support.local import together

MODES = [
    {"stage": "device", "serve": "stage"},
    {"stage": "device", "serve": "live"},
    {"stage": "device", "serve": "off"},
    {"stage": "host", "serve": "stage"},
    {"stage": "host", "serve": "live"},
    {"stage": "none", "serve": "live"},
    {"stage": "none", "serve": "off"},
    {"stage": "device", "serve": "stage", "swap": True},
    {"stage": "host", "serve": "off", "swap": True},
]
DISTINCT = [mode for mode in MODES if mode["stage"] != "host"]  # without a GPU "host" is "device"
IDS = ["-".join(str(value) for value in mode.values()) for mode in MODES]


@pytest.fixture(params=MODES, ids=IDS)
def mode(request):
    return request.param


class Net(torch.nn.Module):
    """Odd sizes, a tied weight, a buffer, a transposed parameter and one that is a view of another tensor."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(37, 50)
        self.norm = torch.nn.Parameter(torch.randn(7))
        self.wide = torch.nn.Parameter(torch.randn(60, 33).t())
        self.fused = torch.randn(90, 40)
        self.up = torch.nn.Parameter(self.fused[:50, 3:])
        self.head = torch.nn.Linear(50, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.randint(0, 100, (11,)))
        self.register_buffer("empty", torch.zeros(0, 3))


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def change(module):
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.randn(tensor.shape) * 50)


def assert_same(one, two):
    for name, tensor in one.state_dict().items():
        assert torch.equal(bits(tensor), bits(two.state_dict()[name])), name


def test_every_mode_installs_version_after_version_bit_for_bit_and_serves_its_peers(registry, mode):
    source, first, second = Net(0), Net(1), Net(2)
    with (
        publisher(registry, source) as pub,
        subscriber(registry, first, **mode) as one,
        subscriber(registry, second, sources=("peer", "trainer"), **mode) as two,
    ):
        for _ in range(5):
            change(source)
            number = pub.publish().number
            assert one.sync(at_least=number, timeout=10).version == number
            assert_same(source, first)
            report = two.sync(at_least=number, timeout=10)
            assert_same(source, second)
            served = {"trainer:0"} if mode["serve"] == "off" else {f"peer:{one.replica}"}
            assert set(report.served_by) == served
            assert report.refused == {}
            assert_same(source, first)


@pytest.mark.parametrize("holder", [mode for mode in DISTINCT if mode["serve"] != "off"], ids=str)
@pytest.mark.parametrize("reader", DISTINCT, ids=str)
def test_a_reader_of_any_mode_reads_from_a_holder_of_any_mode(registry, holder, reader):
    source, first, second = Net(0), Net(1), Net(2)
    with (
        publisher(registry, source) as pub,
        subscriber(registry, first, **holder) as one,
        subscriber(registry, second, sources=("peer",), **reader) as two,
    ):
        pub.publish()
        one.sync(timeout=10)
        assert set(two.sync(timeout=10).served_by) == {f"peer:{one.replica}"}
        assert_same(source, second)


def test_ranks_that_are_cut_otherwise_are_filled_in_every_mode(registry, mode):
    """Two trainer ranks cut by rows, two rollout ranks by columns of one fused tensor."""
    whole = {"a": torch.randn(30, 64), "b": torch.randn(18, 64), "c": torch.randn(5)}

    def rows(rank):
        return {
            name: Shard(
                tensor[rank * (len(tensor) // 2) : len(tensor) if rank else len(tensor) // 2],
                shape=tensor.shape,
                offset=(rank * (len(tensor) // 2), *[0] * (tensor.dim() - 1)),
            )
            for name, tensor in whole.items()
        }

    fused = [torch.zeros(48, 32) for _ in range(2)]
    small = [torch.zeros(5) for _ in range(2)]

    def columns(rank):
        return {
            "a": Shard(fused[rank][:30], shape=(30, 64), offset=(0, 32 * rank)),
            "b": Shard(fused[rank][30:], shape=(18, 64), offset=(0, 32 * rank)),
            "c": small[rank],
        }

    pubs = together(*[lambda r=r: publisher(registry, rows(r), rank=r, world_size=2, world="w") for r in (0, 1)])
    subs = [subscriber(registry, columns(r), replica="r", rank=r, world_size=2, **mode) for r in (0, 1)]
    try:
        for _ in range(3):
            for tensor in whole.values():
                tensor.copy_(torch.randn(tensor.shape))
            number = together(*[pub.publish for pub in pubs])[0].number
            reports = together(*[partial(sub.sync, at_least=number, timeout=10) for sub in subs])
            assert [report.version for report in reports] == [number, number]
            for rank in (0, 1):
                assert torch.equal(fused[rank], torch.cat([whole["a"], whole["b"]])[:, 32 * rank : 32 * rank + 32])
                assert torch.equal(small[rank], whole["c"])
    finally:
        together(*[sub.close for sub in subs], *[pub.close for pub in pubs])


def test_two_names_that_want_the_same_bytes_both_get_them(registry, mode):
    weight = torch.randn(64, 32)
    target = {"embed": torch.zeros(64, 32), "head": torch.zeros(64, 32)}
    with (
        publisher(registry, {"embed": weight, "head": weight}) as pub,
        subscriber(registry, target, **mode) as sub,
    ):
        for _ in range(3):
            weight.normal_()
            sub.sync(at_least=pub.publish().number, timeout=10)
            assert torch.equal(target["embed"], weight)
            assert torch.equal(target["head"], weight)


def test_one_storage_for_two_tensors_is_filled_served_and_compared(registry, mode):
    source = {"embed": torch.randn(40, 20), "head": torch.zeros(40, 20)}
    source["head"].copy_(source["embed"])
    tied, again = torch.zeros(40, 20), torch.zeros(40, 20)
    with (
        publisher(registry, source) as pub,
        subscriber(registry, {"embed": tied, "head": tied}, **mode) as one,
        subscriber(registry, {"embed": again, "head": again}, **mode) as two,
    ):
        pub.publish()
        for sub, target in ((one, tied), (two, again)):
            sub.sync(timeout=10)
            assert torch.equal(target, source["embed"])
        source["head"].add_(1)
        pub.wait(pub.publish(), replicas=0)
        if mode["stage"] == "none":
            return  # nothing is staged that could be compared: docs/limits.md
        with pytest.raises(AliasConflict):
            one.sync(timeout=10)
        assert torch.equal(tied, source["embed"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"stage": "none"},
        {"stage": "none", "serve": "stage"},
        {"stage": "none", "serve": "live", "swap": True},
        {"stage": "device", "serve": "live", "swap": True},
        {"stage": "none", "serve": "live", "prefetch": True},
        {"stage": "disk"},
        {"serve": "all"},
    ],
    ids=str,
)
def test_modes_that_do_not_go_together_are_refused_with_what_to_do(registry, wrong):
    with pytest.raises(InvalidArgument, match=r"give|takes"):
        subscriber(registry, {"w": torch.zeros(3)}, **wrong)


def test_nothing_waits_with_stage_none(registry):
    with subscriber(registry, {"w": torch.zeros(3)}, stage="none", serve="off") as sub:
        with pytest.raises(InvalidArgument, match="sync"):
            sub.stage()


def test_memory_in_too_many_pieces_is_refused_at_construction(registry):
    scattered = {"w": torch.zeros(2000, 2000)[:, ::2]}
    for named in ({"stage": "none", "serve": "off"}, {"serve": "live"}):
        with pytest.raises(InvalidArgument, match="contiguous"):
            subscriber(registry, scattered, **named)


def test_a_source_lost_in_mid_move_taints_a_replica_without_a_stage_on_all_ranks_and_the_next_sync_heals(
    registry, faults
):
    source = {"w": torch.arange(64 * 1024, dtype=torch.float32)}
    live = [torch.zeros(64 * 1024) for _ in range(2)]
    pub = publisher(registry, source)
    subs = [
        subscriber(registry, {"w": live[r]}, replica="r", rank=r, world_size=2, stage="none", serve="live")
        for r in (0, 1)
    ]

    def sync(number, timeout):
        return together(*[lambda s=s: s.sync(at_least=number, timeout=timeout) for s in subs])

    try:
        sync(pub.publish().number, 10)
        source["w"].add_(1)
        number = pub.publish().number
        faults.at("p-pub0-", 40, faults.network.lose)
        outcomes = sync(number, 3.0)
        assert [type(outcome) for outcome in outcomes] == [Tainted, Tainted], outcomes
        assert [sub.ready for sub in subs] == [False, False]
        with publisher(registry, source, world="again", rank=0, world_size=1) as successor:
            source["w"].add_(1)
            number = successor.publish().number
            assert [report.version for report in sync(number, 10)] == [number, number]
            assert [sub.ready for sub in subs] == [True, True]
            for tensor in live:
                assert torch.equal(tensor, source["w"])
    finally:
        together(*[sub.close for sub in subs])
        pub.close(timeout=1.0)


@pytest.mark.parametrize("mode", MODES[:2] + MODES[5:8])
def test_an_engine_that_moves_its_storage_in_before_install_gets_the_version_there(registry, mode):
    weight = torch.zeros(5000)
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(weight.clone())

    def wake(old, new):
        module.w.data = torch.full((5000,), -1.0)

    with publisher(registry, {"w": weight}) as pub:
        with subscriber(registry, module, before_install=wake, **mode) as sub:
            for value in (1.0, 2.0):
                weight.fill_(value)
                assert sub.sync(at_least=pub.publish().number, timeout=10).kind == "full"
                assert module.w.eq(value).all(), "what is live now, not what was live before the hook"


def test_what_is_refused_after_before_install_starts_the_engine_again(registry):
    calls, target = [], {"w": torch.zeros(50)}

    def lose(old, new):
        calls.append(("before", old, new))
        target["v"] = target.pop("w")

    def after(old, new):
        calls.append(("after", old, new))

    with publisher(registry, {"w": torch.ones(50)}) as pub:
        version = pub.publish()
        with subscriber(registry, target, before_install=lose, after_install=after) as sub:
            with pytest.raises(InvalidArgument, match="layout"):
                sub.sync(timeout=5)
            assert calls == [("before", None, version.number), ("after", None, None)]
            assert sub._taint is None, "nothing live has changed"
