// An expression of elements of any type: EXPRESSION of `x[0]`, `x[1]`, .. in the type VALUE, of the numbers `k[0]`, .. of
// type NUMBER, and of the element's number `i`. Loops, and the bytes that they move: elements.cuh.

// Integers wrap.
DEVICE i64 wrapping_add(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
DEVICE i64 wrapping_sub(i64 a, i64 b) { return (i64)((u64)a - (u64)b); }
DEVICE i64 wrapping_mul(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }

// By repeated squaring; a negative exponent gives the truncated inverse, 0 for 0.
DEVICE i64 power(i64 base, i64 exponent) {
    if (exponent < 0 && base != 1 && base != -1) return 0;
    u64 left = exponent < 0 ? -(u64)exponent : (u64)exponent;
    i64 result = 1;
    for (; left > 0; left >>= 1) {
        if (left & 1) result = wrapping_mul(result, base);
        base = wrapping_mul(base, base);
    }
    return result;
}

// Quotients that go down and remainders with the divisor's sign; of integers by 0 they are 0.
DEVICE f64 floor_remainder(f64 a, f64 b) {
    const f64 rest = fmod(a, b);
    return rest != 0 && (b < 0) != (rest < 0) ? rest + b : rest;
}
DEVICE i64 floor_remainder(i64 a, i64 b) {
    const i64 rest = b == 0 || b == -1 ? 0 : a % b;
    return rest != 0 && (b < 0) != (rest < 0) ? rest + b : rest;
}
DEVICE f64 floor_quotient(f64 a, f64 b) {
    if (b == 0) return a / b;
    const f64 rest = fmod(a, b);
    const f64 quotient = (a - rest) / b - (rest != 0 && (b < 0) != (rest < 0) ? 1.0 : 0.0), down = floor(quotient);
    return quotient - down > 0.5 ? down + 1 : down;
}
DEVICE i64 floor_quotient(i64 a, i64 b) {
    if (b == 0) return 0;
    if (b == -1) return wrapping_sub(0, a);
    const i64 rest = a % b;
    return a / b - (rest != 0 && (b < 0) != (rest < 0) ? 1 : 0);
}

// ln(e^a + e^b)
DEVICE f64 log_add(f64 a, f64 b) {
    if (a == b) return a + 0.6931471805599453;
    const f64 high = a > b ? a : b, low = a > b ? b : a;
    if (isinf(high) && low == low) return high;
    return high + log1p(exp(low - high));
}

DEVICE f64 interpolated(f64 start, f64 end, f64 weight) {
    const f64 way = end - start;
    return fabs(weight) < 0.5 ? start + weight * way : end - way * (1 - weight);
}

// Conversions as the CPU's: to nearest even; a float truncates to an integer, saturates (a byte is the low bits of a wide
// integer), and NaN becomes 0; an integer keeps its low bits. A half is rounded once, whatever it comes from.

// To f32 by rounding to odd, so that what is then rounded to a half is rounded as if it came from x itself.
DEVICE f32 to_odd(f64 x) {
    const f32 cut = __double2float_rz(x);
    return (f64)cut == x || x != x ? cut : __uint_as_float(__float_as_uint(cut) | 1);
}

// The bounds are powers of two, which every floating-point type holds.
template <typename T, typename F> DEVICE T saturate(F x, T least, T most, F below, F above) {
    if (x != x) return 0;
    return x <= below ? least : x >= above ? most : (T)x;
}

template <typename T> struct Convert {
    DEVICE static T from(f64 x) { return (T)x; }
    DEVICE static T from(f32 x) { return (T)x; }
    DEVICE static T from(i64 x) { return (T)x; }
};
template <typename T> struct ConvertHalf {
    DEVICE static T from(f64 x) { return narrow<T>(to_odd(x)); }
    DEVICE static T from(f32 x) { return narrow<T>(x); }
    DEVICE static T from(i64 x) { return narrow<T>(to_odd((f64)x)); }
};
template <> struct Convert<bf16> : ConvertHalf<bf16> {};
template <> struct Convert<f16> : ConvertHalf<f16> {};
template <> struct Convert<i64> {
    template <typename F> DEVICE static i64 from(F x) {
        return saturate<i64>(x, (i64)(1ull << 63), (i64)(~0ull >> 1), F(-0x1p63), F(0x1p63));
    }
    DEVICE static i64 from(i64 x) { return x; }
};
template <> struct Convert<i32> {
    template <typename F> DEVICE static i32 from(F x) {
        return saturate<i32>(x, (i32)(1u << 31), (i32)(~0u >> 1), F(-0x1p31), F(0x1p31));
    }
    DEVICE static i32 from(i64 x) { return (i32)x; }
};
template <> struct Convert<u8> {
    template <typename F> DEVICE static u8 from(F x) { return (u8)Convert<i64>::from(x); }
    DEVICE static u8 from(i64 x) { return (u8)x; }
};
template <typename T, typename A> DEVICE T convert(A a) { return Convert<T>::from(a); }

struct Each {
    typedef VALUE X;
    NUMBER k[NUMBERS];

    DEVICE OUT operator()(const X* x, u64 i) const { return (OUT)(EXPRESSION); }
};

KERNELS(Each)
