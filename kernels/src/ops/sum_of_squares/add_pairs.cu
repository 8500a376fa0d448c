// x[to] += x[from] for each pair of places, one after another.
//
// One thread, since the order counts. The sum that pairs in a row add to stays in a register.

constexpr int PAIRS = 480;

struct Pairs {
    u32 to_from[PAIRS][2];
};

extern "C" __global__ void add_pairs(f64* x, u64 count, const __grid_constant__ Pairs pairs) {
    if (count == 0) return;
    u32 at = pairs.to_from[0][0];
    f64 sum = x[at];
    for (u64 i = 0; i < count; i++) {
        const u32 to = pairs.to_from[i][0], from = pairs.to_from[i][1];
        if (to != at) {
            x[at] = sum;
            at = to;
            sum = x[at];
        }
        sum += from == at ? sum : x[from];
    }
    x[at] = sum;
}
