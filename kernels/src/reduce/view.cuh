// A tensor as [outer, n, inner], to be reduced over n.
//
// Macros: ELEMENT, COMPUTED (the type that terms are computed in), TERMS (numbers an output), TERM, MERGE (bodies of
// structures, from the CPU's), RESULT, FINISH.
#pragma once

struct View {
    const ELEMENT* data;
    u64 inner, n, outputs;
    // Output `o` of `outer` begins at o / outer_run * outer_strides[0] + o % outer_run * outer_strides[1].
    u64 outer_run, outer_strides[2];
    // Likewise element r of n.
    u64 run, run_strides[2];

    DEVICE const ELEMENT* begin(u64 o) const {
        return data + o / outer_run * outer_strides[0] + o % outer_run * outer_strides[1];
    }
    DEVICE u64 place(u64 r) const { return run == n ? r * run_strides[1] : r / run * run_strides[0] + r % run * run_strides[1]; }
};

// Which elements of n a block takes.
struct Part {
    i64 first, end;

    DEVICE Part(u64 n, u64 len) : first(blockIdx.y * len), end(min((blockIdx.y + 1) * len, n)) {}
};

namespace computed {
typedef COMPUTED W;
struct Term TERM;
struct Merge MERGE;
}  // namespace computed
namespace total {
typedef f64 W;
struct Merge MERGE;
}  // namespace total

// What is known of an output so far: numbers in f64.
struct Numbers {
    f64 x[TERMS];

    DEVICE explicit Numbers(f64 start) {
#pragma unroll
        for (int k = 0; k < TERMS; k++) x[k] = start;
    }
    DEVICE void merge(const f64* other) {
        const total::Merge merge = {};
#pragma unroll
        for (int k = 0; k < TERMS; k++) {
            const f64 both[2] = {x[k], other[k]};
            merge(both, x + k);
        }
    }
};

// A few elements' terms, in the type that they are computed in, on their way to `Numbers`.
struct Few {
    COMPUTED x[TERMS];

    DEVICE explicit Few(f64 start) {
#pragma unroll
        for (int k = 0; k < TERMS; k++) x[k] = start;
    }
    DEVICE void add(const computed::Term& term, COMPUTED element, COMPUTED shift) {
        const computed::Merge merge = {};
        const COMPUTED arguments[2] = {element, shift};
        COMPUTED terms[TERMS];
        term(arguments, terms);
#pragma unroll
        for (int k = 0; k < TERMS; k++) {
            const COMPUTED both[2] = {x[k], terms[k]};
            merge(both, x + k);
        }
    }
    DEVICE void join(Numbers& numbers) const {
        f64 wide[TERMS];
#pragma unroll
        for (int k = 0; k < TERMS; k++) wide[k] = x[k];
        numbers.merge(wide);
    }
};

struct MergeTotal {
    DEVICE f64 operator()(f64 a, f64 b) const {
        const f64 both[2] = {a, b};
        f64 result;
        total::Merge()(both, &result);
        return result;
    }
};

DEVICE void set(RESULT* out, u64 o, f64 x) { out[o] = narrow<RESULT>(Wide<RESULT>(x)); }

// Where results go: numbers of each part, or, if there is one only, what FINISH makes of them: statements of `x`, the
// numbers; `a` and `b`; `shift`; `out` and `o`, the output's place.
struct Output {
    RESULT* out;
    f64* parts;
    f64 a, b;

    DEVICE void put(u64 o, u64 outputs, const f64* x, f64 shift) const {
        if (!parts) {
            FINISH;
            return;
        }
        for (int k = 0; k < TERMS; k++) parts[(o * TERMS + k) * gridDim.y + blockIdx.y] = x[k];
    }
};
