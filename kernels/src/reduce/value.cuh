// Elements of any type as the numbers that they are merged in, and back. Macros: STORED, VALUE, RESULT: the types of
// elements, numbers and results.
#pragma once

typedef VALUE Value;

template <typename S> DEVICE Value value_of(S x) { return (Value)x; }
DEVICE Value value_of(bf16 x) { return (Value)widen(x); }
DEVICE Value value_of(f16 x) { return (Value)widen(x); }

template <typename R> DEVICE R result_of(Value x) { return (R)x; }
template <> DEVICE bf16 result_of<bf16>(Value x) { return narrow<bf16>((f32)x); }
template <> DEVICE f16 result_of<f16>(Value x) { return narrow<f16>((f32)x); }
