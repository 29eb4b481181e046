"""Headers: one word, one store; blocks: aligned, touched, apart."""

import ctypes
import itertools

from mx_rl.arena import CLOSED, HUGE_PAGE, Arena, unpack


def _word(arena: Arena, block: int) -> int:
    return ctypes.c_uint64.from_address(arena.headers[block].address + 8).value


def test_a_header_counts_windows_of_one_generation_and_starts_again_with_the_next():
    arena = Arena(2, 1 << 20, nonce=77)
    header = arena.headers[1]
    assert header.begin() == 1
    header.confirm(9)
    assert unpack(_word(arena, 1)) == (1, 9)
    assert header.begin() == 2
    assert unpack(_word(arena, 1)) == (2, 0), "a new generation never shows the old count"
    assert unpack(_word(arena, 0)) == (0, 0)


def test_a_closed_header_says_so_whatever_it_was():
    arena = Arena(1, 4096, nonce=1)
    arena.headers[0].begin()
    arena.close()
    assert _word(arena, 0) == CLOSED
    assert arena.headers[0].closed


def test_blocks_are_apart_aligned_and_inside_the_one_region():
    arena = Arena(3, (2 << 20) + 5, nonce=1)
    (region,) = arena.regions()
    assert region.address % HUGE_PAGE == 0
    records = arena.records()
    for one, two in itertools.pairwise(records):
        assert one.address + one.nbytes <= two.address
    for record, block in zip(records, arena.blocks, strict=True):
        assert record.address == block.data_ptr()
        assert block.numel() == record.nbytes
        assert region.address <= record.address
        assert record.header + 64 <= region.address + region.nbytes


def test_an_empty_block_is_fine():
    arena = Arena(2, 0, nonce=1)
    assert arena.blocks[0].numel() == 0


def test_an_arena_is_private_memory_since_shared_memory_gets_no_huge_pages():
    arena = Arena(1, 4 * HUGE_PAGE, nonce=1)
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, permissions = line.split()[:2]
            low, high = (int(end, 16) for end in span.split("-"))
            if low <= arena.address(0) < high:
                assert permissions == "rw-p"
                return
    raise AssertionError("the arena is in no mapping")
