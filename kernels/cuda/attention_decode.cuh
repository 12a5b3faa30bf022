// What a block of decode attention holds, and where: pieces of K and V as they are stored and as the
// tensor cores take them, rows of q, the warps' sums, and what is copied ahead.
#pragma once
#include "attention.cuh"

namespace tutti {
namespace {

constexpr uint32_t WARPS = 4;
constexpr uint32_t TILE = 16;

// 8 elements of K or V as they are stored.
template <class Kv>
struct Stored;
template <>
struct Stored<tutti_bf16> {
    using Piece = uint4;
    static constexpr bool IS_FP8 = false;
};
template <>
struct Stored<tutti_fp8> {
    using Piece = uint2;
    static constexpr bool IS_FP8 = true;
};

// 8 dims of a token, as bf16.
__device__ __forceinline__ uint4 eight(const uint4& piece) { return piece; }
__device__ __forceinline__ uint4 eight(const uint2& piece) { return widen(piece); }

__device__ __forceinline__ void copy_piece(uint4* to, const tutti_bf16* from, bool valid) {
    copy_async(to, from, valid);
}
__device__ __forceinline__ void copy_piece(uint2* to, const tutti_fp8* from, bool valid) {
    copy_async_8(to, from, valid);
}

__device__ __forceinline__ void make_zero(uint4& piece) { piece = make_uint4(0, 0, 0, 0); }
__device__ __forceinline__ void make_zero(uint2& piece) { piece.x = piece.y = 0; }

// Which tokens have NaN in FP8: see `nans_of`. NaN in bf16 makes its own way.
__device__ __forceinline__ uint32_t nans_in(const uint4&) { return 0; }
__device__ __forceinline__ uint32_t nans_in(const uint2& piece) { return nans_of(piece); }

// A permuted row of HEAD_DIM: each lane has 8 of every 32 dims, and (bf16 only) 4 of the last 16
// dims if HEAD_DIM is not a multiple of 32.
template <int HEAD_DIM, class Kv = tutti_bf16>
struct Row {
    static constexpr int FULL = HEAD_DIM / 32;
    static constexpr int REST = HEAD_DIM % 32 / 16;
    static_assert(REST == 0 || !Stored<Kv>::IS_FP8, "whole pieces of FP8");
    typename Stored<Kv>::Piece full[FULL > 0 ? FULL : 1];
    uint2 rest;

    __device__ __forceinline__ void load(const Kv* row, uint32_t t) {
#pragma unroll
        for (int i = 0; i < FULL; i++) {
            full[i] = load_once(row + 32 * i + 8 * t);
        }
        if (REST != 0) {
            rest = *reinterpret_cast<const uint2*>(row + 32 * FULL + 4 * t);
        }
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < FULL; i++) {
            full[i] = make_uint4(0, 0, 0, 0);
        }
        rest.x = rest.y = 0;
    }
};

// c += products of 32 dims of rows g and g + 8 of q with a token's K.
__device__ __forceinline__ void add_scores(float (&c)[4], uint4 upper, uint4 lower, uint4 k) {
    const uint32_t even[4] = {upper.x, lower.x, upper.y, lower.y};
    const uint32_t odd[4] = {upper.z, lower.z, upper.w, lower.w};
    mma_bf16(c, even, k.x, k.y);
    mma_bf16(c, odd, k.z, k.w);
}

// The rows of q of a block, with zeros if there are fewer than 16.
template <int HEAD_DIM, bool IN_REGISTERS = HEAD_DIM <= 128>
struct Queries {
    Row<HEAD_DIM> upper;
    Row<HEAD_DIM> lower;

    __device__ __forceinline__ Queries(const tutti_bf16* q, uint32_t heads) {
        const uint32_t g = threadIdx.x % 32 / 4;
        const uint32_t t = threadIdx.x % 4;
        upper.clear();
        lower.clear();
        if (g < heads) {
            upper.load(q + g * HEAD_DIM, t);
        }
        if (g + 8 < heads) {
            lower.load(q + (g + 8) * HEAD_DIM, t);
        }
    }
    template <class Kv>
    __device__ __forceinline__ void add_scores(float (&c)[2][4],
                                               const Row<HEAD_DIM, Kv> (&k)[2]) const {
#pragma unroll
        for (int part = 0; part < 2; part++) {
#pragma unroll
            for (int i = 0; i < Row<HEAD_DIM>::FULL; i++) {
                tutti::add_scores(c[part], upper.full[i], lower.full[i], eight(k[part].full[i]));
            }
            if (Row<HEAD_DIM>::REST != 0) {
                const uint32_t a[4] = {upper.rest.x, lower.rest.x, upper.rest.y, lower.rest.y};
                mma_bf16(c[part], a, k[part].rest.x, k[part].rest.y);
            }
        }
    }
};

// In shared memory, in the order of the lanes: 16 bytes that a warp reads at once are contiguous.
template <int HEAD_DIM>
struct Queries<HEAD_DIM, false> {
    static constexpr int FULL = Row<HEAD_DIM>::FULL;
    static_assert(Row<HEAD_DIM>::REST == 0, "whole pieces of 32 dims");
    const uint4* own;

