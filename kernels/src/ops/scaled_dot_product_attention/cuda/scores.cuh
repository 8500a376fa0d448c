// Scores on their way to a softmax: scale, mask, and sums of exponentials below the largest score so far. Fragments are those
// of a warp's rows (tile.cuh), of products of warps and of warpgroups alike.

// Scores are kept as products; `unit` is what they are multiplied with to be exponents of 2, above 0 always.
struct Scale {
    f32 unit, factor;

    DEVICE explicit Scale(const Problem& p) {
        const f32 scale = (f32)p.scale * (f32)LOG2_E;
        const bool plain = !BIASED && scale > 0;
        unit = plain ? scale : 1;
        factor = plain ? 1 : scale;
    }
};

// Applies scale, mask and limits to a warp's scores of queries `query ..` and keys `key ..`.
template <int M, int N> DEVICE void finish(f32 (&s)[M][N][4], const Problem& p, Place at, f32 factor, int query, int key) {
    constexpr int KEYS = N * 8;
    const int g = lane_number() / 4, t = lane_number() % 4;
    if (BIASED || factor != 1) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[m][n][i] *= factor;
                    if (BIASED)
                        s[m][n][i] += (f32)LOG2_E * bias_at(p, at.item, at.head, query + m * 16 + i / 2 * 8 + g, key + n * 8 + 2 * t + i % 2);
                }
    }
    if (key + KEYS > p.keys || (p.causal && key + KEYS > query + 1)) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int end = p.keys_before(query + m * 16 + i / 2 * 8 + g + 1) - key - 2 * t - i % 2;
#pragma unroll
                for (int n = 0; n < N; n++)
                    if (n * 8 >= end) s[m][n][i] = least<f32>();
            }
    }
    if (CUT && key < first_key(p, at.item, at.head, query + 16 * M - 1)) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int start = first_key(p, at.item, at.head, query + m * 16 + half * 8 + g) - key - 2 * t;
#pragma unroll
                for (int n = 0; n < N; n++) {
                    if (n * 8 < start) s[m][n][half * 2] = least<f32>();
                    if (n * 8 + 1 < start) s[m][n][half * 2 + 1] = least<f32>();
                }
            }
    }
}

// Scores of two rows become exponentials below the largest score so far; what earlier sums are to be multiplied with.
template <int N> DEVICE void exponentials(f32 (&s)[N][4], f32 (&largest)[2], f32 (&sum)[2], f32 (&shrink)[2], f32 unit) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        f32 high = largest[half];
#pragma unroll
        for (int n = 0; n < N; n++) high = fmaxf(high, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
        high = warp_max<4>(high);
        // Of rows that saw nothing yet all exponentials are to be 0.
        const f32 base = high == least<f32>() ? 0 : high * unit;
        shrink[half] = exp2_fast(largest[half] * unit - base);
        largest[half] = high;
        sum[half] *= shrink[half];
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = half * 2; i < half * 2 + 2; i++) {
                s[n][i] = exp2_fast(s[n][i] * unit - base);
                sum[half] += s[n][i];
            }
    }
}

// Multiplies two rows.
DEVICE void multiply(f32 (&o)[CHUNKS][4], const f32 (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < CHUNKS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[n][i] *= factor[i / 2];
}

// Ends the sums of queries `query` and `query + 8`: keeps what backward needs, and returns the sums' inverses.
DEVICE void end_rows(f32 (&inverse)[2], const f32 (&largest)[2], const f32 (&sum)[2], const Problem& p, Place at, f32 unit,
                     int query) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const f32 total = warp_sum<4>(sum[half]), high = largest[half];
        const int number = query + half * 8;
        inverse[half] = total == 0 ? 0 : 1 / total;
        if (lane_number() % 4 == 0 && number < p.queries) {
            W* stats = p.stats + (((i64)at.item * p.heads + at.head) * p.queries + number) * 2;
            stats[0] = high == least<f32>() ? 0 : high * (unit / (f32)LOG2_E);
            stats[1] = inverse[half];
        }
    }
}
