// Rows standardised: the mean in two parts, `high` the rounded mean and `low` what it leaves, so that a spread small
// beside the mean keeps its digits; and the inverse deviation.
#pragma once

struct Standard {
    W high, low, inverse;

    DEVICE W of(W x) const { return (x - high - low) * inverse; }
};

// The sums of `x - shift` and of its square over a row (a Line, or what has packets and a width as that).
template <typename L> DEVICE void moments(const L& x, W shift, W& rest, W& squares) {
    rest = squares = 0;
    each_packet(x.width, [&](int i, i64 at) {
        const Packet<T> p = x.packet(i, at);
#pragma unroll
        for (int j = 0; j < LEN; j++) {
            const W d = at + j < x.width ? widen(p.at[j]) - shift : W(0);
            rest += d;
            squares += d * d;
        }
    });
    rest = team_sum(rest);
    squares = team_sum(squares);
}

// Of a row of 1 / share elements; without a mean if not WITH_MEAN.
template <bool WITH_MEAN, typename L> DEVICE Standard standard_of(const L& x, f64 eps, f64 share, W& variance) {
    Standard row = {0, 0, 0};
    W rest, squares;
    if (WITH_MEAN) {
        W sum = 0;
        each_packet(x.width, [&](int i, i64 at) {
            const Packet<T> p = x.packet(i, at);
#pragma unroll
            for (int j = 0; j < LEN; j++) sum += at + j < x.width ? widen(p.at[j]) : W(0);
        });
        row.high = team_sum(sum) * W(share);
    }
    moments(x, row.high, rest, squares);
    if (WITH_MEAN) row.low = rest * W(share);
    variance = squares * W(share) - row.low * row.low;
    row.inverse = W(1) / sqrt(variance + W(eps));
    return row;
}