    __device__ __forceinline__ Queries(const tutti_bf16* q, uint32_t heads) {
        SHARED_ARRAY(uint4, all, FULL * 2 * 32);
        for (uint32_t at = threadIdx.x; at < FULL * 2 * 32; at += WARPS * 32) {
            const uint32_t lane = at % 32;
            const uint32_t head = lane / 4 + at / 32 % 2 * 8;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (head < heads) {
                v = load_once(q + head * HEAD_DIM + at / 64 * 32 + lane % 4 * 8);
            }
            all[at] = v;
        }
        __syncthreads();
        own = all + threadIdx.x % 32;
    }
    template <class Kv>
    __device__ __forceinline__ void add_scores(float (&c)[2][4],
                                               const Row<HEAD_DIM, Kv> (&k)[2]) const {
#pragma unroll
        for (int i = 0; i < FULL; i++) {
            const uint4 upper = own[2 * i * 32];
            const uint4 lower = own[(2 * i + 1) * 32];
            tutti::add_scores(c[0], upper, lower, eight(k[0].full[i]));
            tutti::add_scores(c[1], upper, lower, eight(k[1].full[i]));
        }
    }
};

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
    return i == 0 ? v.x : (i == 1 ? v.y : (i == 2 ? v.z : v.w));
}

// Dim j (0 to 7) of two tokens, as a pair of bf16.
__device__ __forceinline__ uint32_t pair_of(const uint4& first, const uint4& second, int j) {
    return __byte_perm(word(first, j / 2), word(second, j / 2), j % 2 == 0 ? 0x5410 : 0x7632);
}
__device__ __forceinline__ uint32_t pair_of(const uint2& first, const uint2& second, int j) {
    // Byte j % 4 of both, to where `widen_fp8` takes them from.
    const uint32_t pick = 0x4000 + 0x1010 * static_cast<uint32_t>(j % 4);
    return widen_fp8(j < 4 ? __byte_perm(first.x, second.x, pick)
                           : __byte_perm(first.y, second.y, pick));
}

// Layout of the warps' sums in shared memory, one row per head: each row is offset by one bank
// against the previous one, and by 8 more every 32 dims.
template <int HEAD_DIM>
struct Mixed {
    static constexpr uint32_t WIDTH = HEAD_DIM + (HEAD_DIM - 1) / 32 * 8 + 1;

    static __device__ __forceinline__ constexpr uint32_t at(uint32_t row, uint32_t dim) {
        return row * WIDTH + dim + dim / 32 * 8;
    }
    // The dim of sum j (0 to 15) of a set that lane t of a row has.
    static __device__ __forceinline__ constexpr uint32_t dim_of(uint32_t set, uint32_t t,
                                                                uint32_t j) {
        return 64 * set + 16 * t + j;
    }
    // Whether the elements that a warp stores at once are in different banks, of which there are 32
    // of a word each.
    static __device__ constexpr bool stores_are_spread() {
        for (uint32_t step = 0; step < (HEAD_DIM + 63) / 64 * 32; step++) {
            uint32_t banks = 0;
            for (uint32_t lane = 0; lane < 32; lane++) {
                const uint32_t dim = dim_of(step / 32, lane % 4, step % 16);
                const uint32_t bit = 1u << at(lane / 4 + step % 32 / 16 * 8, dim) % 32;
                if (dim < HEAD_DIM && (banks & bit) != 0) {
                    return false;
                }
                banks |= dim < HEAD_DIM ? bit : 0;
            }
        }
        return true;
    }
    // The same for elements read at once: 32 elements of a row, or of two rows for heads of 16.
    static __device__ constexpr bool loads_are_spread() {
        for (uint32_t first = 0; first < 16 * HEAD_DIM; first += 32) {
            uint32_t banks = 0;
            uint32_t twice = 0;
            for (uint32_t i = first; i < first + 32; i++) {
                const uint32_t bit = 1u << at(i / HEAD_DIM, i % HEAD_DIM) % 32;
                twice += (banks & bit) != 0 ? 1 : 0;
                banks |= bit;
            }
            if (twice > (HEAD_DIM % 32 == 0 ? 0 : 1)) {
                return false;
            }
        }
        return true;
    }
};

// The part of a warp's next tile that is copied to shared memory ahead: pieces of 8 elements per
// lane, those of all lanes contiguous.
template <int HEAD_DIM, class Kv>
struct Ahead {
    using Piece = typename Stored<Kv>::Piece;
    static constexpr bool K = HEAD_DIM > 64 && HEAD_DIM <= 128;
    static constexpr bool V = HEAD_DIM > 64;
    static constexpr uint32_t SETS = (HEAD_DIM + 63) / 64;
    static constexpr uint32_t K_PIECES = K ? 2 * Row<HEAD_DIM>::FULL : 0;
    static constexpr uint32_t V_PIECES = V ? 4 * SETS : 0;
    static constexpr uint32_t PIECES = K_PIECES + V_PIECES;
    static_assert(!K || Row<HEAD_DIM>::REST == 0, "whole pieces of K");
    // This lane's part of the first piece.
    Piece* own;

    __device__ __forceinline__ Piece* k(uint32_t part, uint32_t i) const {
        return own + (part * Row<HEAD_DIM>::FULL + i) * 32;
    }
    __device__ __forceinline__ Piece* v(uint32_t set, uint32_t i) const {
        return own + (K_PIECES + set * 4 + i) * 32;
    }
};

}  // namespace
}  // namespace tutti
