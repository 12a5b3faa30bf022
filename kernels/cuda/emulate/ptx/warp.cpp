// Instructions of a warp: shuffles, votes, matrices. `mask` has the lanes that have met.
#include "machine.h"
#include "numbers.h"

namespace emulate::ptx {
namespace {

enum class Mode { up, down, bfly, idx };

// shfl.sync d|p, a, b, c, membermask: as the manual's pseudocode.
template <Mode MODE>
void shfl(Warp& w, const Instruction& i) {
    uint32_t d[LANES] = {};
    uint32_t within = 0;
    in_order(w.mask, [&](uint32_t lane) {
        const uint32_t bval = w.row<uint32_t>(i.at[3])[lane] & 31;
        const uint32_t c = w.row<uint32_t>(i.at[4])[lane];
        const uint32_t cval = c & 31, segmask = c >> 8 & 31;
        const auto max_lane = static_cast<int32_t>((lane & segmask) | (cval & ~segmask));
        const uint32_t min_lane = lane & segmask;
        int32_t j = 0;
        bool pval = false;
        switch (MODE) {
            case Mode::up:
                j = static_cast<int32_t>(lane) - static_cast<int32_t>(bval);
                pval = j >= max_lane;
                break;
            case Mode::down:
                j = static_cast<int32_t>(lane + bval);
                pval = j <= max_lane;
                break;
            case Mode::bfly:
                j = static_cast<int32_t>(lane ^ bval);
                pval = j <= max_lane;
                break;
            case Mode::idx:
                j = static_cast<int32_t>(min_lane | (bval & ~segmask));
                pval = j <= max_lane;
                break;
        }
        const uint32_t source = pval ? static_cast<uint32_t>(j) : lane;
        if ((w.mask >> source & 1) == 0) {
            fail_at(w, i, lane, "a shuffle from a lane outside of its mask");
        }
        d[lane] = w.row<uint32_t>(i.at[2])[source];
        within |= static_cast<uint32_t>(pval) << lane;
    });
    in_order(w.mask, [&](uint32_t lane) { w.row<uint32_t>(i.at[0])[lane] = d[lane]; });
    uint32_t& p = w.predicate(i.at[1]);
    p = (p & ~w.mask) | within;
}

void vote_any(Warp& w, const Instruction& i) {
    uint32_t& d = w.predicate(i.at[0]);
    const bool any = (w.predicate(i.at[1]) & w.mask) != 0;
    d = (d & ~w.mask) | (any ? w.mask : 0);
}
void vote_ballot(Warp& w, const Instruction& i) {
    const uint32_t votes = w.predicate(i.at[1]) & w.mask;
    in_order(w.mask, [&](uint32_t lane) { w.row<uint32_t>(i.at[0])[lane] = votes; });
}

void redux_min(Warp& w, const Instruction& i) {
    uint32_t least = ~uint32_t{0};
    in_order(w.mask, [&](uint32_t lane) {
        const uint32_t a = w.row<uint32_t>(i.at[1])[lane];
        least = a < least ? a : least;
    });
    in_order(w.mask, [&](uint32_t lane) { w.row<uint32_t>(i.at[0])[lane] = least; });
}

// Orders accesses to memory among all lanes; among some of them it is not counted.
void bar_warp_sync(Warp& w, const Instruction&) { w.barriers += w.mask == ALL ? 1 : 0; }

// Element e of a row of registers with two bf16 each.
float element(Warp& w, const Instruction& i, size_t first, uint32_t e, uint32_t lane) {
    const uint32_t pair = w.row<uint32_t>(i.at[first + e / 2])[lane];
    return of_bf16(e % 2 == 0 ? pair & 0xffff : pair >> 16);
}

// mma.m16n8k16 with .bf16: "Matrix Fragments for mma.m16n8k16 with floating point type". Operands:
// 4 registers of d, 4 of a, 2 of b, 4 of c. How tensor cores round is not described: the sum of all
// products and c is rounded once here.
void mma_m16n8k16_bf16(Warp& w, const Instruction& i) {
    double a[16][16], b[16][8], d[16][8];
    for (uint32_t lane = 0; lane < LANES; lane++) {
        const uint32_t group = lane >> 2, thread_in_group = lane % 4;
        for (uint32_t e = 0; e < 8; e++) {
            const uint32_t row = (e < 2 || (e >= 4 && e < 6)) ? group : group + 8;
            const uint32_t column = thread_in_group * 2 + (e & 1) + (e >= 4 ? 8 : 0);
            a[row][column] = element(w, i, 4, e, lane);
        }
        for (uint32_t e = 0; e < 4; e++) {
            const uint32_t row = thread_in_group * 2 + (e & 1) + (e >= 2 ? 8 : 0);
            b[row][group] = element(w, i, 8, e, lane);
        }
        for (uint32_t e = 0; e < 4; e++) {
            const uint32_t row = e < 2 ? group : group + 8;
            d[row][thread_in_group * 2 + (e & 1)] = w.row<float>(i.at[10 + e])[lane];
        }
    }
    for (uint32_t row = 0; row < 16; row++) {
        for (uint32_t k = 0; k < 16; k++) {
            for (uint32_t column = 0; column < 8; column++) {
                d[row][column] += a[row][k] * b[k][column];
            }
        }
    }
    for (uint32_t lane = 0; lane < LANES; lane++) {
        const uint32_t group = lane >> 2, thread_in_group = lane % 4;
        for (uint32_t e = 0; e < 4; e++) {
            const uint32_t row = e < 2 ? group : group + 8;
            w.row<float>(i.at[e])[lane] = static_cast<float>(d[row][thread_in_group * 2 + (e & 1)]);
        }
    }
}

// ldmatrix .m8n8.x4.b16: threads 8 i to 8 i + 7 have the addresses of rows 0 to 7 of matrix i.
// "Each thread receives a fragment of a row": thread t elements 2 (t % 4) and the next of row t /
// 4, which go to register i. With .trans the matrix is loaded in column-major format.
template <bool TRANS>
void ldmatrix_x4(Warp& w, const Instruction& i) {
    uint16_t matrices[4][8][8];
    for (uint32_t lane = 0; lane < LANES; lane++) {
        run_as(w, lane);
        memcpy(matrices[lane / 8][lane % 8], row_of_matrix(w, i, lane), 16);
    }
    for (uint32_t lane = 0; lane < LANES; lane++) {
        const uint32_t row = lane / 4, column = lane % 4 * 2;
        for (uint32_t m = 0; m < 4; m++) {
            const auto& matrix = matrices[m];
            const uint32_t low = TRANS ? matrix[column][row] : matrix[row][column];
            const uint32_t high = TRANS ? matrix[column + 1][row] : matrix[row][column + 1];
            w.row<uint32_t>(i.at[m])[lane] = high << 16 | low;
        }
    }
}

}  // namespace

const std::vector<WarpForm>& warp_instructions() {
    // m: the mask of lanes. {..}: registers in braces. a: an address in shared memory.
    static const std::vector<WarpForm> all = {
        {"shfl.sync.up.b32", "w|pwwwm", shfl<Mode::up>, Kind::warp},
        {"shfl.sync.down.b32", "w|pwwwm", shfl<Mode::down>, Kind::warp},
        {"shfl.sync.bfly.b32", "w|pwwwm", shfl<Mode::bfly>, Kind::warp},
        {"shfl.sync.idx.b32", "w|pwwwm", shfl<Mode::idx>, Kind::warp},
        {"vote.sync.any.pred", "ppm", vote_any, Kind::warp},
        {"vote.sync.ballot.b32", "wpm", vote_ballot, Kind::warp},
        {"redux.sync.min.u32", "wwm", redux_min, Kind::warp},
        {"bar.warp.sync", "m", bar_warp_sync, Kind::warp},
        {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "{wwww}{wwww}{ww}{wwww}",
         mma_m16n8k16_bf16, Kind::whole_warp},
        {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", "{wwww}a", ldmatrix_x4<false>,
         Kind::whole_warp},
        {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "{wwww}a", ldmatrix_x4<true>,
         Kind::whole_warp},
    };
    return all;
}

}  // namespace emulate::ptx
