// What attention's backward pass needs of each query beside what the forward pass kept: the logsumexp of its scores in
// base 2, and delta, the sum of dy y.
//
// Parallel: eight lanes a query, 32 queries a block; a lane adds every eighth packet, then the lanes add up.
// Bytes: y and dy read once, 2 E elements a query; written: two numbers.

constexpr int THREADS = 256, LANES = 8;

extern "C" __global__ void __launch_bounds__(THREADS) attention_sums(const __grid_constant__ Problem p) {
    constexpr int LEN = Packet<T>::LEN;
    const i64 rows = (i64)p.batches * p.heads * p.queries, row = ((i64)blockIdx.x * THREADS + threadIdx.x) / LANES;
    const i64 mine = min(row, rows - 1);
    const int query = mine % p.queries, head = mine / p.queries % p.heads, item = mine / p.queries / p.heads;
    const T* y = p.out.at(item, head) + query * p.out.row;
    const T* dy = p.dy.at(item, head) + query * p.dy.row;
    W sum = 0;
    for (int column = threadIdx.x % LANES * LEN; column < p.value_depth; column += LANES * LEN) {
        Packet<T> a, b;
        if (PACKETS) {
            a = load_streaming(y + column);
            b = load_streaming(dy + column);
        } else {
#pragma unroll
            for (int i = 0; i < LEN; i++) {
                const bool valid = column + i < p.value_depth;
                a.at[i] = valid ? y[column + i] : narrow<T>(0);
                b.at[i] = valid ? dy[column + i] : narrow<T>(0);
            }
        }
#pragma unroll
        for (int i = 0; i < LEN; i++) sum += widen(a.at[i]) * widen(b.at[i]);
    }
    sum = warp_sum<LANES>(sum);
    if (threadIdx.x % LANES == 0 && row < rows) {
        // A query that saw nothing has inverse 0, and infinity makes its probabilities 0.
        p.sums[row] = p.stats[row * 2] * W(LOG2_E) - log2(p.stats[row * 2 + 1]);
        p.sums[rows + row] = sum;
    }
}
