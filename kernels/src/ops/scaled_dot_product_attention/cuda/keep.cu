// What the dropout multiplies attention's probabilities with, as a tensor: 0 or `keep_scale`.
//
// Parallel: a thread draws 32 keys of a query at a time. Bytes: written, the T x S elements.

extern "C" __global__ void __launch_bounds__(256) attention_keep(const __grid_constant__ Problem p) {
    const u64 words = blocks_of(p.keys, 32), all = (u64)p.batches * p.heads * p.queries * words;
    const T scale = narrow<T>((W)p.keep_scale), none = narrow<T>(0);
    const Stream stream = p.draws.stream();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += (u64)gridDim.x * blockDim.x) {
        const u64 row = i / words, head = row / p.queries;
        const int key = i % words * 32;
        const u32 bits = kept(p, stream, head / p.heads, head % p.heads, row % p.queries, key);
        for (int k = 0; k < 32 && key + k < p.keys; k++) p.out.data[row * p.keys + key + k] = bits >> k & 1 ? scale : none;
    }
}
