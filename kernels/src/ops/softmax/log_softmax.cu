// The logarithm of rows' softmax, and its gradient. Moves what softmax moves.

TEAM_KERNEL forward(T* y, Rows x, u64 rows, u64 width) {
    const u64 row = team_row();
    if (row >= rows) return;
    const Line line(x, row, width, narrow<T>(least<W>()));
    const Peak peak = peak_of(line);
    const W log_sum = log(peak.sum);
    map_row(y + row * width, line, [&](i64, W x) { return (x - peak.max) - log_sum; });
}

// dx = dy - e^y sum(dy)
TEAM_KERNEL backward(T* dx, Rows y, Rows dy, u64 rows, u64 width) {
    const u64 row = team_row();
    if (row >= rows) return;
    const T zero = narrow<T>(W(0));
    const Line values(y, row, width, zero);
    const Line slopes(dy, row, width, zero);
    W sum = 0;
    each_packet(width, [&](int i, i64 at) {
        const Packet<T> p = slopes.packet(i, at);
#pragma unroll
        for (int j = 0; j < LEN; j++) sum += widen(p.at[j]);
    });
    sum = team_sum(sum);
    map_rows(dx + row * width, values, slopes, [&](i64, W y, W dy) { return dy - exp(y) * sum; });
}
