// The softmax of rows, and its gradient. One read (two for rows that do not fit the registers, the second from the
// cache) and one write an element.

TEAM_KERNEL forward(T* y, Rows x, u64 rows, u64 width) {
    const u64 row = team_row();
    if (row >= rows) return;
    const Line line(x, row, width, narrow<T>(least<W>()));
    const Peak peak = peak_of(line);
    const W scale = W(1) / peak.sum;
    map_row(y + row * width, line, [&](i64, W x) { return exp(x - peak.max) * scale; });
}

// dx = y (dy - sum(y dy))
TEAM_KERNEL backward(T* dx, Rows y, Rows dy, u64 rows, u64 width) {
    const u64 row = team_row();
    if (row >= rows) return;
    const T zero = narrow<T>(W(0));
    const Line values(y, row, width, zero);
    const Line slopes(dy, row, width, zero);
    W sum = 0;
    each_packet(width, [&](int i, i64 at) {
        const Packet<T> p = values.packet(i, at), q = slopes.packet(i, at);
#pragma unroll
        for (int j = 0; j < LEN; j++) sum += widen(p.at[j]) * widen(q.at[j]);
    });
    sum = team_sum(sum);
    map_rows(dx + row * width, values, slopes, [&](i64, W y, W dy) { return y * (dy - sum); });
}
