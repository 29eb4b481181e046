// The kernels of base.py for CUDA. Tables are rows of 64-bit integers, memory is named by address, as on CPUs.
// One block of threads works on one block of 2^16 elements (or one entry, or one run). No header is included: NVRTC has
// none, and tests compile this file as C++ beside a shim that stands for the threads.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum { LIVE, STEP, SLOT, COUNT, POSITION, UNIT, KIND, RUN_COLUMNS };
enum { LO, LENGTH, WIDTH, BLOCK_COLUMNS };
enum { E_BLOCK, E_COUNT, E_DENSE, E_INDEX, E_VALUE, E_FIRST, E_LAST, ENTRY_COLUMNS };
enum { CHECK, WRITE, GATHER, WEIGH };

#define DENSE 0xFFFF
#define FULL 0xFFFFFFFFu
#define WARPS 8
#define THREADS (32 * WARPS)

// ---- digest: kernels/reference.py

__device__ u64 term(u64 word, u64 k) {
    u64 mixed = (k + 1) * 0x9E3779B97F4A7C15ull;
    mixed = (mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93ull;
    mixed ^= mixed >> 29;
    u64 turned = (mixed << 23) | (mixed >> 41);
    return (word & 0xFFFFFFFFull) * (mixed | 1) + (word >> 32) * (turned | 1);
}

__device__ u64 value_term(u64 value, i64 element, int width) {
    i64 place = element * width;
    return term(value << (8 * (place & 7)), (u64)(place >> 3));
}

// ---- casts: cpu_casts.py; NaNs are made by hand, since the hardware's differ from those of x86

__device__ u32 bits_of(float value) {
    union { float f; u32 u; } both;
    both.f = value;
    return both.u;
}

__device__ float float_of(u32 bits) {
    union { float f; u32 u; } both;
    both.u = bits;
    return both.f;
}

__device__ u64 bits_of64(double value) {
    union { double f; u64 u; } both;
    both.f = value;
    return both.u;
}

__device__ double double_of(u64 bits) {
    union { double f; u64 u; } both;
    both.u = bits;
    return both.f;
}

__device__ u32 f32_of_f16(u32 half) {
    u32 size = half & 0x7FFF, sign = (half & 0x8000) << 16;
    if (size > 0x7C00) return sign | 0x7FC00000 | (size << 13);
    if (size == 0x7C00) return sign | 0x7F800000;
    if (size < 0x400) return sign | bits_of((float)(int)size * float_of(0x33800000));
    return sign | ((size << 13) + 0x38000000);
}

__device__ u32 f32_of_f64(u64 bits) {
    u64 size = bits & 0x7FFFFFFFFFFFFFFFull;
    if (size > 0x7FF0000000000000ull) return (u32)(bits >> 32 & 0x80000000u) | 0x7FC00000 | (u32)(size >> 29 & 0x3FFFFF);
    return bits_of((float)double_of(bits));
}

__device__ u64 f64_of_f32(u32 bits) {
    u32 size = bits & 0x7FFFFFFF;
    if (size > 0x7F800000)
        return (u64)(bits & 0x80000000u) << 32 | 0x7FF8000000000000ull | (u64)(size & 0x7FFFFF) << 29;
    return bits_of64((double)float_of(bits));
}

__device__ u32 bf16_of_f32(u32 bits) {
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0xFFFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

__device__ u32 f16_of_f32(u32 bits) {
    u32 size = bits & 0x7FFFFFFF, sign = bits >> 16 & 0x8000;
    if (size > 0x7F800000) return sign | 0x7E00 | (size >> 13 & 0x3FF);
    if (size >= 0x47800000) return sign | 0x7C00;
    if (size < 0x38800000) return sign | (bits_of(float_of(size) + 0.5f) - 0x3F000000);
    return sign | ((size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13);
}

// By code: 0 to 3 are copies of 1, 2, 4, 8 bytes, then f16, bf16, f32, f64.
__device__ int width_of(int code) { return code < 4 ? 1 << code : code < 6 ? 2 : code == 6 ? 4 : 8; }

__device__ u64 load(i64 address, i64 index, int width) {
    if (width == 1) return ((const u8 *)address)[index];
    if (width == 2) return ((const u16 *)address)[index];
    if (width == 4) return ((const u32 *)address)[index];
    return ((const u64 *)address)[index];
}

__device__ void store(i64 address, i64 index, int width, u64 value) {
    if (width == 1) ((u8 *)address)[index] = (u8)value;
    else if (width == 2) ((u16 *)address)[index] = (u16)value;
    else if (width == 4) ((u32 *)address)[index] = (u32)value;
    else ((u64 *)address)[index] = value;
}

__device__ u64 cast(u64 value, int live, int wire) {
    if (live == wire) return value;
    if (live == 4 && wire == 5 && (value & 0x7FFF) > 0x7C00) return 0x7FC0;
    u32 single = live == 4 ? f32_of_f16((u32)value) : live == 5 ? (u32)value << 16 : live == 6 ? (u32)value : f32_of_f64(value);
    if (wire == 4) return f16_of_f32(single);
    if (wire == 5) return bf16_of_f32(single);
    if (wire == 6) return single;
    return f64_of_f32(single);
}

// ---- what a block of threads does together

__device__ u64 sum_of_warp(u64 value) {
    for (int step = 16; step; step >>= 1) value += __shfl_down_sync(FULL, value, step);
    return value;
}

__device__ i64 least(i64 a, i64 b) { return a < b ? a : b; }
__device__ i64 most(i64 a, i64 b) { return a > b ? a : b; }
__device__ i64 pad8(i64 nbytes) { return (nbytes + 7) & ~7ll; }
__device__ i64 most_listed(i64 length, i64 width) { return least(length * width / (2 + width), DENSE - 1); }

// Copy and cast the runs of one block into the slot, add digests, and list what differs from the base, if there is one:
// into room for ``room`` changes of ``widest`` bytes a block, that of this launch's first block first. Launched with THREADS threads a block;
// ranges: rows (first run, behind the last) by block.
extern "C" __global__ void mx_diff(
    const i64 *runs, const i64 *blocks, const i64 *ranges, i64 slot, i64 base_slot, u64 *sums, u16 *counts,
    u16 *index, u8 *values, u8 *olds, i64 room, i64 widest) {
    __shared__ int ahead[WARPS];
    __shared__ int total;
    const i64 *block = blocks + (i64)blockIdx.x * BLOCK_COLUMNS;
    const i64 lo = block[LO], width = block[WIDTH], limit = most_listed(block[LENGTH], width);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    index += (i64)blockIdx.x * room;
    values += (i64)blockIdx.x * room * widest;
    olds += (i64)blockIdx.x * room * widest;
    i64 found = 0;
    for (i64 row = ranges[2 * (i64)blockIdx.x]; row < ranges[2 * (i64)blockIdx.x + 1]; row++) {
        const i64 *run = runs + row * RUN_COLUMNS;
        const int live = (int)(run[KIND] >> 3), wire = (int)(run[KIND] & 7);
        const i64 first = (run[SLOT] - lo) / width;  // may lie before the block
        const i64 begin = most(first, 0), end = least(first + run[COUNT], block[LENGTH]);
        u64 sum = 0;
        for (i64 tile = begin; tile < end; tile += blockDim.x) {
            const i64 element = tile + threadIdx.x;
            u64 value = 0, old = 0;
            bool differs = false;
            if (element < end) {
                const i64 at = element - first;
                value = cast(load(run[LIVE], at * run[STEP], width_of(live)), live, wire);
                if (run[UNIT] >= 0) sum += value_term(value, run[POSITION] + at, (int)width);
                if (base_slot) {
                    old = load(base_slot + lo, element, (int)width);
                    differs = old != value;
                }
                store(slot + lo, element, (int)width, value);
            }
            if (!base_slot) continue;
            const u32 mask = __ballot_sync(FULL, differs);
            if (lane == 0) ahead[warp] = __popc(mask);
            __syncthreads();
            if (threadIdx.x == 0) {
                int sofar = 0;
                for (int w = 0; w < WARPS; w++) {
                    int count = ahead[w];
                    ahead[w] = sofar;
                    sofar += count;
                }
                total = sofar;
            }
            __syncthreads();
            const i64 place = found + ahead[warp] + __popc(mask & ((1u << lane) - 1));
            if (differs && place < room) {
                index[place] = (u16)element;
                store((i64)values, place, (int)width, value);
                store((i64)olds, place, (int)width, old);
            }
            found += total;
            __syncthreads();
        }
        sum = sum_of_warp(sum);
        if (lane == 0 && run[UNIT] >= 0 && sum) atomicAdd(sums + run[UNIT], sum);
    }
    if (threadIdx.x == 0 && base_slot) counts[blockIdx.x] = found <= limit ? (u16)found : (u16)DENSE;
}

// Give the blocks of one launch their places in the payload, behind those of the launches before: one thread does.
// cursor: bytes used, and whether everything fitted so far; places: by block.
extern "C" __global__ void mx_place(
    const i64 *blocks, const u16 *counts, i64 num_blocks, i64 room, i64 *cursor, i64 *places) {
    if (threadIdx.x) return;
    for (i64 i = 0; i < num_blocks; i++) {
        const i64 *block = blocks + i * BLOCK_COLUMNS;
        const bool dense = counts[i] == DENSE;
        const i64 value_bytes = pad8((dense ? block[LENGTH] : counts[i]) * block[WIDTH]);
        const i64 nbytes = value_bytes + (dense ? 0 : pad8(2 * (i64)counts[i]));
        places[i] = cursor[0];
        if (cursor[1] && cursor[0] + nbytes <= room) cursor[0] += nbytes;
        else cursor[1] = 0;
    }
}

// Move what mx_diff listed to those places. Blocks that found no room are left out.
extern "C" __global__ void mx_collect(
    const i64 *blocks, const u16 *counts, const i64 *cursor, const i64 *places, i64 slot, i64 base_slot,
    const u16 *index, const u8 *values, const u8 *olds, i64 room, i64 widest, u8 *payload, u8 *old) {
    const i64 *block = blocks + (i64)blockIdx.x * BLOCK_COLUMNS;
    const int width = (int)block[WIDTH];
    const bool dense = counts[blockIdx.x] == DENSE;
    const i64 count = dense ? block[LENGTH] : counts[blockIdx.x];
    if (!cursor[1]) return;
    const i64 at = (i64)payload + places[blockIdx.x], skip = dense ? 0 : pad8(2 * count);
    const i64 listed = dense ? slot + block[LO] : (i64)(values + (i64)blockIdx.x * room * widest);
    const i64 before = dense ? base_slot + block[LO] : (i64)(olds + (i64)blockIdx.x * room * widest);
    const i64 at_old = (i64)old + places[blockIdx.x] + skip;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) {
        if (!dense) store(at, i, 2, index[(i64)blockIdx.x * room + i]);
        store(at + skip, i, width, load(listed, i, width));
        store(at_old, i, width, load(before, i, width));
    }
}

__device__ i64 at_least(const u16 *index, i64 count, i64 bound) {
    i64 begin = 0, end = count;
    while (begin < end) {
        const i64 middle = (begin + end) >> 1;
        if (index[middle] < bound) begin = middle + 1;
        else end = middle;
    }
    return begin;
}

// Check, write, gather or weigh one entry a block of threads.
extern "C" __global__ void mx_patch(
    i64 mode, const i64 *entries, const i64 *blocks, const u8 *payload, const i64 *runs, u64 *sums_old, u64 *sums_new,
    u8 *old) {
    const i64 *entry = entries + (i64)blockIdx.x * ENTRY_COLUMNS, *block = blocks + entry[E_BLOCK] * BLOCK_COLUMNS;
    const i64 count = entry[E_COUNT], values = (i64)payload + entry[E_VALUE];
    const bool dense = entry[E_DENSE] != 0;
    const int width = (int)block[WIDTH];
    const u16 *index = (const u16 *)(payload + entry[E_INDEX]);
    for (i64 turn = 0; turn < entry[E_LAST] - entry[E_FIRST]; turn++) {
        // Backwards where they are read: of several runs over one element, the first is read last and stays.
        const i64 *run = runs + (mode == GATHER ? entry[E_LAST] - 1 - turn : entry[E_FIRST] + turn) * RUN_COLUMNS;
        const i64 first = (run[SLOT] - block[LO]) / width;
        const i64 lowest = most(first, 0), highest = most(first + run[COUNT], 0);
        const i64 begin = dense ? least(lowest, count) : at_least(index, count, lowest);
        const i64 end = dense ? least(highest, count) : at_least(index, count, highest);
        u64 was = 0, will = 0;
        for (i64 j = begin + threadIdx.x; j < end; j += blockDim.x) {
            const i64 element = (dense ? j : (i64)index[j]) - first, at = element * run[STEP];
            if (mode == WRITE) store(run[LIVE], at, width, load(values, j, width));
            if (mode == GATHER) store((i64)old + entry[E_VALUE], j, width, load(run[LIVE], at, width));
            if (mode == CHECK && run[UNIT] >= 0) {
                was += value_term(load(run[LIVE], at, width), run[POSITION] + element, width);
                will += value_term(load(values, j, width), run[POSITION] + element, width);
            }
            if (mode == WEIGH && run[UNIT] >= 0) {
                was += value_term(load((i64)old + entry[E_VALUE], j, width), run[POSITION] + element, width);
                will += value_term(load(values, j, width), run[POSITION] + element, width);
            }
        }
        if (mode == GATHER) __syncthreads();
        if ((mode != CHECK && mode != WEIGH) || run[UNIT] < 0) continue;
        was = sum_of_warp(was);
        will = sum_of_warp(will);
        if ((threadIdx.x & 31) == 0) {
            if (was) atomicAdd(sums_old + run[UNIT], was);
            if (will) atomicAdd(sums_new + run[UNIT], will);
        }
    }
}

// The least row whose indices are not ascending below the length of its block: left as it was where none is.
extern "C" __global__ void mx_disorder(const i64 *entries, const i64 *blocks, const u8 *payload, i64 *row) {
    const i64 *entry = entries + (i64)blockIdx.x * ENTRY_COLUMNS;
    const i64 count = entry[E_COUNT], length = blocks[entry[E_BLOCK] * BLOCK_COLUMNS + LENGTH];
    const u16 *index = (const u16 *)(payload + entry[E_INDEX]);
    bool wrong = entry[E_DENSE] && count > length;
    for (i64 j = threadIdx.x; j < count && !entry[E_DENSE]; j += blockDim.x)
        wrong |= index[j] >= length || (j && index[j] <= index[j - 1]);
    if (wrong) atomicMin(row, (i64)blockIdx.x);
}

// Copy runs from the stage to live memory; the blocks of threads share them out.
extern "C" __global__ void mx_scatter(const i64 *runs, i64 num_runs, i64 stage) {
    for (i64 row = blockIdx.x; row < num_runs; row += gridDim.x) {
        const i64 *run = runs + row * RUN_COLUMNS;
        const int width = width_of((int)(run[KIND] & 7));
        for (i64 i = threadIdx.x; i < run[COUNT]; i += blockDim.x)
            store(run[LIVE], i * run[STEP], width, load(stage + run[SLOT], i, width));
    }
}
