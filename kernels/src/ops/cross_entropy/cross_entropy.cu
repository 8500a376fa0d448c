// Cross entropy of rows of logits. Forward reads each logit once and writes two or three numbers a row; backward reads
// each once and writes its gradient: the targets are read on the device, and nothing waits for the host. Macro: RESULT, the
// type of the loss.

// A weight a class: of a packet, 1 where there are none, and 0 beyond the row's end.
DEVICE void weights_at(const T* weight, i64 at, i64 width, W (&w)[LEN]) {
    const Packet<T> p = weight ? read_packet(weight, at, width, narrow<T>(W(0))) : Packet<T>();
#pragma unroll
    for (int j = 0; j < LEN; j++) w[j] = weight ? widen(p.at[j]) : W(at + j < width);
}

// The sum of all classes' weights.
DEVICE W total_weight(const Targets& targets) {
    if (!targets.weight) return targets.classes;
    W sum = 0;
    each_packet(targets.classes, [&](int, i64 at) {
        W w[LEN];
        weights_at(targets.weight, at, targets.classes, w);
#pragma unroll
        for (int j = 0; j < LEN; j++) sum += w[j];
    });
    return team_sum(sum);
}

// Three blocks are 1,536 threads of 2,048, whose loads of a vocabulary's logits keep the memory busy.
constexpr int BLOCKS = sizeof(T) == 8 ? 1 : 3;

// `kept` numbers a row: the largest logit, the sum of the exponentials below it, and with smoothing the weighted sum of
// the logits below it. `losses` are those of the items, not yet scaled.
TEAM_KERNEL_BESIDE(BLOCKS) forward(f64* losses, W* stats, Rows x, u64 kept, f64 smoothing, Targets targets) {
    const u64 row = team_row();
    if (row >= targets.items) return;
    const i64 width = targets.classes, found = targets[row];
    stats += row * kept;
    if (found < 0) {
        if (team_rank() < kept) stats[team_rank()] = 1;
        if (team_rank() == 0) losses[row] = 0;
        return;
    }
    const Line line(x, row, width, narrow<T>(least<W>()));
    const Peak peak = peak_of(line);
    W below = 0, total = 0;
    if (kept == 3) {
        each_packet(width, [&](int i, i64 at) {
            const Packet<T> p = line.packet(i, at);
            W w[LEN];
            weights_at(targets.weight, at, width, w);
#pragma unroll
            for (int j = 0; j < LEN; j++) below += at + j < width ? (widen(p.at[j]) - peak.max) * w[j] : W(0);
        });
        below = team_sum(below);
        total = total_weight(targets);
    }
    if (team_rank() > 0) return;
    stats[0] = peak.max;
    stats[1] = peak.sum;
    if (kept == 3) stats[2] = below;
    const f64 log_sum = log((f64)peak.sum), missed = (f64)peak.max - (f64)widen(line.x[found]) + log_sum;
    const f64 even = kept == 3 ? smoothing / width * ((f64)total * log_sum - (f64)below) : 0.0;
    losses[row] = (1.0 - smoothing) * targets.weight_of(found) * missed + even;
}

// dx = slope (p sum(q) - q), for the smoothed target q; p is made again of the row's two numbers. A row has the logits of `columns`
// classes from `first` on.
TEAM_KERNEL_BESIDE(BLOCKS) backward(T* dx, Rows x, const W* stats, u64 kept, const RESULT* dy, u64 dy_step, Factor factor, f64 smoothing, u64 first, u64 columns, Targets targets) {
    const u64 row = team_row();
    if (row >= targets.items) return;
    const i64 width = columns, found = targets[row];
    const Line line(x, row, found < 0 ? 0 : width, narrow<T>(W(0)));
    dx += row * width;
    if (found < 0) {
        Packet<T> zeros = {};
        each_packet(width, [&](int, i64 at) { write_packet(dx, at, width, zeros); });
        return;
    }
    const bool smooth = smoothing != 0.0;
    const f64 slope = (f64)widen(dy[row * dy_step]) * factor.value(), share = smoothing / targets.classes;
    const f64 of_class = slope * (1.0 - smoothing) * targets.weight_of(found);
    const f64 all = of_class + (smooth ? slope * share * (f64)total_weight(targets) : 0.0);
    const W max = stats[row * kept], scale = all / (f64)stats[row * kept + 1];
    const W on_target = of_class, even = slope * share;
    map_row(dx, line, [&](i64 at, W x) {
        W gradient = exp(x - max) * scale;
        if (smooth && at >= 0 && at < width) gradient -= even * (targets.weight ? widen(targets.weight[first + at]) : W(1));
        return (i64)first + at == found ? gradient - on_target : gradient;
    });
}

// q itself, times the factor.
TEAM_KERNEL targets(RESULT* q, Factor factor, f64 smoothing, Targets targets) {
    const u64 row = team_row();
    if (row >= targets.items) return;
    const i64 width = targets.classes, found = targets[row];
    const f64 scale = factor.value(), share = smoothing / width;
    for (i64 at = team_rank(); at < width; at += TEAM) {
        const f64 even = scale * share * targets.weight_of(at);
        const f64 own = at == found ? scale * (1.0 - smoothing) * targets.weight_of(found) : 0.0;
        q[row * width + at] = narrow<RESULT>(W(found < 0 ? 0.0 : even + own));
    }
}
