// Group normalisation: a row is a group of an item, `channels` channels of `places` elements. Forward reads x once (a
// second and third time from the cache) and writes y; backward starts from every channel's sums (channels.cu), reads x
// and dy and writes dx.

DEVICE W or_else(const T* affine, u64 channel, W otherwise) { return affine ? widen(affine[channel]) : otherwise; }

// Calls f(j, the channel that element at + j of the row is of).
template <typename F> DEVICE void each_channel(u64 at, u64 first, u64 places, F f) {
    u64 channel = first + at / places, inside = at % places;
#pragma unroll
    for (int j = 0; j < LEN; j++) {
        f(j, channel);
        if (++inside == places) {
            inside = 0;
            channel++;
        }
    }
}

TEAM_KERNEL forward(T* y, W* stats, Rows x, const T* weight, const T* bias, f64 eps, f64 share, u64 groups, u64 channels, u64 places, u64 rows) {
    const u64 row = team_row();
    if (row >= rows) return;
    const u64 own = channels / groups, width = own * places, first = row % groups * own;
    const Line line(x, row, width, narrow<T>(W(0)));
    W variance;
    const Standard standard = standard_of<true>(line, eps, share, variance);
    if (team_rank() == 0) {
        stats[row * 3] = standard.high;
        stats[row * 3 + 1] = standard.low;
        stats[row * 3 + 2] = standard.inverse;
    }
    each_packet(width, [&](int i, i64 at) {
        Packet<T> p = line.packet(i, at);
        each_channel(at, first, places, [&](int j, u64 channel) {
            if (at + j >= width) return;
            const W x = standard.of(widen(p.at[j]));
            p.at[j] = narrow<T>(x * or_else(weight, channel, 1) + or_else(bias, channel, 0));
        });
        write_packet(y + row * width, at, width, p);
    });
}

// dx = (dy w - mean - xhat product) inverse; `parts` holds every channel's two sums of every item.
TEAM_KERNEL backward(T* dx, Rows x, Rows dy, const W* stats, const f64* parts, const T* weight, u64 groups, u64 channels, u64 places, u64 rows) {
    const u64 row = team_row();
    if (row >= rows) return;
    const u64 own = channels / groups, width = own * places, first = row % groups * own;
    const u64 item = row / groups, items = rows / groups;
    W mean = 0, product = 0;
    for (u64 c = first + team_rank(); c < first + own; c += TEAM) {
        const W w = or_else(weight, c, 1);
        mean += W(parts[(2 * c) * items + item]) * w;
        product += W(parts[(2 * c + 1) * items + item]) * w;
    }
    mean = team_sum(mean) / W(width);
    product = team_sum(product) / W(width);
    const Standard standard = {stats[row * 3], stats[row * 3 + 1], stats[row * 3 + 2]};
    const T zero = narrow<T>(W(0));
    const Line values(x, row, width, zero), slopes(dy, row, width, zero);
    each_packet(width, [&](int i, i64 at) {
        Packet<T> p = values.packet(i, at);
        const Packet<T> q = slopes.packet(i, at);
        each_channel(at, first, places, [&](int j, u64 channel) {
            if (at + j >= width) return;
            const W g = widen(q.at[j]) * or_else(weight, channel, 1);
            p.at[j] = narrow<T>((g - mean - standard.of(widen(p.at[j])) * product) * standard.inverse);
        });
        write_packet(dx + row * width, at, width, p);
    });
}
