// A function of floating-point elements, noted from the CPU's statement of it (FUNCTION; trace.rs). Halves are computed
// in f32 and rounded once. Loops, and the bytes that they move: elements.cuh.

typedef Wide<OUT> W;
struct Function FUNCTION;

struct Each {
    typedef W X;
    Function f;

    DEVICE OUT operator()(const W* x, u64) const {
        W y[1];
        f(x, y);
        return narrow<OUT>(y[0]);
    }
};

KERNELS(Each)
