// Whether there is a NaN: sets `found` if so, which must hold 0 before.
//
// Threads stride by the grid over packets of 16 bytes; each element is read once. Those that find one write the same, so
// that their order does not matter.

typedef ELEM T;

extern "C" __global__ void any_nan(u8* found, const T* x, u64 n) {
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    const u64 head = is_aligned16(x) ? n / Packet<T>::LEN : 0;
    bool here = false;
    for (u64 p = thread; p < head; p += threads) {
        const Packet<T> packet = load(x + p * Packet<T>::LEN);
#pragma unroll
        for (int l = 0; l < Packet<T>::LEN; l++) here |= widen(packet.at[l]) != widen(packet.at[l]);
    }
    for (u64 i = head * Packet<T>::LEN + thread; i < n; i += threads) here |= widen(x[i]) != widen(x[i]);
    if (here) *found = 1;
}
