// The CPU's vector operations that CUDA C++ has no function of the same meaning for.
//
// Sums, products, quotients and roots are rounded each, as on the CPU: the compiler contracts none of them into fused
// ones, so that both give the same bits.
#pragma once

namespace vec {

DEVICE f32 add(f32 a, f32 b) { return __fadd_rn(a, b); }
DEVICE f64 add(f64 a, f64 b) { return __dadd_rn(a, b); }
DEVICE f32 sub(f32 a, f32 b) { return __fsub_rn(a, b); }
DEVICE f64 sub(f64 a, f64 b) { return __dsub_rn(a, b); }
DEVICE f32 mul(f32 a, f32 b) { return __fmul_rn(a, b); }
DEVICE f64 mul(f64 a, f64 b) { return __dmul_rn(a, b); }
DEVICE f32 div(f32 a, f32 b) { return __fdiv_rn(a, b); }
DEVICE f64 div(f64 a, f64 b) { return __ddiv_rn(a, b); }
DEVICE f32 sqrt(f32 a) { return __fsqrt_rn(a); }
DEVICE f64 sqrt(f64 a) { return __dsqrt_rn(a); }

// With a NaN on either side, and for two zeros, the second one.
template <typename W> DEVICE W min(W a, W b) { return a < b ? a : b; }
template <typename W> DEVICE W max(W a, W b) { return a > b ? a : b; }

// NaN where either is.
template <typename W> DEVICE W nan_min(W a, W b) { return a < b || a != a ? a : b; }
template <typename W> DEVICE W nan_max(W a, W b) { return a > b || a != a ? a : b; }

// Both tails keep their digits: nothing is subtracted from 1.
template <typename W> DEVICE W sigmoid(W x) {
    const W e = exp(-fabs(x));
    const W inverse = div(W(1), add(W(1), e));
    return x >= W(0) ? inverse : mul(e, inverse);
}

}  // namespace vec
