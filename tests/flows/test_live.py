"""serve="live": what closes reading, tensors that move, and readers that meet an install."""

import pytest
import torch

from mx_rl.errors import PeerLost, Tainted, VersionGone
from mx_rl.tensors import resolve
from tests.support.local import steady_publisher as publisher
from tests.support.local import steady_subscriber as subscriber
from tests.support.until import until

COUNT = 64 * 1024  # float32: 64 windows of 4096 bytes
LIVE = "p-r0-live-"


def weights(value):
    return torch.arange(COUNT, dtype=torch.float32) + value


@pytest.mark.parametrize("stage", ["device", "none"])
def test_a_reader_that_meets_an_install_at_its_peer_goes_to_another_source(registry, faults, stage):
    source, first, second = {"w": weights(1)}, {"w": torch.zeros(COUNT)}, {"w": torch.zeros(COUNT)}
    with (
        publisher(registry, source, slots=3) as pub,
        subscriber(registry, first, stage=stage, serve="live") as peer,
        subscriber(registry, second) as sub,
    ):
        pub.publish()
        peer.sync(timeout=10)

        def install(_agent):
            source["w"].copy_(weights(2))
            pub.wait(pub.publish(), replicas=0, timeout=10)
            peer.sync(timeout=10)

        faults.at(LIVE, 20, install)
        report = sub.sync(timeout=10)
        assert "VersionGone" in report.refused[f"peer:{peer.replica}"]
        assert report.served_by["trainer:0"] > 0
        assert torch.equal(second["w"], weights(report.version))
        assert sub.sync(timeout=10).version == 2
        assert torch.equal(second["w"], weights(2))


def moved(module):
    for tensor in module.parameters():
        tensor.data = tensor.data.clone()


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("stage", ["device", "none"])
def test_storage_that_moved_is_served_from_where_it_lies_after_the_next_install(registry, stage, released):
    source, live = torch.nn.Linear(300, 200), torch.nn.Linear(300, 200)
    with publisher(registry, source) as pub, subscriber(registry, live, stage=stage, serve="live") as peer:
        for turn in range(3):
            with torch.no_grad():
                source.weight.fill_(float(turn))
            number = pub.publish().number
            peer.sync(at_least=number, timeout=10)
            joined = {name: torch.zeros_like(tensor) for name, tensor in source.state_dict().items()}
            with subscriber(registry, joined, sources=("peer",)) as joiner:
                joiner.sync(at_least=number, timeout=10)
                assert joined["weight"].eq(turn).all()
            if released:
                peer.release_live()
                joined["weight"].fill_(-1)
                with subscriber(registry, joined) as joiner:
                    assert set(joiner.sync(at_least=number, timeout=10).served_by) == {"trainer:0"}
                    assert joined["weight"].eq(turn).all()
            moved(live)
        keys = [key for key in registry._state.policies["p"].blobs if key.startswith(LIVE)]
        assert len(keys) <= 2, "records and tables of former addresses are forgotten"


def test_released_memory_is_not_read_even_by_who_was_told_of_it(registry):
    source, first, second = {"w": weights(1)}, {"w": torch.zeros(COUNT)}, {"w": torch.zeros(COUNT)}
    with (
        publisher(registry, source) as pub,
        subscriber(registry, first, serve="live") as peer,
        subscriber(registry, second, sources=("peer",)) as sub,
    ):
        number = pub.publish().number
        peer.sync(timeout=10)
        staged = sub.stage(timeout=10)
        assert staged.version == number
        staged.discard()
        told = peer._staging.live.source
        peer._staging.live.close_reading()
        assert peer._staging.live.source is None
        with pytest.raises((VersionGone, PeerLost)):
            sub.sync(timeout=1.0)
        again = peer._staging.live.reopen(resolve(first))
        assert again.generation > told.generation


def test_a_failed_install_serves_nothing_and_the_next_one_does(registry):
    source, live = {"w": weights(1)}, {"w": torch.zeros(COUNT)}
    broken = [False]

    def after(_old, _new):
        if broken[0]:
            raise RuntimeError("the engine is broken")

    with publisher(registry, source) as pub, subscriber(registry, live, serve="live", after_install=after) as peer:
        pub.publish()
        peer.sync(timeout=10)
        broken[0] = True
        number = pub.publish().number
        with pytest.raises(Tainted, match="broken"):
            peer.sync(at_least=number, timeout=10)
        joined = {"w": torch.zeros(COUNT)}
        with subscriber(registry, joined) as joiner:
            assert set(joiner.sync(at_least=number, timeout=10).served_by) == {"trainer:0"}
        broken[0] = False
        peer.sync(at_least=number, timeout=10)
        with subscriber(registry, joined) as joiner:
            assert set(joiner.sync(timeout=10).served_by) == {f"peer:{peer.replica}"}


@pytest.mark.parametrize("stage", ["device", "none"])
def test_a_pause_closes_live_weights_to_peers_and_a_resume_that_kept_them_opens_them(registry, stage):
    source, live, joined = {"w": weights(1)}, {"w": torch.zeros(COUNT)}, {"w": torch.zeros(COUNT)}

    def served_by(number):
        joined["w"].zero_()
        with subscriber(registry, joined, replica="joiner") as joiner:
            found = set(joiner.sync(at_least=number, timeout=10).served_by)
            assert torch.equal(joined["w"], source["w"])
            return found

    with publisher(registry, source) as pub, subscriber(registry, live, stage=stage, serve="live") as peer:
        number = pub.publish().number
        peer.sync(at_least=number, timeout=10)
        assert served_by(number) == {f"peer:{peer.replica}"}
        peer.pause()
        assert served_by(number) == {"trainer:0"}
        peer.release_live()
        live["w"] = torch.full((COUNT,), -1.0)  # the engine sleeps and gives its memory up
        assert served_by(number) == {"trainer:0"}
        peer.resume(weights_kept=False)
        assert served_by(number) == {"trainer:0"}
        peer.sync(timeout=10)
        assert torch.equal(live["w"], source["w"])
        assert served_by(number) == {f"peer:{peer.replica}"}
        peer.pause()
        peer.resume()
        assert served_by(number) == {f"peer:{peer.replica}"}


def test_prefetch_goes_with_live_serving_and_with_swaps(registry):
    source = torch.nn.Linear(300, 200)
    for mode in ({"serve": "live"}, {"swap": True}, {"swap": True, "serve": "off"}):
        live, joined = torch.nn.Linear(300, 200), torch.nn.Linear(300, 200)
        with publisher(registry, source) as pub, subscriber(registry, live, prefetch=True, **mode) as peer:
            for value in range(4):
                with torch.no_grad():
                    source.weight.fill_(float(value))
                number = pub.publish().number
                until(lambda wanted=number: peer.staged == wanted)
                if value:  # what is installed stays what peers read while the next version waits
                    assert live.weight.eq(value - 1).all()
                assert peer.sync(at_least=number, timeout=10).version == number
                assert live.weight.eq(value).all()
            with subscriber(registry, joined) as joiner:
                wanted = {"trainer:0"} if mode.get("serve") == "off" else {f"peer:{peer.replica}"}
                assert set(joiner.sync(at_least=number, timeout=10).served_by) == wanted
                assert joined.weight.eq(value).all()
