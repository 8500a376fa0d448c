// The negative log likelihood: a thread an item, which reads one element or writes one.

typedef ELEMENT T;

struct Rows {
    const T* data;
    u64 stride;
};

extern "C" __global__ void __launch_bounds__(256) forward(f64* losses, Rows x, Targets targets) {
    const u64 item = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= targets.items) return;
    const i64 found = targets[item];
    losses[item] = found < 0 ? 0.0 : -targets.weight_of(found) * (f64)widen(x.data[item * x.stride + found]);
}

// Into zeros.
extern "C" __global__ void __launch_bounds__(256)
    backward(T* dx, const T* dy, u64 dy_step, Factor factor, Targets targets) {
    const u64 item = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= targets.items) return;
    const i64 found = targets[item];
    if (found < 0) return;
    const f64 slope = (f64)widen(dy[item * dy_step]) * factor.value();
    dx[item * targets.classes + found] = narrow<T>(Wide<T>(-targets.weight_of(found) * slope));
}
