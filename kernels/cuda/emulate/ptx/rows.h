// From a function of one lane's values to an instruction of a warp.
#pragma once
#include "machine.h"

namespace emulate::ptx {

template <auto F>
struct Mapped;
template <class D, class A, D (*F)(A)>
struct Mapped<F> {
    static void run(Warp& w, const Instruction& i) {
        D* d = w.row<D>(i.at[0]);
        const A* a = w.row<A>(i.at[1]);
        each(w.mask, [&](uint32_t lane) { d[lane] = F(a[lane]); });
    }
};
template <class D, class A, class B, D (*F)(A, B)>
struct Mapped<F> {
    static void run(Warp& w, const Instruction& i) {
        D* d = w.row<D>(i.at[0]);
        const A* a = w.row<A>(i.at[1]);
        const B* b = w.row<B>(i.at[2]);
        each(w.mask, [&](uint32_t lane) { d[lane] = F(a[lane], b[lane]); });
    }
};
template <class D, class A, class B, class C, D (*F)(A, B, C)>
struct Mapped<F> {
    static void run(Warp& w, const Instruction& i) {
        D* d = w.row<D>(i.at[0]);
        const A* a = w.row<A>(i.at[1]);
        const B* b = w.row<B>(i.at[2]);
        const C* c = w.row<C>(i.at[3]);
        each(w.mask, [&](uint32_t lane) { d[lane] = F(a[lane], b[lane], c[lane]); });
    }
};
template <class D, class A, class B, class C, class E, D (*F)(A, B, C, E)>
struct Mapped<F> {
    static void run(Warp& w, const Instruction& i) {
        D* d = w.row<D>(i.at[0]);
        const A* a = w.row<A>(i.at[1]);
        const B* b = w.row<B>(i.at[2]);
        const C* c = w.row<C>(i.at[3]);
        const E* e = w.row<E>(i.at[4]);
        each(w.mask, [&](uint32_t lane) { d[lane] = F(a[lane], b[lane], c[lane], e[lane]); });
    }
};
template <auto F>
constexpr Execute map = Mapped<F>::run;

// The predicates of all lanes are the bits of a word.
template <auto F>
struct OfPredicates;
template <uint32_t (*F)(uint32_t)>
struct OfPredicates<F> {
    static void run(Warp& w, const Instruction& i) {
        uint32_t& d = w.predicate(i.at[0]);
        d = (d & ~w.mask) | (F(w.predicate(i.at[1])) & w.mask);
    }
};
template <uint32_t (*F)(uint32_t, uint32_t)>
struct OfPredicates<F> {
    static void run(Warp& w, const Instruction& i) {
        uint32_t& d = w.predicate(i.at[0]);
        d = (d & ~w.mask) | (F(w.predicate(i.at[1]), w.predicate(i.at[2])) & w.mask);
    }
};
template <auto F>
constexpr Execute predicates = OfPredicates<F>::run;

template <auto F>
struct Compared;
template <class T, bool (*F)(T, T)>
struct Compared<F> {
    static void run(Warp& w, const Instruction& i) {
        const T* a = w.row<T>(i.at[1]);
        const T* b = w.row<T>(i.at[2]);
        uint32_t yes = 0;
        each(w.mask, [&](uint32_t lane) {
            yes |= static_cast<uint32_t>(F(a[lane], b[lane])) << lane;
        });
        uint32_t& d = w.predicate(i.at[0]);
        d = (d & ~w.mask) | yes;
    }
};
template <auto F>
constexpr Execute compare = Compared<F>::run;

template <class T>
void select(Warp& w, const Instruction& i) {
    T* d = w.row<T>(i.at[0]);
    const T* a = w.row<T>(i.at[1]);
    const T* b = w.row<T>(i.at[2]);
    const uint32_t p = w.predicate(i.at[3]);
    each(w.mask, [&](uint32_t lane) { d[lane] = (p >> lane & 1) != 0 ? a[lane] : b[lane]; });
}

}  // namespace emulate::ptx
