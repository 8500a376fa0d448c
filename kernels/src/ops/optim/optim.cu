// Steps of an optimizer over many tensors in one launch: parameters, master copies and states, in place.
//
// A block takes a stretch of one tensor, which it finds in the table by its number; a thread takes 16 bytes of the parameter
// at a time, and what belongs to them of the rest. Moves each gradient once in; each parameter, or its master copy
// instead, and each state once in and once out; a parameter with a master copy once out.
//
// PARAM, GRAD: the types of parameters and gradients; MASTER: 1 if there are master copies, which the parameters are rounded
// from; STATES: how many states there are; TENSORS: rows of the table; FUNCTION: the rule, noted from the CPU's statement of
// it (trace.rs): of the parameter, the gradient and the states, giving the parameter and the states.

typedef PARAM P;
typedef GRAD G;
typedef Wide<P> W;
struct Rule FUNCTION;

constexpr int LANES = 16 / sizeof(P), THREADS = 256, TURNS = 4;
constexpr u64 STRETCH = (u64)THREADS * LANES * TURNS;

struct Row {
    P* param;
    W* master;
    const G* grad;
    W* state[STATES ? STATES : 1];
    u64 length, first_block;
};

struct Table {
    Row rows[TENSORS];
};

template <int LEN, typename E> DEVICE void take(W (&to)[LEN], const E* p) {
    if (LEN == 1) {
        to[0] = widen(*p);
        return;
    }
    constexpr int EACH = Packet<E>::LEN;
#pragma unroll
    for (int i = 0; i < LEN; i += EACH) {
        const Packet<E> packet = load(p + i);
#pragma unroll
        for (int l = 0; l < EACH && i + l < LEN; l++) to[i + l] = widen(packet.at[l]);
    }
}

template <int LEN, typename E> DEVICE void put(E* p, const W (&from)[LEN]) {
    if (LEN == 1) {
        *p = narrow<E>(from[0]);
        return;
    }
    constexpr int EACH = Packet<E>::LEN;
#pragma unroll
    for (int i = 0; i < LEN; i += EACH) {
        Packet<E> packet;
#pragma unroll
        for (int l = 0; l < EACH && i + l < LEN; l++) packet.at[l] = narrow<E>(from[i + l]);
        store(p + i, packet);
    }
}

template <int LEN> DEVICE void step(const Row& row, const Rule& rule, W scale, u64 i) {
    W p[LEN], g[LEN], s[STATES + 1][LEN];
    take(g, row.grad + i);
    if (MASTER) take(p, row.master + i);
    else take(p, row.param + i);
#pragma unroll
    for (int n = 0; n < STATES; n++) take(s[n], row.state[n] + i);
#pragma unroll
    for (int l = 0; l < LEN; l++) {
        W x[2 + STATES], y[1 + STATES];
        x[0] = p[l];
        x[1] = vec::mul(g[l], scale);
#pragma unroll
        for (int n = 0; n < STATES; n++) x[2 + n] = s[n][l];
        rule(x, y);
        p[l] = y[0];
#pragma unroll
        for (int n = 0; n < STATES; n++) s[n][l] = y[1 + n];
    }
    if (MASTER) put(row.master + i, p);
    put(row.param + i, p);
#pragma unroll
    for (int n = 0; n < STATES; n++) put(row.state[n] + i, s[n]);
}

DEVICE bool is_aligned(const Row& row) {
    u64 all = (u64)row.param | (u64)row.master | (u64)row.grad;
#pragma unroll
    for (int n = 0; n < STATES; n++) all |= (u64)row.state[n];
    return (all & 15) == 0;
}

// `numbers`, if there are such, are the rule's and then the scale; `factor`, of either type, multiplies the scale.
// If their product is not finite, nothing changes.
extern "C" __global__ void __launch_bounds__(THREADS)
    update(const __grid_constant__ Table table, u64 tensors, Rule rule, f64 scale, const f64* numbers, const f32* factor,
           const f64* wide_factor) {
    u32 low = 0, high = (u32)tensors;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (table.rows[middle].first_block <= blockIdx.x) low = middle;
        else high = middle;
    }
    const Row& row = table.rows[low];
    if (numbers) {
        constexpr int COUNT = sizeof(rule.k) / sizeof(W);
#pragma unroll
        for (int i = 0; i < COUNT; i++) rule.k[i] = (W)numbers[i];
        scale = numbers[COUNT];
    }
    if (factor) scale *= (f64)*factor;
    if (wide_factor) scale *= *wide_factor;
    if (scale - scale != 0.0) return;  // NaN or infinite
    const u64 begin = (blockIdx.x - row.first_block) * STRETCH, end = min(begin + STRETCH, row.length);
    u64 at = begin;
    if (is_aligned(row)) {
        const u64 whole = begin + (end - begin) / LANES * LANES;
        for (u64 i = begin + threadIdx.x * LANES; i < whole; i += THREADS * LANES) step<LANES>(row, rule, (W)scale, i);
        at = whole;
    }
    for (u64 i = at + threadIdx.x; i < end; i += THREADS) step<1>(row, rule, (W)scale, i);
}
