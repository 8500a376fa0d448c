// Normalisation by channels of [N, C, places]. Sums over a channel's elements are made in parts, a block each, and the
// parts added in f64 in their order; what is done to each element reads and writes it once, in packets.
//
// Macros: those of rows.cuh, and RUNNING, the type of running statistics.

struct Shape {
    u64 items, channels, places;
};

DEVICE Standard load_standard(const W* stats) { return {stats[0], stats[1], stats[2]}; }
DEVICE W or_else(const T* affine, u64 channel, W otherwise) { return affine ? widen(affine[channel]) : otherwise; }

// Sums of dy and of dy xhat. Element e of a channel is place e % places of item e / places; a block takes `part_len`
// elements. With groups a part is an item, which has statistics (`kept` numbers) a group; else a channel has its own.
extern "C" __global__ void __launch_bounds__(256, 1)
    sums(f64* parts, const T* x, const T* dy, const W* stats, u64 kept, u64 groups, u64 part_len, u64 count, Shape shape) {
    const u64 channel = blockIdx.x / count, part = blockIdx.x % count, places = shape.places;
    const u64 own = groups ? part * groups + channel * groups / shape.channels : channel;
    const Standard standard = load_standard(stats + own * kept);
    const u64 end = min((part + 1) * part_len, shape.items * places);
    const T zero = narrow<T>(W(0));
    f64 sum = 0, product = 0;
    for (u64 at = part * part_len + threadIdx.x * LEN; at < end; at += blockDim.x * LEN) {
        u64 item = at / places, inside = at - item * places;
        Packet<T> p, q;
        if (inside + LEN <= places) {
            const u64 line = (item * shape.channels + channel) * places;
            p = read_packet(x + line, inside, places, zero);
            q = read_packet(dy + line, inside, places, zero);
        } else {
#pragma unroll
            for (int j = 0; j < LEN; j++) {
                const u64 place = (item * shape.channels + channel) * places + inside;
                p.at[j] = at + j < end ? x[place] : zero;
                q.at[j] = at + j < end ? dy[place] : zero;
                if (++inside == places) {
                    inside = 0;
                    item++;
                }
            }
        }
        W few = 0, products = 0;
#pragma unroll
        for (int j = 0; j < LEN; j++) {
            const W g = at + j < end ? widen(q.at[j]) : W(0);
            few += g;
            products += g * standard.of(widen(p.at[j]));
        }
        sum += few;
        product += products;
    }
    sum = block_sum(sum);
    product = block_sum(product);
    if (threadIdx.x > 0) return;
    parts[(channel * 2) * count + part] = sum;
    parts[(channel * 2 + 1) * count + part] = product;
}

// Both sums of every channel from their parts, and of them the gradients of weight and bias: a warp a channel.
extern "C" __global__ void __launch_bounds__(128)
    join(W* sums, T* dw, T* db, const f64* parts, u64 count, u64 channels) {
    const u64 channel = (u64)blockIdx.x * 4 + warp_number();
    if (channel >= channels) return;
    f64 both[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        f64 sum = 0;
        for (u64 p = lane_number(); p < count; p += 32) sum += parts[(channel * 2 + k) * count + p];
        both[k] = warp_sum(sum);
    }
    if (lane_number() > 0) return;
    sums[channel * 2] = both[0];
    sums[channel * 2 + 1] = both[1];
    if (db) db[channel] = narrow<T>(W(both[0]));
    if (dw) dw[channel] = narrow<T>(W(both[1]));
}

// Given statistics, kept as a batch's own are.
extern "C" __global__ void __launch_bounds__(256)
    given(W* stats, const RUNNING* mean, const RUNNING* var, f64 eps, u64 channels) {
    const u64 c = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    const f64 m = widen(mean[c]), v = widen(var[c]);
    const W high = m;
    stats[4 * c] = high;
    stats[4 * c + 1] = m - (f64)high;
    stats[4 * c + 2] = 1.0 / sqrt(v + eps);
    stats[4 * c + 3] = v;
}

// `moved` = (1 - momentum) running + momentum new, for the mean (which 0) or the variance, times `unbiased`.
extern "C" __global__ void __launch_bounds__(256) update(
    RUNNING* moved, const RUNNING* running, const W* stats, u64 which, f64 momentum, f64 unbiased, u64 channels) {
    const u64 c = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    const f64 fresh = which ? (f64)stats[4 * c + 3] * unbiased : (f64)stats[4 * c] + (f64)stats[4 * c + 1];
    moved[c] = narrow<RUNNING>(Wide<RUNNING>((1.0 - momentum) * (f64)widen(running[c]) + momentum * fresh));
}

// Where the packets of all elements are, and the channel that each element is of; `F` is made for a channel.
template <typename Make, typename F> DEVICE void each_element(const Shape& shape, Make make, F f) {
    const u64 places = shape.places, total = shape.items * shape.channels * places;
    const u64 step = (u64)gridDim.x * blockDim.x * LEN;
    for (u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * LEN; i < total; i += step) {
        u64 line = i / places, inside = i - line * places, channel = line % shape.channels;
        auto own = make(channel);
        f(i, total, [&](int) {
            if (inside == places) {
                inside = 0;
                if (++channel == shape.channels) channel = 0;
                own = make(channel);
            }
            inside++;
            return own;
        });
    }
}

struct Affine {
    W high, low, scale, shift;
};

extern "C" __global__ void __launch_bounds__(256, 1)
    apply(T* y, const T* x, const W* stats, const T* weight, const T* bias, Shape shape) {
    const auto make = [&](u64 c) {
        const Standard own = load_standard(stats + 4 * c);
        return Affine{own.high, own.low, or_else(weight, c, 1) * own.inverse, or_else(bias, c, 0)};
    };
    each_element(shape, make, [&](u64 i, u64 total, auto next) {
        Packet<T> p = read_packet(x, i, total, narrow<T>(W(0)));
#pragma unroll
        for (int j = 0; j < LEN; j++) {
            const Affine own = next(j);
            p.at[j] = narrow<T>((widen(p.at[j]) - own.high - own.low) * own.scale + own.shift);
        }
        write_packet(y, i, total, p);
    });
}

struct Gradient {
    W high, low, scale, slope, shift;
};

// dx = dy scale + (x - mean) slope + shift; the last two by the batch's own statistics (n elements a channel), else 0.
extern "C" __global__ void __launch_bounds__(256, 1)
    input_gradient(T* dx, const T* x, const T* dy, const W* stats, const W* sums, const T* weight, f64 n, Shape shape) {
    const auto make = [&](u64 c) {
        const Standard own = load_standard(stats + 4 * c);
        const W scale = or_else(weight, c, 1) * own.inverse, share = n > 0 ? scale / W(n) : W(0);
        return Gradient{own.high, own.low, scale, -share * own.inverse * sums[2 * c + 1], -share * sums[2 * c]};
    };
    each_element(shape, make, [&](u64 i, u64 total, auto next) {
        const T zero = narrow<T>(W(0));
        Packet<T> p = read_packet(x, i, total, zero);
        const Packet<T> q = read_packet(dy, i, total, zero);
#pragma unroll
        for (int j = 0; j < LEN; j++) {
            const Gradient own = next(j);
            const W moved = (widen(p.at[j]) - own.high - own.low) * own.slope + own.shift;
            p.at[j] = narrow<T>(widen(q.at[j]) * own.scale + moved);
        }
        write_packet(dx, i, total, p);
    });
}
