// What becomes of the items' losses: one block reads eight bytes an item (and the items' targets), in an order that
// their number decides. Macro: RESULT, the type of the loss.

// The weights of all items that count, added by the block.
DEVICE f64 weight_of_all(const Targets& targets) {
    f64 sum = 0;
    for (u64 i = threadIdx.x; i < targets.items; i += blockDim.x) {
        const i64 found = targets[i];
        if (found >= 0) sum += targets.weight_of(found);
    }
    return block_sum(sum);
}

// The mean's factor: `scale` over the weights of the items that count.
extern "C" __global__ void __launch_bounds__(1024) factor(f64* to, f64 scale, Targets targets) {
    const f64 total = weight_of_all(targets);
    if (threadIdx.x == 0) *to = scale / total;
}

// The sum of the losses, or with `mean` their mean. A factor that is infinite, since nothing counts, makes NaN of it.
extern "C" __global__ void __launch_bounds__(1024)
    reduce(RESULT* loss, const f64* losses, u64 mean, f64 scale, Targets targets) {
    f64 sum = 0;
    for (u64 i = threadIdx.x; i < targets.items; i += blockDim.x) sum += losses[i];
    sum = block_sum(sum);
    if (mean) scale /= weight_of_all(targets);
    if (threadIdx.x == 0) *loss = narrow<RESULT>(Wide<RESULT>(sum * scale));
}

// Each loss.
extern "C" __global__ void __launch_bounds__(256) each(RESULT* loss, const f64* losses, f64 scale, u64 items) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < items; i += step)
        loss[i] = narrow<RESULT>(Wide<RESULT>(losses[i] * scale));
}
